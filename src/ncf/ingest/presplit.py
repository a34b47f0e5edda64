"""A split that came ready made, as He et al. publish theirs: `X.train.rating`, `X.test.rating` and `X.test.negative`.

It is taken as it is: not filtered, not split anew. Training rows are put in order of their own times. The catalogue and
the users are the union of the files'.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np

from ncf.config import PrepareConfig
from ncf.data.unseen import PAD
from ncf.errors import InputError, NcfWarning
from ncf.ingest.locate import GIVEN_SPLIT, Files
from ncf.ingest.order import Rows, order_rows
from ncf.ingest.read import Ids, read_log
from ncf.ingest.scan import open_scan
from ncf.ingest.split import Split, first_of_pairs
from ncf.ingest.text import read_lines

PARTS = ("train.rating", "test.rating", "test.negative")


@dataclass(frozen=True)
class PresplitFiles:
    """The files of a ready-made split."""

    train: Path
    test: Path
    negatives: Path | None


@dataclass(frozen=True)
class Presplit:
    """A ready-made split, in dense indices."""

    user_ids: np.ndarray
    item_ids: np.ndarray
    split: Split
    negatives: np.ndarray | None  # [U, n] int32
    rows_read: int
    bad_rows: int


def find_presplit(path: Path) -> PresplitFiles | None:
    """The split that a file is part of, if any. Raises InputError for a test file without the training file."""
    match = GIVEN_SPLIT.fullmatch(path.name)
    if match is None:
        return None
    found = {}
    for part in PARTS:
        named = [path] if match[2] == part else [path.with_name(f"{match[1]}.{part}{end}") for end in ("", ".gz")]
        found[part] = next((file for file in named if file.is_file()), None)
    train, test, negatives = (found[part] for part in PARTS)
    if train and test:
        return PresplitFiles(train, test, negatives)
    if match[2] == "train.rating":
        return None
    raise InputError(f"{path} is part of a split that also needs {match[1]}.train.rating and .test.rating beside it")


def read_presplit(
    con: duckdb.DuckDBPyConnection, files: PresplitFiles, config: PrepareConfig, *, progress: bool = False
) -> Presplit:
    """Read the files as they are. Raises InputError where they do not fit together."""
    logs = []
    for path in (files.train, files.test):
        scan = open_scan(con, Files((path,)), None, config)
        logs.append(read_log(con, scan, config, progress=progress))
    train, test = logs
    tables: tuple[dict[str, int], dict[str, int]] = ({}, {})
    rows = _read_negatives(files.negatives, tables) if files.negatives else None
    user_ids, (train_users, test_users, row_users) = merge_ids([train.users, test.users], tables[0])
    item_ids, (train_items, test_items, row_items) = merge_ids([train.items, test.items], tables[1])
    users, items = train_users[train.users.codes], train_items[train.items.codes]
    # Ordered by their own times; those of the test file are never compared with them: its item is the last.
    found = order_rows(users, items, train.times, config.ties, config.seed)
    first = first_of_pairs(found.users, found.items, len(item_ids))
    kept = found if first is None else found.only(first)
    held = _held_out(test_users[test.users.codes], test_items[test.items.codes], len(user_ids), files.test)
    _warn_of_leaks(kept, held, len(item_ids))
    negatives = None
    if rows is not None and files.negatives is not None:
        placed = [(line, row_users[user], row_items[cells]) for line, user, cells in rows]
        negatives = _place_negatives(placed, held, files.negatives)
    nothing = np.zeros(0, np.int32)
    no_validation = np.full(len(user_ids), PAD, np.int32)
    counts = {"repeated_pairs": len(users) - len(kept.users), "tied_rows": int(kept.tied().sum())}
    ordered = train.times is not None or config.ties == "file"
    earlier = None
    if ordered and counts["tied_rows"]:
        of_test = np.where(held == PAD, PAD, np.bincount(kept.users, minlength=len(user_ids))).astype(np.int32)
        earlier = kept.earlier(), no_validation, of_test
    split = Split(
        kept_users=np.arange(len(user_ids)),
        kept_items=np.arange(len(item_ids)),
        train=(kept.users, kept.items),
        validation=no_validation,
        test=held,
        dropped=(nothing, nothing),
        counts=counts,
        earlier=earlier,
        ordered=ordered,
    )
    bad_rows = train.bad_rows + test.bad_rows
    rows_read = len(users) + len(test.users.codes) + bad_rows
    return Presplit(user_ids, item_ids, split, negatives, rows_read, bad_rows)


def merge_ids(parts: list[Ids], spelled: dict[str, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The union of several columns' ids in order, and each column's places in it: of `parts`, then of `spelled`."""
    texts = np.array(list(spelled), dtype=object)
    try:
        numbers = [int(text) for text in spelled]
        columns = [*(part.values for part in parts), np.array(numbers, dtype=np.int64)]
        integers = all(column.dtype == np.int64 for column in columns) and list(map(str, numbers)) == list(spelled)
    except (ValueError, OverflowError):
        integers = False
    if not integers:
        columns = [*(np.array([str(raw) for raw in part.values.tolist()], dtype=object) for part in parts), texts]
    union = np.unique(np.concatenate(columns))
    return union, [np.searchsorted(union, column).astype(np.int32) for column in columns]


