"""Raw ids of a log and their dense indices."""

import numbers
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ncf.errors import InputError

SHOWN = 20  # unknown ids in a message


class IdMap:
    """Maps raw ids `values` [R] (int64, or `str` objects) of users or items (`what`) to 0 .. R-1.

    An id is known by its spelling: `7`, `"7"`, `numpy.int64(7)` and `7.0` are one id.
    """

    def __init__(self, values: np.ndarray, what: str) -> None:
        self.values, self.what = values, what

    def find(self, raw_ids: Iterable[Any]) -> tuple[list[int | None], list[Any]]:
        """The index of each id, None where it is unknown; and the unknown ones. Raises InputError for no list."""
        if isinstance(raw_ids, (str, bytes)) or not isinstance(raw_ids, Iterable):
            raise InputError(f"{self.what} must be a list of ids, such as [7, 8]: got {raw_ids!r}")
        raw_ids = list(raw_ids)
        found = [self._index.get(spelling(raw)) for raw in raw_ids]
        return found, [raw for raw, index in zip(raw_ids, found, strict=True) if index is None]

    def indices(self, raw_ids: Iterable[Any]) -> list[int]:
        """The index of each id. Raises InputError, with all ids that are unknown."""
        found, unknown = self.find(raw_ids)
        if unknown:
            why = " (too few interactions in the log?)" if self.what == "users" else ""
            raise InputError(
                f"not among the {len(self.values)} {self.what} of the model{why}: {shortened(unknown)}; give known ids"
            )
        return [index for index in found if index is not None]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {str(raw): index for index, raw in enumerate(self.values.tolist())}


def spelling(raw: Any) -> str:
    """How an id is spelled, a number without a fraction as an integer."""
    if isinstance(raw, numbers.Real) and not isinstance(raw, numbers.Integral) and float(raw).is_integer():
        return str(int(float(raw)))
    return str(raw.item() if hasattr(raw, "item") and getattr(raw, "ndim", 0) == 0 else raw)


def shortened(ids: Sequence[Any]) -> str:
    """The first ids, and how many there are besides."""
    return ", ".join(map(str, ids[:SHOWN])) + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")
