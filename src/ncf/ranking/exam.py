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
from ncf.errors import InputError, NcfWarning


@dataclass(frozen=True)
class Exam:
    """E users, at least one, each with one held-out item, and what it is ranked with."""

    split: str  # validation or test
    users: Tensor  # [E] int64, ascending
    positives: Tensor  # [E] int64
    untouched: Untouched
    negatives: Tensor | None  # [E, n] int32 padded with NONE; None ranks the whole untouched catalogue
    protocol: str  # the negatives in words
    skipped: int  # users with a held-out item but no other item left to rank it with

    @property
    def candidates(self) -> int:
        """The most items that a user's held-out item is ranked among, itself included."""
        if self.negatives is not None:
            return int((self.negatives != NONE).sum(1).max()) + 1
        return int(self.untouched.counts[self.users].max()) + 1

    @property
    def pairs(self) -> int:
        """User-item pairs that the exam scores."""
        if self.negatives is None:
            return len(self.users) * self.untouched.n_items
        return int((self.negatives != NONE).sum()) + len(self.users)

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


def make_exam(dataset: Dataset, split: str, valid_negative: int | str) -> Exam:
    """The exam on the `validation` or `test` split, against `valid_negative` untouched items or `all` of them.

    Negatives that came with the log (He's files) serve where the split is `test` and their number is the one asked
    for; one that repeats or equals the positive is left out. Warns of users with fewer untouched items than asked
    for. Raises InputError where the dataset holds nothing out for the split.
    """
    heldout = dataset.heldout(split)
    users = torch.nonzero(heldout != NONE).squeeze(1)
    if not len(users):
        fix = (
            "select the epoch with --select-on test or --select-on last, or prepare it with a validation split"
            if split == "validation"
            else "a test item takes users with two interactions or more"
        )
        raise InputError(f"dataset {dataset.name} has no {split} items: 0 of {dataset.n_users} users have one; {fix}")
    untouched = Untouched(*dataset.touched(), dataset.n_users, dataset.n_items)
    answerable = untouched.counts[users] > 0
    given = dataset.negatives if split == "test" else None
    if given is not None and given.shape[1] == valid_negative:
        # They were not drawn by our rules: a user who has touched every item may still have some.
        answerable = torch.ones_like(answerable)
    skipped = int((~answerable).sum())
    users = users[answerable]
    if not len(users):
        raise InputError(
            f"0 of {skipped} users can be evaluated: each has touched every item, so none is left to rank with"
        )
    exam = Exam(split, users, heldout[users].long(), untouched, None, "all untouched items", skipped)
    if skipped:
        _warn(f"{skipped} of {len(heldout)} users have touched every item and are not evaluated")
    if valid_negative == "all":
        return exam
    n = int(valid_negative)
    if given is not None and given.shape[1] == n:
        masked = _mask_given(given[users].int(), exam.positives)
        return replace(exam, negatives=masked, protocol=f"the {n} negatives that came with the log")
    short = int((untouched.counts[users] < n).sum())
    if short:
        _warn(f"{short} of {len(users)} users have fewer than {n} untouched items: all of theirs are ranked")
    negatives = evaluation_negatives(untouched, users, n, dataset.seed).int()
    return replace(
        exam, negatives=negatives, protocol=f"{'up to ' * bool(short)}{n} untouched items drawn for each user"
    )


def _mask_given(negatives: Tensor, positives: Tensor) -> Tensor:
    """Put NONE where a given negative equals the positive or repeats an earlier one."""
    order = negatives.sort(dim=1, stable=True)
    repeated = torch.zeros_like(negatives, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    masked = torch.zeros_like(repeated).scatter_(1, order.indices, repeated) | (negatives == positives.unsqueeze(1))
    return negatives.masked_fill(masked, NONE)


def _warn(message: str) -> None:
    warnings.warn(message, NcfWarning, stacklevel=3)
