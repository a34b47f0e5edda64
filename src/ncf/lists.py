"""Recommendation lists as a table, CSV or JSON lines, on standard output or in a file, or as a data frame."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ncf.errors import InputError
from ncf.files import atomic_file


class Row(NamedTuple):
    """An item in a user's list; its fields are the columns of CSV, JSON and data frames."""

    user_id: Any
    item_id: Any
    title: str
    score: float
    rank: int  # from 1


def make_rows(user: Any, items: Iterable[Any], titles: Iterable[str], scores: Iterable[float]) -> Iterator[Row]:
    """A user's list, best first, as rows; `titles` may be endless."""
    for rank, (item, title, score) in enumerate(zip(items, titles, scores, strict=False), start=1):
        yield Row(user, item, title, score, rank)


def write_recommendations(rows: Iterator[Row], style: str, output: str | None) -> None:
    """Write lists as a `table`, `csv` or `json` (an object per line). With `output` the file is whole or absent."""
    write = {"table": _write_table, "csv": _write_csv, "json": _write_json}[style]
    if output is None:
        write(rows, sys.stdout)
        return
    with atomic_file(Path(output)) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        write(rows, file)


def make_table(rows: Iterable[Row]) -> Any:
    """A pandas DataFrame, or an Arrow or polars table where that is what is installed."""
    rows = list(rows)
    columns = {name: [row[place] for row in rows] for place, name in enumerate(Row._fields)}
    for library, name in (("pandas", "DataFrame"), ("pyarrow", "table"), ("polars", "DataFrame")):
        try:
            make = getattr(import_module(library), name)
        except ImportError:
            continue
        return make(columns)
    raise InputError("as_table needs pandas, pyarrow or polars, and none is installed: pip install pandas")


def _write_json(rows: Iterator[Row], file: TextIO) -> None:
    for row in rows:
        file.write(json.dumps(row._asdict(), ensure_ascii=False) + "\n")


def _write_csv(rows: Iterator[Row], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)


def _write_table(rows: Iterator[Row], file: TextIO) -> None:
    """A block per user: rank, score, item and title."""
    last = None
    for user, item, title, score, rank in rows:
        if rank == 1:
            file.write(("" if last is None else "\n") + f"user {user}\nrank    score  item\n")
            last = user
        file.write(f"{rank:>4}  {score:>7.3f}  {item}{f'  {title}' if title else ''}\n")
