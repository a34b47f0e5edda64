"""The evaluation set: which users are evaluated, and which items their held-out item is ranked with.

It depends on the dataset alone (its seed included), never on a training run's seed, a batch size or a device.
docs/protocol.md says exactly what is held out, drawn and ranked.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ncf.data.history import Histories
from ncf.data.interactions import Interactions
from ncf.data.shard import AnyDataset
from ncf.data.unseen import PAD, UnseenItems, evaluation_negatives
from ncf.errors import InputError, NcfWarning
from ncf.parallel.group import SINGLE, ProcessGroup


@dataclass(frozen=True)
class EvalSet:
    """E users of this process, each with one held-out item, and its competitors; sizes are over all processes."""

    split: str  # validation or test
    users: Tensor  # [E] int64, ascending
    positives: Tensor  # [E] int64
    unseen: UnseenItems
    negatives: Tensor | None  # [E, n] int32 padded with PAD; None ranks the whole unseen catalogue
    protocol: str  # the negatives in words
    skipped: int  # users with a held-out item but no other item left to rank it with
    evaluated: int  # users, at least one
    candidates: int  # the most items that a user's held-out item is ranked among, itself included
    pairs: int  # user-item pairs that are scored
    history: Tensor | None = None  # [E, L] what each user did before, if the network reads it

    def to(self, device: torch.device) -> "EvalSet":
        """The same on another device."""
        negatives = None if self.negatives is None else self.negatives.to(device)
        return replace(
            self,
            users=self.users.to(device),
            positives=self.positives.to(device),
            unseen=self.unseen.to(device),
            negatives=negatives,
            history=None if self.history is None else self.history.to(device),
        )


def make_eval_set(
    dataset: AnyDataset, split: str, valid_negative: int | str, group: ProcessGroup = SINGLE, *, history: int = 0
) -> EvalSet:
    """The evaluation set of the `validation` or `test` split, with `valid_negative` unseen items per user, or `all`.

    Negatives that came with the log (He's files) serve where the split is `test` and their number is the one asked
    for; one that repeats or equals the positive is left out. `history` is how much the network reads of each user.
    Warns of users with fewer unseen items than asked for. Of several processes each has its own users'. Raises
    InputError where the dataset holds nothing out for the split.
    """
    mine = dataset.interactions
    heldout = mine.heldout(split)
    users = torch.nonzero(heldout != PAD).squeeze(1)
    unseen = UnseenItems(*mine.seen_pairs(), mine.n_users, mine.n_items)
    given = mine.negatives if split == "test" else None
    if given is not None and given.shape[1] != valid_negative:
        given = None
    answerable = unseen.counts[users] > 0
    if given is not None:
        # They were not drawn by our rules: a user who has seen every item may still have some.
        answerable = torch.ones_like(answerable)
    n = mine.n_items if valid_negative == "all" else int(valid_negative)
    held, evaluated, short = group.all_sum(
        len(users), int(answerable.sum()), int((unseen.counts[users[answerable]] < n).sum())
    )
    _check_users(dataset, split, held, evaluated)
    users = users[answerable]
    positives = heldout[users].long()
    if valid_negative == "all":
        negatives, protocol = None, "all unseen items"
    elif given is not None:
        negatives, protocol = _mask_given(given[users].int(), positives), f"the {n} negatives that came with the log"
    else:
        negatives = evaluation_negatives(unseen, users, n, dataset.seed, mine.user_offset).int()
        protocol = f"{'up to ' * bool(short)}{n} unseen items drawn for each user"
        if short:
            _warn(f"{short} of {evaluated} users have fewer than {n} unseen items: all of theirs are ranked")
    counts = unseen.counts[users] if negatives is None else (negatives != PAD).sum(1)
    pairs = len(users) * mine.n_items if negatives is None else int(counts.sum()) + len(users)
    return EvalSet(
        split=split,
        users=users,
        positives=positives,
        unseen=unseen,
        negatives=negatives,
        protocol=protocol,
        skipped=held - evaluated,
        evaluated=evaluated,
        candidates=max(group.all_gather(int(counts.max()) if len(counts) else 0)) + 1,
        pairs=group.all_sum(pairs)[0],
        history=_history(mine, split, users, history) if history else None,
    )


def _history(mine: Interactions, split: str, users: Tensor, length: int) -> Tensor:
    """What each of `users` did before the held-out item: in training, and for the test in validation."""
    sequence = mine.sequence() if split == "validation" else mine.sequence("validation")
    earlier = None if mine.earlier is None else mine.earlier.of(split)[users]
    return Histories(sequence, mine.n_users, length, ordered=mine.ordered).of_users(users, earlier)


def _check_users(dataset: AnyDataset, split: str, held: int, evaluated: int) -> None:
    """Raise InputError where there is nobody to evaluate, of `held` users with an item in the split; warn of some."""
    if not held:
        fix = (
            "select the epoch with --select-on test or --select-on last, or prepare it with a validation split"
            if split == "validation"
            else "a test item takes users with two interactions or more"
        )
        raise InputError(f"dataset {dataset.name} has no {split} items: 0 of {dataset.n_users} users have one; {fix}")
    if not evaluated:
        raise InputError(f"0 of {held} users can be evaluated: each has seen every item, so none is left to rank with")
    if held > evaluated:
        _warn(f"{held - evaluated} of {dataset.n_users} users have seen every item and are not evaluated")


def _mask_given(negatives: Tensor, positives: Tensor) -> Tensor:
    """Put PAD where a given negative equals the positive or repeats an earlier one."""
    order = negatives.sort(dim=1, stable=True)
    repeated = torch.zeros_like(negatives, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    masked = torch.zeros_like(repeated).scatter_(1, order.indices, repeated) | (negatives == positives.unsqueeze(1))
    return negatives.masked_fill(masked, PAD)


def _warn(message: str) -> None:
    warnings.warn(message, NcfWarning, stacklevel=3)
