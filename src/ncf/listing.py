"""Recommendation lists as a table, CSV or JSON lines, to standard output or a file."""

import csv
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ncf.errors import NcfWarning
from ncf.files import atomic_file
from ncf.recommender import Recommender

COLUMNS = ("user_id", "item_id", "title", "score", "rank")
USERS_AT_A_TIME = 1024

Row = tuple[Any, Any, str, float, int]


def write_lists(
    recommender: Recommender,
    users: Sequence[Any],
    *,
    k: int,
    filter_seen: bool,
    precision: str,
    style: str,
    output: str | None,
) -> None:
    """Write the `k` best items of each of `users` as a `table`, `csv` or `json` (an object a line).

    With `output` the file is whole or absent. Raises InputError for an unknown user, before anything is written.
    """
    for user in users:
        recommender.user_index(user)
    rows = _rows(recommender, users, k, filter_seen, precision)
    if output is None:
        _write(rows, style, sys.stdout)
        return
    with atomic_file(Path(output)) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        _write(rows, style, file)


def _rows(recommender: Recommender, users: Sequence[Any], k: int, filter_seen: bool, precision: str) -> Iterator[Row]:
    ids = recommender.dataset.user_ids
    for at in range(0, len(users), USERS_AT_A_TIME):
        part = users[at : at + USERS_AT_A_TIME]
        lists = recommender.recommend(part, k, filter_seen=filter_seen, precision=precision)
        for user, items, scores in zip(part, *lists, strict=True):
            raw = ids[recommender.user_index(user)]
            if not len(items):
                warnings.warn(f"user {raw} has touched every item: none is left to list", NcfWarning, stacklevel=2)
            named = zip(items.tolist(), recommender.titles(items), scores.tolist(), strict=True)
            for rank, (item, title, score) in enumerate(named, start=1):
                yield raw.item() if hasattr(raw, "item") else raw, item, title, score, rank


def _write(rows: Iterator[Row], style: str, file: TextIO) -> None:
    if style == "json":
        for row in rows:
            file.write(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n")
    elif style == "csv":
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    else:
        _write_table(rows, file)


def _write_table(rows: Iterator[Row], file: TextIO) -> None:
    """A block a user: rank, score, item and title."""
    last = None
    for user, item, title, score, rank in rows:
        if rank == 1:
            file.write(("" if last is None else "\n") + f"user {user}\nrank    score  item\n")
            last = user
        file.write(f"{rank:>4}  {score:>7.3f}  {item}{f'  {title}' if title else ''}\n")