def _read_negatives(path: Path, tables: tuple[dict[str, int], dict[str, int]]) -> list[tuple[int, int, np.ndarray]]:
    """Each row's line, user and items (the positive first); `tables` code the ids as they are met."""
    users, items = tables
    rows = []
    for number, line in read_lines(path):
        head, *cells = line.split("\t") if "\t" in line else line.split()
        match = re.fullmatch(r"\(\s*(.+?)\s*,\s*(.+?)\s*\)", head.strip())
        if match is None:
            raise InputError(f"{path}, line {number}: a row begins with (user,item): got {head[:80]!r}")
        spelled = (match[2], *(cell.strip() for cell in cells if cell.strip()))
        codes = np.fromiter((items.setdefault(text, len(items)) for text in spelled), dtype=np.int32)
        rows.append((number, users.setdefault(match[1], len(users)), codes))
    return rows


def _held_out(users: np.ndarray, items: np.ndarray, n_users: int, path: Path) -> np.ndarray:
    """Each user's test item."""
    rows = np.bincount(users, minlength=n_users)
    if (rows > 1).any():
        raise InputError(
            f"{path}: {int((rows > 1).sum())} users have several rows; leave-one-out tests one item a user"
        )
    held = np.full(n_users, PAD, dtype=np.int32)
    held[users] = items
    return held


def _warn_of_leaks(train: Rows, held: np.ndarray, n_items: int) -> None:
    users = np.flatnonzero(held != PAD)
    keys = train.users.astype(np.int64) * n_items + train.items
    leaks = int(np.isin(users * n_items + held[users], keys).sum())
    if leaks:
        warnings.warn(f"{leaks} users have their test item among their training rows", NcfWarning, stacklevel=4)


def _place_negatives(rows: list[tuple[int, int, np.ndarray]], held: np.ndarray, path: Path) -> np.ndarray:
    """The negatives by user, [U, n], padded with PAD."""
    negatives = np.full((len(held), max(len(items) - 1 for _, _, items in rows)), PAD, dtype=np.int32)
    seen = np.zeros(len(held), dtype=bool)
    for line, user, items in rows:
        if held[user] != items[0] or seen[user]:
            fault = "a second row for its user" if seen[user] else "not a row of .test.rating"
            raise InputError(f"{path}, line {line}: its (user,item) is {fault}; the files must belong together")
        seen[user] = True
        negatives[user, : len(items) - 1] = items[1:]
    missing = int(((held != PAD) & ~seen).sum())
    if missing:
        raise InputError(f"{path} has no row for {missing} of {int((held != PAD).sum())} users of .test.rating")
    return negatives
