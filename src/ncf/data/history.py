"""What a user did just before: the items that the user side of the network reads beside the user's row.

A history holds the last L of the user's interactions that are earlier, most recent first. Interactions at the same time
are not in each other's history. Where the log has no time it is a sample of L of the user's other interactions.
"""

import torch
from torch import Tensor

from ncf.data.interactions import Sequence
from ncf.data.unseen import PAD


class Histories:
    """Histories of `length` L from a sequence of interactions, on its device; int32, PAD where there are fewer."""

    def __init__(self, sequence: Sequence, n_users: int, length: int, *, ordered: bool = True) -> None:
        users = sequence.users.long()
        self.length, self.ordered = length, ordered
        self.items = torch.cat([sequence.items, sequence.items.new_full((1,), PAD)])  # [N + 1]: no item at place N
        self.users = users
        self.counts = torch.bincount(users, minlength=n_users)  # [U]
        self.start = self.counts.cumsum(0) - self.counts  # [U]
        place = torch.arange(len(users), device=users.device) - self.start[users]
        self.earlier = place if sequence.earlier is None else sequence.earlier.long()
        self.steps = torch.arange(length, device=users.device)  # l

    def of_rows(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """What precedes the sequence's `rows` [B]: [B, L]. Without an order the sample is new at every call."""
        if self.ordered:
            return self._before(self.start[self.users[rows]], self.earlier[rows])
        user = self.users[rows]
        start, count = self.start[user], self.counts[user]
        others = count - 1
        # Rows are in random order, so neighbours are a sample: those from a random one on, round the end of the others.
        first = torch.randint(2**62, rows.shape, generator=generator, device=rows.device) % others.clamp(min=1)
        offsets = (first.unsqueeze(1) + self.steps) % others.clamp(min=1).unsqueeze(1)
        places = (rows - start + 1).unsqueeze(1) + offsets
        places = start.unsqueeze(1) + places % count.unsqueeze(1)
        return self._items_at(places, self.steps < others.unsqueeze(1))

    def of_users(self, users: Tensor, earlier: Tensor | None = None) -> Tensor:
        """The last L of each of `users` [B], or of their first `earlier` [B] interactions: [B, L]."""
        users = users.long()
        return self._before(self.start[users], self.counts[users] if earlier is None else earlier.long())

    def _before(self, start: Tensor, earlier: Tensor) -> Tensor:
        return self._items_at((start + earlier - 1).unsqueeze(1) - self.steps, self.steps < earlier.unsqueeze(1))

    def _items_at(self, places: Tensor, there: Tensor) -> Tensor:
        return self.items[torch.where(there, places, len(self.items) - 1)]
