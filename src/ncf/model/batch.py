"""What a training step computes on."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """B interactions with their candidates, on one device."""

    users: Tensor  # [B], ascending
    candidates: Tensor  # [B, C]: the positive in column 0, then the negatives
    weights: Tensor | None  # [B, C], 0 where there is no sample; None for all 1
    samples: int | Tensor  # how many; a tensor [] where the draw decides: the host need not wait for the device
    history: Tensor | None = None  # [B, L] items before each positive, the latest first; -1 where there is none
    hidden: Tensor | None = None  # [B] bool: whose user row is left out (user dropout)
    shared: Tensor | None = None  # [N] items that are negatives of every row,
    shared_seen: Tensor | None = None  # [B, N] bool: but for those that the user has interacted with

    def rows(self, part: slice) -> "Batch":
        """Some of the rows; `samples` stays that of the whole."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[part]

        return self._replace(
            users=self.users[part],
            candidates=self.candidates[part],
            weights=cut(self.weights),
            history=cut(self.history),
            hidden=cut(self.hidden),
            shared_seen=cut(self.shared_seen),
        )

    def known_users(self) -> Tensor:
        """The users [B], -1 where their row is left out."""
        return self.users if self.hidden is None else self.users.masked_fill(self.hidden, -1)
