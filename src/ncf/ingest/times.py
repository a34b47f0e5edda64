"""Times in a log: which forms a cell may have, how DuckDB reads them, and what they are for a person.

A time is an ISO date (with a time of day or without), or a number: seconds, milliseconds, microseconds or nanoseconds
since 1970, or any other count, as only its order matters.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

EPOCH = 1e8  # a number above this is a time: no rating is so large, and seconds since 1970 have been since 1973
EXACT = 2**53  # floats hold integers below this
SCALES = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (EPOCH, 1.0))  # a time above the first is in units of 1 s / the second


def is_number(cell: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def is_date(cell: str) -> bool:
    """Whether a cell is a date, or a date and a time, in ISO's form."""
    try:
        datetime.fromisoformat(cell.strip())
    except ValueError:
        return False
    return not is_number(cell)


def is_time(cell: str) -> bool:
    """Whether a cell can be nothing but a time: a date, or a number too large for a rating."""
    return is_date(cell) or (is_number(cell) and float(cell) > EPOCH)


def kind_of(cells: Sequence[str]) -> str:
    """How a column of times is read: `iso`, `number`, or `whole` for numbers that a float does not hold."""
    numbers = [float(cell) for cell in cells if is_number(cell)]
    if len(numbers) * 2 < len(cells):
        return "iso"
    return "whole" if max(map(abs, numbers), default=0) >= EXACT else "number"


def as_microseconds(column: str, kind: str) -> str | None:
    """The SQL of a date column as microseconds since 1970; None for other kinds."""
    if kind.startswith(("TIMESTAMP", "DATE")):
        return f"epoch_us({column}::TIMESTAMPTZ)"
    if kind == "iso":
        return f"epoch_us(TRY_CAST(trim({column}) AS TIMESTAMPTZ))"
    return None


def time_span(times: np.ndarray, kind: str) -> dict[str, Any]:
    """The first and the last time, in ISO's form; plain numbers where they are no dates."""
    first, last = times.min().item(), times.max().item()
    is_date = as_microseconds("", kind) is not None
    scale = 1e6 if is_date else next((unit for least, unit in SCALES if last > least), 0)
    return {"first_time": _iso(first, scale), "last_time": _iso(last, scale)}


def _iso(time: float, scale: float) -> str | float:
    if not scale:
        return time
    try:
        return datetime.fromtimestamp(time / scale, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, OSError, ValueError):
        return time
