"""The order of each user's rows: by time, and drawn at random where times are equal or there is none.

A file is often sorted by item within equal times. A model that reads what came just before would learn that order, and
its score would be worthless. So rows of one user with equal times are simultaneous: which of them counts as the last is
drawn from (seed, user, item), not taken from the file. `--ties file` trusts the file instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ncf.data.hashing import hash_chain

CHUNK = 1 << 16  # rows sorted at a time


@dataclass(frozen=True)
class Rows:
    """Rows in order: by user, then by time."""

    users: np.ndarray  # [n] int32, ascending
    items: np.ndarray  # [n] int32
    moments: np.ndarray | None  # [n] int64, ascending: rows of one moment are simultaneous; None: no two are

    def only(self, kept: np.ndarray) -> "Rows":
        """Some of the rows, by mask."""
        moments = None if self.moments is None else self.moments[kept]
        return replace(self, users=self.users[kept], items=self.items[kept], moments=moments)

    def tied(self) -> np.ndarray:
        """Which rows are simultaneous with another one: [n] bool."""
        if self.moments is None:
            return np.zeros(len(self.users), dtype=bool)
        same: np.ndarray = self.moments[1:] == self.moments[:-1]
        tied: np.ndarray = np.append(same, False) | np.insert(same, 0, False)
        return tied

    def earlier(self) -> np.ndarray:
        """How many rows of its user are earlier than each: [n] int32."""
        place = np.arange(len(self.users))
        new = self.users if self.moments is None else self.moments
        counts: np.ndarray = _first_of(new, place) - _first_of(self.users, place)
        return counts.astype(np.int32)


def order_rows(users: np.ndarray, items: np.ndarray, times: np.ndarray | None, ties: str, seed: int) -> Rows:
    """Rows [n] in order; `ties` is `draw` or `file`. Without times all rows of a user are simultaneous, or in order."""
    order = time_order(users, times)
    if order is not None:
        users, items, times = users[order], items[order], None if times is None else times[order]
    rows = Rows(users, items, None)
    if ties == "file":
        return rows
    new = np.ones(len(users), dtype=bool)
    new[1:] = users[1:] != users[:-1]
    if times is not None:
        new[1:] |= times[1:] != times[:-1]
    if new.all():
        return rows
    moments = np.cumsum(new)
    rows = replace(rows, moments=moments)
    places = np.flatnonzero(rows.tied())
    order = _drawn_order(moments[places], users[places], items[places], seed)
    drawn = items.copy()
    drawn[places] = items[places][order]
    return replace(rows, items=drawn)


def time_order(users: np.ndarray, times: np.ndarray | None) -> np.ndarray | None:
    """The order by (user, time, row), or by (user, row) without times; None where the rows are in it already."""
    by_user = None
    if (users[1:] < users[:-1]).any():
        by_user = torch.sort(torch.from_numpy(users), stable=True).indices.numpy()
        users, times = users[by_user], None if times is None else times[by_user]
    if times is None:
        return by_user
    ranks, bits = _whole(times)
    key = users.astype(np.int64)
    key <<= bits
    key += ranks
    if (key[1:] >= key[:-1]).all():
        return by_user
    order = np.empty(len(key), dtype=np.int64)
    for begin, end in _chunks(users):
        order[begin:end] = np.argsort(key[begin:end], kind="stable") + begin
    return order if by_user is None else by_user[order]


def _drawn_order(moments: np.ndarray, users: np.ndarray, items: np.ndarray, seed: int) -> np.ndarray:
    """An order by (moment, drawn number), where moments ascend."""
    order = np.empty(len(moments), dtype=np.int64)
    for begin, end in _chunks(moments):
        drawn = hash_chain(seed, torch.from_numpy(users[begin:end]), torch.from_numpy(items[begin:end])).numpy()
        order[begin:end] = np.lexsort((drawn, moments[begin:end])) + begin
    return order


def _chunks(groups: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of whole groups of about CHUNK rows, which a sort then keeps in the cache: four times as fast."""
    ends = np.append(np.flatnonzero(groups[1:] != groups[:-1]) + 1, len(groups))
    begin = 0
    while begin < len(groups):
        end = int(ends[np.searchsorted(ends, min(begin + CHUNK, len(groups)))])
        yield begin, end
        begin = end


def _first_of(groups: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The place of the first row of each row's group."""
    new = np.ones(len(groups), dtype=bool)
    new[1:] = groups[1:] != groups[:-1]
    return np.maximum.accumulate(np.where(new, place, 0))


def _whole(times: np.ndarray) -> tuple[np.ndarray, int]:
    """Times as integers from 0 in the same order, which fit beside an int32 in 63 bits; and how many bits they take."""
    if times.size and abs(low := int(times.min())) < 2**62 and (span := int(times.max()) - low) < 2**32:
        whole = times.astype(np.int64)
        if times.dtype.kind == "i" or (whole == times).all():
            whole -= low
            return whole, span.bit_length()
    ranks = np.unique(times, return_inverse=True)[1]
    return ranks, int(ranks.max(initial=0)).bit_length()
