"""The rules that make a dataset's arrays of a log's rows: drop, filter, renumber, order, hold out.

All of it is sorts and counts over int64 keys of 8 bytes a row; the answer depends on the rows alone.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ncf.config import PrepareConfig
from ncf.data.unseen import PAD
from ncf.errors import InputError
from ncf.ingest.read import Log

CHUNK = 1 << 16  # rows sorted at a time


@dataclass(frozen=True)
class Split:
    """A log's interactions after the rules, in dense indices, and what each rule dropped."""

    kept_users: np.ndarray  # [U] places among the log's distinct users
    kept_items: np.ndarray  # [I]
    train: tuple[np.ndarray, np.ndarray]  # [N] int32 users and items
    validation: np.ndarray  # [U] int32
    test: np.ndarray  # [U] int32
    dropped: tuple[np.ndarray, np.ndarray]  # [M] int32 users and items
    counts: dict[str, int]


def split_log(log: Log, config: PrepareConfig) -> Split:
    """Apply the rules. Raises InputError where no user or fewer than two items are left."""
    users, items, times = log.users.codes, log.items.codes, log.times
    n_users, n_items = len(log.users.values), len(log.items.values)
    low = None
    if config.min_value is not None and log.values is not None:
        enough = log.values >= config.min_value
        low = users[~enough], items[~enough]
        users, items, times = users[enough], items[enough], None if times is None else times[enough]
    order = time_order(users, times)
    if order is not None:
        users, items = users[order], items[order]
    rows = len(users)
    first = first_of_pairs(users, items, n_items)
    if first is not None:
        users, items = users[first], items[first]
    pairs = len(users)
    degrees = np.bincount(users, minlength=n_users)
    active = degrees >= config.min_ratings
    if not pairs and low is not None and log.values is not None:
        raise InputError(
            f"no row has a rating of at least {config.min_value:g} (the highest is {log.values.max():g}): lower "
            "--min-value"
        )
    if not active.any():
        raise InputError(
            f"0 of {n_users} users have {config.min_ratings} interactions (the most is {degrees.max()}):"
            " lower --min-ratings"
        )
    if not active.all():
        of_active = active[users]
        users, items = users[of_active], items[of_active]
    used = np.bincount(items, minlength=n_items) > 0
    if used.sum() < 2:
        fix = "lower --min-ratings" if config.min_ratings > 1 else "give a log with more"
        raise InputError(f"{used.sum()} item is left of {n_items}: a recommender needs 2 or more; {fix}")
    users, items = _renumber(users, active), _renumber(items, used)
    dropped = _dropped(low, active, used, users, items)
    counts = {
        "rows_below_min_value": 0 if low is None else len(low[0]),
        "repeated_pairs": rows - pairs,
        "users_dropped": int(n_users - active.sum()),
        "rows_of_dropped_users": pairs - len(users),
        "items_dropped": int(n_items - used.sum()),
    }
    train, validation, test = hold_out(users, items, degrees[active], validation=config.validation)
    return Split(np.flatnonzero(active), np.flatnonzero(used), train, validation, test, dropped, counts)


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
    ends = np.cumsum(np.bincount(users))
    begin = 0
    while begin < len(key):  # whole users at a time, so that the sort stays in the cache: four times as fast
        end = ends[np.searchsorted(ends, min(begin + CHUNK, len(key)))]
        order[begin:end] = np.argsort(key[begin:end], kind="stable") + begin
        begin = end
    return order if by_user is None else by_user[order]


def _whole(times: np.ndarray) -> tuple[np.ndarray, int]:
    """Times as integers from 0 in the same order, which fit beside an int32 in 63 bits; and how many bits they take."""
    if times.size and abs(low := int(times.min())) < 2**62 and (span := int(times.max()) - low) < 2**32:
        whole = times.astype(np.int64)
        if times.dtype.kind == "i" or (whole == times).all():
            whole -= low
            return whole, span.bit_length()
    ranks = np.unique(times, return_inverse=True)[1]
    return ranks, int(ranks.max(initial=0)).bit_length()


def first_of_pairs(users: np.ndarray, items: np.ndarray, n_items: int) -> np.ndarray | None:
    """Which rows are the first of their (user, item) pair; None where every row is."""
    key = users.astype(np.int64) * n_items + items
    ordered = np.sort(key)
    if not (ordered[1:] == ordered[:-1]).any():
        return None
    ordered, order = (part.numpy() for part in torch.sort(torch.from_numpy(key), stable=True))
    first = np.ones(len(key), dtype=bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def _renumber(codes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Codes among all, as codes among the kept."""
    return codes if kept.all() else (np.cumsum(kept) - 1).astype(np.int32)[codes]


def _dropped(
    low: tuple[np.ndarray, np.ndarray] | None,
    active: np.ndarray,
    used: np.ndarray,
    users: np.ndarray,
    items: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct pairs of `low`, of users and items that stay, that are not among the kept pairs."""
    if low is None:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    staying = active[low[0]] & used[low[1]]
    n_items = int(used.sum())
    low_users, low_items = _renumber(low[0][staying], active), _renumber(low[1][staying], used)
    kept = users.astype(np.int64) * n_items + items
    pairs = np.setdiff1d(low_users.astype(np.int64) * n_items + low_items, kept)
    return (pairs // n_items).astype(np.int32), (pairs % n_items).astype(np.int32)


def hold_out(
    users: np.ndarray, items: np.ndarray, degrees: np.ndarray, *, validation: bool
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """Take each user's last item for the test, and the last but one for validation, of rows by (user, time).

    A user keeps one interaction for training before the test takes one, and one before validation does.
    """
    last = np.cumsum(degrees) - 1
    in_train = np.ones(len(users), dtype=bool)
    held = {}
    for name, place, wanted in (("test", 0, True), ("validation", 1, validation)):
        has = (degrees >= place + 2) & wanted
        rows = last[has] - place
        held[name] = np.full(len(degrees), PAD, dtype=np.int32)
        held[name][has] = items[rows]
        in_train[rows] = False
    return (users[in_train], items[in_train]), held["validation"], held["test"]
