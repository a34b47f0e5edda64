"""The exam: which users are evaluated, and which items their held-out item is ranked with.

It depends on the dataset alone (its seed included), never on a training run's seed, a batch size or a device.
docs/protocol.md says exactly what is held out, drawn and ranked.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ncf.data.dataset import Dataset
from ncf.data.negatives import NONE, Untouched, evaluation_negatives
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError, NcfWarning


@dataclass(frozen=True)
class Exam:
    """E users of this rank, each with one held-out item, and what it is ranked with; sizes over all ranks."""

    split: str  # validation or test
    users: Tensor  # [E] int64, ascending
    positives: Tensor  # [E] int64
    untouched: Untouched
    negatives: Tensor | None  # [E, n] int32 padded with NONE; None ranks the whole untouched catalogue
    protocol: str  # the negatives in words
    skipped: int  # users with a held-out item but no other item left to rank it with
    evaluated: int  # users, at least one
    candidates: int  # the most items that a user's held-out item is ranked among, itself included
    pairs: int  # user-item pairs that the exam scores

    def to(self, device: torch.device) -> "Exam":
        """The same exam on another device."""
        negatives = None if self.negatives is None else self.negatives.to(device)
        return replace(
            self,
            users=self.users.to(device),
            positives=self.positives.to(device),
            untouched=self.untouched.to(device),
            negatives=negatives,
        )


def make_exam(dataset: Dataset, split: str, valid_negative: int | str, ranks: Ranks = ALONE) -> Exam:
    """The exam on the `validation` or `test` split, against `valid_negative` untouched items or `all` of them.

    Negatives that came with the log (He's files) serve where the split is `test` and their number is the one asked
    for; one that repeats or equals the positive is left out. Warns of users with fewer untouched items than asked
    for. Of several ranks each has its own users' exam. Raises InputError where the dataset holds nothing out for the
    split.
    """
    heldout = dataset.heldout(split)
    users = torch.nonzero(heldout != NONE).squeeze(1)
    untouched = Untouched(*dataset.touched(), dataset.n_users, dataset.n_items)
    given = dataset.negatives if split == "test" else None
    if given is not None and given.shape[1] != valid_negative:
        given = None
    answerable = untouched.counts[users] > 0
    if given is not None:
        # They were not drawn by our rules: a user who has touched every item may still have some.
        answerable = torch.ones_like(answerable)
    n = dataset.n_items if valid_negative == "all" else int(valid_negative)
    held, evaluated, short = ranks.sums(
        len(users), int(answerable.sum()), int((untouched.counts[users[answerable]] < n).sum())
    )
    _check_users(dataset, split, held, evaluated)
    users = users[answerable]
    positives = heldout[users].long()
    if valid_negative == "all":
        negatives, protocol = None, "all untouched items"
    elif given is not None:
        negatives, protocol = _mask_given(given[users].int(), positives), f"the {n} negatives that came with the log"
    else:
        negatives = evaluation_negatives(untouched, users, n, dataset.seed, dataset.first_user).int()
        protocol = f"{'up to ' * bool(short)}{n} untouched items drawn for each user"
        if short:
            _warn(f"{short} of {evaluated} users have fewer than {n} untouched items: all of theirs are ranked")
    counts = untouched.counts[users] if negatives is None else (negatives != NONE).sum(1)
    pairs = len(users) * dataset.n_items if negatives is None else int(counts.sum()) + len(users)
    return Exam(
        split=split,
        users=users,
        positives=positives,
        untouched=untouched,
        negatives=negatives,
        protocol=protocol,
        skipped=held - evaluated,
        evaluated=evaluated,
        candidates=max(ranks.every(int(counts.max()) if len(counts) else 0)) + 1,
        pairs=ranks.sums(pairs)[0],
    )


def _check_users(dataset: Dataset, split: str, held: int, evaluated: int) -> None:
    """Raise InputError where there is nobody to evaluate, of `held` users with an item in the split; warn of some."""
    if not held:
        fix = (
            "select the epoch with --select-on test or --select-on last, or prepare it with a validation split"
            if split == "validation"
            else "a test item takes users with two interactions or more"
        )
        raise InputError(
            f"dataset {dataset.name} has no {split} items: 0 of {dataset.whole_users} users have one; {fix}"
        )
    if not evaluated:
        raise InputError(
            f"0 of {held} users can be evaluated: each has touched every item, so none is left to rank with"
        )
    if held > evaluated:
        _warn(f"{held - evaluated} of {dataset.whole_users} users have touched every item and are not evaluated")


def _mask_given(negatives: Tensor, positives: Tensor) -> Tensor:
    """Put NONE where a given negative equals the positive or repeats an earlier one."""
    order = negatives.sort(dim=1, stable=True)
    repeated = torch.zeros_like(negatives, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    masked = torch.zeros_like(repeated).scatter_(1, order.indices, repeated) | (negatives == positives.unsqueeze(1))
    return negatives.masked_fill(masked, NONE)


def _warn(message: str) -> None:
    warnings.warn(message, NcfWarning, stacklevel=3)
