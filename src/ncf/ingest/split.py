"""The rules that make a dataset's arrays of a log's rows: drop, filter, renumber, order, hold out.

All of it is sorts and counts over int64 keys of 8 bytes a row. The answer depends on what the rows say; on their order
in the file only with `--ties file`.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ncf.config import PrepareConfig
from ncf.data.unseen import PAD
from ncf.errors import InputError
from ncf.ingest.order import order_rows
from ncf.ingest.read import Log


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
    earlier: tuple[np.ndarray, ...] | None = None  # int32, of train, validation and test: see `Interactions`
    ordered: bool = True


def split_log(log: Log, config: PrepareConfig) -> Split:
    """Apply the rules. Raises InputError where no user or fewer than two items are left."""
    users, items, times = log.users.codes, log.items.codes, log.times
    n_users, n_items = len(log.users.values), len(log.items.values)
    low = None
    if config.min_value is not None and log.values is not None:
        enough = log.values >= config.min_value
        low = users[~enough], items[~enough]
        users, items, times = users[enough], items[enough], None if times is None else times[enough]
    found = order_rows(users, items, times, config.ties, config.seed)
    first = first_of_pairs(found.users, found.items, n_items)
    rows = found if first is None else found.only(first)
    pairs = len(rows.users)
    degrees = np.bincount(rows.users, minlength=n_users)
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
        rows = rows.only(active[rows.users])
    used = np.bincount(rows.items, minlength=n_items) > 0
    if used.sum() < 2:
        fix = "lower --min-ratings" if config.min_ratings > 1 else "give a log with more"
        raise InputError(f"{used.sum()} item is left of {n_items}: a recommender needs 2 or more; {fix}")
    rows = replace(rows, users=_renumber(rows.users, active), items=_renumber(rows.items, used))
    dropped = _dropped(low, active, used, rows.users, rows.items)
    ordered = times is not None or config.ties == "file"
    counts = {
        "rows_below_min_value": 0 if low is None else len(low[0]),
        "repeated_pairs": len(found.users) - pairs,
        "users_dropped": int(n_users - active.sum()),
        "rows_of_dropped_users": pairs - len(rows.users),
        "items_dropped": int(n_items - used.sum()),
        "tied_rows": int(rows.tied().sum()),
    }
    in_train, *held = hold_out(degrees[active], validation=config.validation)
    split = Split(
        kept_users=np.flatnonzero(active),
        kept_items=np.flatnonzero(used),
        train=(rows.users[in_train], rows.items[in_train]),
        validation=_at(rows.items, held[0]),
        test=_at(rows.items, held[1]),
        dropped=dropped,
        counts=counts,
        ordered=ordered,
    )
    if not (ordered and counts["tied_rows"]):
        return split
    earlier = rows.earlier()
    return replace(split, earlier=(earlier[in_train], *(_at(earlier, places) for places in held)))


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


def hold_out(degrees: np.ndarray, *, validation: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows, by user and in order, are for training [n]; each user's row for validation and for the test [U].

    The test takes the last row and validation the last but one; PAD where a user has none. A user keeps one
    interaction for training before the test takes one, and one before validation does.
    """
    last = np.cumsum(degrees) - 1
    in_train = np.ones(degrees.sum(), dtype=bool)
    held = []
    for place, wanted in ((1, validation), (0, True)):
        rows = np.where((degrees >= place + 2) & wanted, last - place, PAD)
        in_train[rows[rows != PAD]] = False
        held.append(rows)
    return in_train, held[0], held[1]


def _at(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The values at `places`, PAD where there is none."""
    return np.where(places == PAD, PAD, values[places]).astype(np.int32)
