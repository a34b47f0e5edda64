"""How a text file is written: compression, encoding, delimiter, header."""

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from ncf.config import PrepareConfig
from ncf.errors import InputError
from ncf.ingest.columns import find_column, is_known, wanted
from ncf.ingest.times import is_date, is_number

DELIMITERS = ("::", "\t", ";", ",", "|")  # in order of preference; a space counts where none of these fits
SAMPLE_BYTES = 1 << 18
SAMPLE_LINES = 200
SPELLED = {"\\t": "\t", "tab": "\t", "space": " "}
NAMES = {"\t": "a tab", " ": "a space"}


@dataclass(frozen=True)
class Dialect:
    """How the lines of a text file are to be read."""

    delimiter: str
    names: tuple[str, ...] | None  # the header's cells; None without a header
    skipped: int  # lines before the first row
    width: int  # cells in a row
    sample: tuple[tuple[str, ...], ...]  # the first rows
    encoding: str  # "utf-8" or "latin-1"
    compressed: bool


@contextmanager
def open_binary(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where it is gzip. Raises InputError where the block cannot read them."""
    try:
        with cast("BinaryIO", gzip.open(path)) if is_gzip(path) else path.open("rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}; is it complete?") from error


def is_gzip(path: Path) -> bool:
    """Whether a file begins as gzip does, whatever its name."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def read_bytes(path: Path, size: int = -1) -> bytes:
    """The first `size` bytes of a file, or all. Raises InputError where they cannot be read."""
    with open_binary(path) as file:
        return file.read(size)


def decode(data: bytes) -> tuple[str, str]:
    """The text of `data` and its encoding: UTF-8 (with or without a BOM) or, where it is not, Latin-1."""
    try:
        return data.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def first_lines(path: Path) -> tuple[list[str], str]:
    """The first lines of a text file, and its encoding. Raises InputError where it is empty or is not text."""
    data = read_bytes(path, SAMPLE_BYTES)
    if not data.strip():
        raise InputError(f"{path} is empty: a log has a row for each interaction")
    if b"\x00" in data:
        raise InputError(f"{path} is not a text file that ncf can read: give CSV or the like in UTF-8, or Parquet")
    if len(data) == SAMPLE_BYTES:
        data = data[: data.rfind(b"\n") + 1] or data
    text, encoding = decode(data)
    return split_lines(text), encoding


def split_lines(text: str) -> list[str]:
    """The lines of a text; `str.splitlines` would also split at what are letters in some encodings."""
    return re.split(r"\r\n?|\n", text)


def split_line(line: str, delimiter: str) -> list[str]:
    """The cells of a line, stripped."""
    if len(delimiter) > 1:
        return [cell.strip().strip('"') for cell in line.split(delimiter)]
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:  # a cell beyond any reason
        return [line]


def find_delimiter(lines: list[str]) -> str | None:
    """What separates the cells of `lines`: what most of them agree on; None where nothing does."""
    best: tuple[tuple[bool, int, float], str] | None = None
    for delimiter in (*DELIMITERS, " "):
        if delimiter == " " and best:
            break
        width, agreeing = Counter(len(split_line(line, delimiter)) for line in lines).most_common(1)[0]
        share = agreeing / len(lines)
        rank = (share >= 0.9, width, share)
        if width > 1 and share > 0.5 and (best is None or rank > best[0]):
            best = rank, delimiter
    return best[1] if best else None


def sniff(path: Path, config: PrepareConfig) -> Dialect:
    """Find how a log is written, where the options do not say. Raises InputError where it cannot be told."""
    lines, encoding = first_lines(path)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:SAMPLE_LINES]
    delimiter = config.delimiter and SPELLED.get(config.delimiter, config.delimiter)
    delimiter = delimiter or find_delimiter([line for _, line in numbered])
    if delimiter is None:
        raise InputError(
            f"{path} has no columns that , tab ; | :: or space would separate: {lines[0][:80]!r};"
            " name it with --delimiter"
        )
    rows = [tuple(split_line(line, delimiter)) for _, line in numbered]
    header = has_header(rows[0], config, path)
    sample = tuple(rows[1:] if header else rows)
    if not sample:
        raise InputError(f"{path} has a header and no rows: {lines[0][:80]!r}")
    usual = Counter(len(row) for row in sample).most_common(1)[0][0]
    width = len(rows[0]) if header else usual
    if width != usual:
        raise InputError(
            f"{path} has {width} column names but {usual} cells in its rows"
            f" (delimiter {describe(delimiter)}): correct its first line, or use --delimiter"
        )
    if width < 2:
        raise InputError(f"{path} has one column with the delimiter {describe(delimiter)}: correct --delimiter")
    skipped = numbered[0][0] if header else numbered[0][0] - 1
    return Dialect(delimiter, rows[0] if header else None, skipped, width, sample, encoding, is_gzip(path))


def has_header(first: tuple[str, ...], config: PrepareConfig, path: Path) -> bool:
    """Whether the first line names the columns. Raises InputError where that cannot be told."""
    named = [name for name in wanted(config).values() if not name.isdecimal()]
    if config.header is not None:
        if named and not config.header:
            raise InputError(f"a log without a header has no column {named[0]!r}: give a column's number from 1")
        return config.header
    if named and all(find_column(name, first) is not None for name in named):
        return True
    if any(is_number(cell) or is_date(cell) for cell in first):
        return False
    if any(is_known(cell) for cell in first):
        return True
    raise InputError(
        f"{path}: cannot tell whether the first line {', '.join(first)[:80]!r} names the columns: say --no-header, or"
        " name the columns with --user-column and --item-column"
    )


def describe(delimiter: str) -> str:
    """A delimiter in words."""
    return NAMES.get(delimiter, repr(delimiter))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text file that are not blank. Raises InputError where they cannot be read."""
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, decode(line)[0].rstrip("\r\n")
