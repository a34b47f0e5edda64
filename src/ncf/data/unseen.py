"""Uniform draws among the items that a user has not seen, without rejection and without a users x items table.

A user's unseen items are numbered 0 .. count-1 in order of item. Number r is the item r + c, where c counts the
user's seen items that come before it; one binary search over all users at once finds c. See docs/algorithms.md.
"""

import copy
from functools import cached_property

import torch
from torch import Tensor

from ncf.data.hashing import hash_chain
from ncf.threads import parallel_map

PAD = -1  # in an array of items: there is none
SEARCHED = 2**19  # pairs that are looked up at a time
CHUNK = 2**17  # evaluation negatives drawn at a time, so that what each is compared with stays in the cache


class UnseenItems:
    """The unseen items of every user, by number; `users` and `items` [N] are the seen pairs, 8 bytes each."""

    def __init__(self, users: Tensor, items: Tensor, n_users: int, n_items: int) -> None:
        self.n_items = n_items
        pairs = torch.unique(users.long() * n_items + items)  # sorted: by user, then item
        user = pairs // n_items
        seen = torch.bincount(user, minlength=n_users)
        self.start = seen.cumsum(0) - seen  # [U] where a user's pairs begin
        self.counts = n_items - seen  # [U] unseen items of each user
        place = torch.arange(len(pairs), device=pairs.device) - self.start[user]  # j, the pair's place in its user's
        # Within a user, items[j] - j never falls, and user * (I + 1) keeps users apart: sorted as they stand.
        self.keys = user * (n_items + 1) + (pairs - user * n_items) - place

    def to(self, device: torch.device) -> "UnseenItems":
        """The same structure on another device."""
        other = copy.copy(self)
        for name in ("pairs", "items"):
            other.__dict__.pop(name, None)
        other.start, other.counts, other.keys = (x.to(device) for x in (self.start, self.counts, self.keys))
        return other

    def seen(self, users: Tensor) -> tuple[Tensor, Tensor]:
        """Every seen item of `users` [B]: the place in `users` and the item, both [T] int64, by place then item."""
        users = users.long()
        length = self.n_items - self.counts[users]
        row = torch.repeat_interleave(torch.arange(len(users), device=users.device), length)
        place = torch.arange(len(row), device=users.device) - (length.cumsum(0) - length)[row]
        user = users[row]
        return row, self.keys[self.start[user] + place] - user * (self.n_items + 1) + place

    def which_seen(self, users: Tensor, items: Tensor) -> Tensor:
        """Which of distinct `items` [N] each of `users` [B] has seen: [B, N] bool."""
        n = len(items)
        found = torch.zeros(len(users), n + 1, dtype=torch.bool, device=users.device)
        parts = range(0, len(users), max(1, SEARCHED // (n + 1)))
        if users.device.type == "cpu":
            slots = torch.full((self.n_items,), n).index_put_((items,), torch.arange(n))  # n for all others
            parallel_map(lambda at: self._mark(users[at : at + parts.step], slots, found[at : at + parts.step]), parts)
            return found[:, :n]
        for at in parts:  # a search, as the host need not wait for the number of pairs
            wanted = users[at : at + parts.step].long().unsqueeze(1) * self.n_items + items
            place = torch.searchsorted(self.pairs, wanted).clamp(max=len(self.pairs) - 1)
            found[at : at + parts.step, :n] = self.pairs[place] == wanted
        return found[:, :n]

    def _mark(self, users: Tensor, slots: Tensor, found: Tensor) -> None:
        """Set `found` [B, n + 1] at the slot of every item that each of `users` has seen."""
        users = users.long()
        length = self.n_items - self.counts[users]
        begin = length.cumsum(0) - length
        place = torch.repeat_interleave(self.start[users] - begin, length)
        place += torch.arange(len(place))
        flat = torch.repeat_interleave(torch.arange(len(users)) * found.shape[1], length)
        flat += slots.index_select(0, self.items.index_select(0, place))
        found.view(-1).index_fill_(0, flat, True)

    @cached_property
    def items(self) -> Tensor:
        """The items of the seen pairs, int32, by user."""
        return (self.pairs % self.n_items).int()

    @cached_property
    def pairs(self) -> Tensor:
        """The seen pairs, each user * I + item, ascending."""
        seen = self.n_items - self.counts
        user = torch.repeat_interleave(torch.arange(len(seen), device=seen.device), seen)
        place = torch.arange(len(user), device=seen.device) - self.start[user]
        pairs: Tensor = self.keys - user + place
        return pairs

    def item_at(self, users: Tensor, numbers: Tensor) -> Tensor:
        """The unseen item with the given number, of each user.

        `users` [B] and `numbers` [B, n], with numbers in 0 .. counts[user] - 1, give items [B, n], int64. A number
        below 0 stays as it is (there is no such item). Fastest when `users` is sorted.
        """
        row = users.long().unsqueeze(1)
        before = torch.searchsorted(self.keys, row * (self.n_items + 1) + numbers, right=True) - self.start[row]
        return torch.where(numbers < 0, numbers, numbers + before)

    def draw(self, users: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """`n` independent uniform draws for each of `users` [B]: items [B, n], int64.

        A user who has seen every item gets `PAD`.
        The draw is an integer of 62 bits reduced to the range: no item of up to 2**25 is favoured by more than 2**-37.
        """
        count = self.counts[users.long()].unsqueeze(1)
        numbers = torch.randint(2**62, (len(users), n), generator=generator, device=self.keys.device)
        numbers = torch.where(count > 0, numbers % count.clamp(min=1), PAD)
        return self.item_at(users, numbers)


def draw_unchecked(n_items: int, users: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """`n` uniform draws among all items for each of `users` [B]: some of them may be positives (`--neg-trick`)."""
    return torch.randint(n_items, (len(users), n), generator=generator, device=users.device)


def evaluation_negatives(unseen: UnseenItems, users: Tensor, n: int, seed: int, user_offset: int = 0) -> Tensor:
    """`n` distinct unseen items for each of `users` [B]: items [B, n], int64, padded with `PAD`.

    A user's items depend on `seed` and the user's index alone: not on the other users, the batch, the device or the
    number of processes. `user_offset` is the index in the whole dataset of the user who is 0 here. Where a user has
    fewer than `n` unseen items, all of them. Robert Floyd's algorithm (Bentley and Floyd, "Programming Pearls: a
    sample of brilliance", CACM 1987), all users at once.
    """
    numbers = torch.empty(len(users), n, dtype=torch.int64, device=users.device)
    counts = unseen.counts[users.long()]
    step = max(1, CHUNK // n)
    for at in range(0, len(users), step):
        part = slice(at, at + step)
        numbers[part] = _floyd(users[part] + user_offset, counts[part], n, seed)
    return unseen.item_at(users, numbers)


def _floyd(users: Tensor, counts: Tensor, n: int, seed: int) -> Tensor:
    """`n` distinct numbers below `counts` [B] for each of `users` [B]: [B, n], all of them where they are too few."""
    place = torch.arange(n, device=users.device)
    every = torch.where(place < counts.unsqueeze(1), place, PAD)
    if not (counts > n).any():
        return every
    last = (counts.unsqueeze(1) - n + place).clamp(min=0)  # Floyd's j: the numbers to choose from are 0 .. j
    number = (hash_chain(seed, users.unsqueeze(1), place) % (last + 1)).T.int().contiguous()  # [n, B]
    last = last.T.int().contiguous()
    for i in range(1, n):
        taken = (number[:i] == number[i]).any(0)
        number[i] = torch.where(taken, last[i], number[i])
    return torch.where((counts > n).unsqueeze(1), number.T.long(), every)
