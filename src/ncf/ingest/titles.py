"""Items' titles: from the file that came with a log, or that the user named."""

import re
import warnings
from pathlib import Path

import numpy as np

from ncf.data.duckdb_session import connect, file_list, reading
from ncf.errors import InputError, NcfWarning
from ncf.ingest.columns import KNOWN, plain
from ncf.ingest.text import decode, find_delimiter, read_bytes, split_line, split_lines

TITLE_NAMES = ("title", "titles", "itemtitle", "movietitle", "booktitle", "name", "names", "itemname", "productname")
SAMPLE = 200


def find_titles(path: Path, item_ids: np.ndarray, *, asked: bool) -> np.ndarray | None:
    """The titles of `item_ids` in the file `path`, [I] str objects, "" where unknown; None where all are.

    Raises InputError where the file cannot be read, and warns where a file that was `asked` for has no such item.
    """
    known = read_titles(path)
    titles = np.array([known.get(str(raw), "") for raw in item_ids.tolist()], dtype=object)
    if any(titles):
        return titles
    if asked:
        message = f"no item of {path} is in the log (such as {next(iter(known), 'none')!r}): there are no titles"
        warnings.warn(message, NcfWarning, stacklevel=3)
    return None


def read_titles(path: Path) -> dict[str, str]:
    """A file's titles by raw item id: from Parquet, or text with any delimiter, with a header or none."""
    if not path.is_file():
        raise InputError(f"no such file: {str(path)!r} (--item-names)")
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    rows = _parquet_rows(path) if parquet else _text_rows(path)  # "" where a cell is empty
    first = [plain(cell) for cell in rows[0]]
    title = next((first.index(name) for name in TITLE_NAMES if name in first), None)
    if title is None:
        return _by_place(rows, 0, 1)
    named = [index for index, name in enumerate(first) if name in KNOWN["item"] and index != title]
    named += [index for index, name in enumerate(first) if name.endswith(("id", "ids")) and index != title]
    return _by_place(rows[1:], (named or [1 if title == 0 else 0])[0], title)


def _by_place(rows: list[list[str]], key: int, title: int) -> dict[str, str]:
    long = max(key, title)
    return {row[key]: row[title] for row in reversed(rows) if len(row) > long}


def _parquet_rows(path: Path) -> list[list[str]]:
    with reading(str(path)), connect() as con:
        found = con.execute(f"SELECT * FROM read_parquet({file_list((path,))})")
        names = [column[0] for column in found.description or ()]
        return [names, *(["" if cell is None else str(cell) for cell in row] for row in found.fetchall())]


def _text_rows(path: Path) -> list[list[str]]:
    data = read_bytes(path)
    lines = [line for line in split_lines(decode(data)[0]) if line.strip()]
    delimiter = find_delimiter(lines[:SAMPLE]) if lines and b"\x00" not in data else None
    if delimiter is None:
        raise InputError(f"{path} has no columns of ids and titles (--item-names): is it a text file?")
    if delimiter in ",;":
        return [split_line(line, delimiter) for line in lines]
    return [[re.sub('^"(.*)"$', r"\1", cell.strip()) for cell in line.split(delimiter)] for line in lines]
