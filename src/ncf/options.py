"""What an option is: a dataclass field with a default, a range, a unit and a help text.

`config.py` lists every option, `flags.py` makes command-line flags of them, and the Python API takes them as keyword
arguments. An option out of its range is an `InputError` at construction.
"""

import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, Self

from ncf.errors import InputError


def option(
    group: str,
    default: Any,
    text: str,
    *flags: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    resumable: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option, listed under `group` in `--help`.

    `flags` are further spellings of the flag (the first is made from the field's name). `low` and `high` are
    inclusive bounds, `above` and `below` exclusive ones. `choices` are the only values allowed; `words` are allowed
    beside numbers. A `resumable` option may change when a run is resumed.

    The default must be neutral: training with it is training as it was before the option existed. A saved run that
    lacks the option is opened with it.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below}
    metadata = {"group": group, "help": text, "flags": flags, "bounds": bounds, "choices": choices, "words": words}
    return field(default=default, metadata=metadata | {"resumable": resumable})


def flag_name(name: str) -> str:
    """`batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")


def describe_range(item: Field[Any]) -> str:
    """The allowed values of an option in words, such as `at least 1` or `fp32, bf16 or fp16`."""
    meta = item.metadata
    if meta["choices"]:
        *most, last = meta["choices"]
        return f"{', '.join(most)} or {last}" if most else last
    words = {"low": "at least", "above": "above", "high": "at most", "below": "below"}
    parts = [f"{words[key]} {bound}" for key, bound in meta["bounds"].items() if bound is not None]
    text = " and ".join(parts)
    if meta["words"]:
        text = f"{text or 'a number'}, or {' or '.join(meta['words'])}"
    return text


def scalar_types(item: Field[Any]) -> tuple[type, ...]:
    """The plain types an option takes: `int | None` -> `(int, NoneType)`, `tuple[int, ...]` -> `(int,)`."""
    hint = item.type
    if typing.get_origin(hint) is tuple:
        return (typing.get_args(hint)[0],)
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (typing.cast(type, hint),)


@dataclass(frozen=True)
class Options:
    """The base of the option classes in `config.py`: checks ranges, and goes to JSON and back."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            several = typing.get_origin(item.type) is tuple
            if several:
                values = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
                values = () if tuple(values) == ("none",) else values
                value = tuple(_plain(item, one) for one in values)
            else:
                value = _plain(item, value)
            object.__setattr__(self, item.name, value)
            if not all(_fits(item, one) for one in (value if several else (value,))):
                allowed = describe_range(item)
                must = f" must be {allowed}" if allowed else " has a value of the wrong type"
                raise InputError(f"{flag_name(item.name)}{must}: got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Every value, for JSON; `from_dict` reads it back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From some values, with defaults for the rest. Raises InputError for an unknown name, with the known ones."""
        cls._check_names(values)
        return cls(**values)

    def replaced(self, **values: Any) -> Self:
        """The same with some options changed. Raises InputError where one is unknown or out of its range."""
        self._check_names(values)
        return replace(self, **values)

    @classmethod
    def _check_names(cls, values: Iterable[str]) -> None:
        known = [item.name for item in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise InputError(f"unknown option {', '.join(unknown)}: choose among {', '.join(known)}")


def _plain(item: Field[Any], value: Any) -> Any:
    """A path as text, a NumPy number as Python's, and a column's number as the text that the command line has."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        value = float(value)
    return str(value) if type(value) is int and item.name.endswith("_column") else value


def _fits(item: Field[Any], value: Any) -> bool:
    allowed = scalar_types(item)
    if value is None or isinstance(value, bool):
        return type(value) in allowed
    if isinstance(value, str):
        words = item.metadata["choices"] or item.metadata["words"]
        return str in allowed and (not words or value in words)
    if not (type(value) in allowed or (type(value) is int and float in allowed)):
        return False
    bounds = item.metadata["bounds"]
    return (
        math.isfinite(value)
        and (bounds["low"] is None or value >= bounds["low"])
        and (bounds["above"] is None or value > bounds["above"])
        and (bounds["high"] is None or value <= bounds["high"])
        and (bounds["below"] is None or value < bounds["below"])
    )
