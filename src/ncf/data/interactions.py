"""What users did, in dense indices: training pairs, held-out items, and pairs that were only seen."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ncf.data.unseen import PAD
from ncf.errors import InputError

SPLITS = ("validation", "test")


class Earlier(NamedTuple):
    """How many of its user's interactions are earlier than each one: not those at the same time, nor later ones."""

    train: Tensor  # [N] int32
    validation: Tensor  # [U] int32, PAD where there is no such item
    test: Tensor  # [U] int32

    def of(self, split: str) -> Tensor:
        """Those of a held-out split."""
        return self.validation if split == "validation" else self.test


class Sequence(NamedTuple):
    """Interactions by user, and within a user in order of time."""

    users: Tensor  # [N] int32, ascending
    items: Tensor  # [N] int32
    earlier: Tensor | None = None  # [N] int32: how many of the user's are earlier; None: all before it

    def to(self, device: torch.device) -> "Sequence":
        """The same on another device."""
        earlier = None if self.earlier is None else self.earlier.to(device)
        return Sequence(self.users.to(device), self.items.to(device), earlier)


@dataclass(frozen=True, eq=False)
class Interactions:
    """The interactions of U users: all users of a dataset, or a contiguous range of them (a shard).

    Users are numbered from 0 here; user 0 is user `user_offset` of the dataset. Items keep the dataset's numbers.
    Held-out items and padding of negatives are `PAD` (-1) where there is none.
    """

    n_users: int  # U
    n_items: int  # I, of the dataset
    train_users: Tensor  # [N] int32, ascending
    train_items: Tensor  # [N] int32, within a user in order of time
    validation_items: Tensor  # [U] int32
    test_items: Tensor  # [U] int32
    dropped_users: Tensor  # [M] int32: pairs that --min-value dropped; seen, not trained on
    dropped_items: Tensor  # [M] int32
    negatives: Tensor | None = None  # [U, n] int32: the evaluation negatives that came with the log (He's files)
    user_offset: int = 0
    earlier: "Earlier | None" = None  # None: all that come before an interaction are earlier than it
    ordered: bool = True  # False: the log had no time, so that a user's rows are in a random order

    @property
    def n_train(self) -> int:
        """N."""
        return len(self.train_users)

    def heldout(self, split: str) -> Tensor:
        """The held-out item of each user in `validation` or `test`, [U] int32. Raises InputError for another split."""
        if split not in SPLITS:
            raise InputError(f"--split must be validation or test: got {split!r}")
        return self.validation_items if split == "validation" else self.test_items

    def seen_pairs(self) -> tuple[Tensor, Tensor]:
        """Every distinct pair of a user and an item, in any split or dropped, ascending: users and items, int32."""
        users, items, _ = self.sequence(*SPLITS)
        users, items = torch.cat((users, self.dropped_users)), torch.cat((items, self.dropped_items))
        keys = torch.unique(users.long() * self.n_items + items)
        return (keys // self.n_items).int(), (keys % self.n_items).int()

    def sequence(self, *splits: str) -> Sequence:
        """The training interactions, with the held-out ones of `splits`."""
        users, items = [self.train_users], [self.train_items]
        earlier = [] if self.earlier is None else [self.earlier.train]
        for split in splits:
            held = self.heldout(split)
            has = torch.nonzero(held != PAD).flatten()
            users.append(has.int())
            items.append(held[has])
            if self.earlier is not None:
                earlier.append(self.earlier.of(split)[has])
        order = torch.sort(torch.cat(users), stable=True)
        return Sequence(
            order.values,
            torch.cat(items)[order.indices],
            torch.cat(earlier)[order.indices] if earlier else None,
        )

    def find_fault(self) -> str | None:
        """What is wrong with the arrays' lengths, types or values; None where nothing is."""
        users = {"train users": self.train_users, "dropped users": self.dropped_users}
        items = {"train items": self.train_items, "dropped items": self.dropped_items}
        padded = {"validation items": self.validation_items, "test items": self.test_items}
        padded |= {} if self.negatives is None else {"negatives": self.negatives}
        for size, low, named in ((self.n_users, 0, users), (self.n_items, 0, items), (self.n_items, PAD, padded)):
            for name, array in named.items():
                if array.dtype != torch.int32 or (array.numel() and not low <= array.min() <= array.max() < size):
                    return f"{name} are out of range"
        if (self.train_users[1:] < self.train_users[:-1]).any():
            return "train users are out of order"
        if self.earlier is not None and not self._fits(self.earlier):
            return "what is earlier is out of range"
        if len(self.train_users) != len(self.train_items) or len(self.dropped_users) != len(self.dropped_items):
            return "its files differ in length"
        return None

    def _fits(self, earlier: Earlier) -> bool:
        """Whether counts of earlier interactions are possible ones."""
        if len(earlier.train) != self.n_train or not len(earlier.test) == len(earlier.validation) == self.n_users:
            return False
        seen = torch.bincount(self.train_users, minlength=self.n_users)
        most = torch.arange(self.n_train) - (seen.cumsum(0) - seen)[self.train_users.long()]
        if ((earlier.train < 0) | (earlier.train > most)).any():
            return False
        limits = seen, seen + (self.validation_items != PAD)
        return all(
            bool(((earlier.of(split) >= PAD) & (earlier.of(split) <= limit)).all())
            and bool(((earlier.of(split) == PAD) == (self.heldout(split) == PAD)).all())
            for split, limit in zip(SPLITS, limits, strict=True)
        )
