"""Every option once: its name, unit, default, range and where the default comes from.

`cli.py` makes its flags from these dataclasses, the Python API takes them as keyword arguments, and a run's
`config.json` is one of them written out. An option out of its range is an `InputError` at construction.
"""

import math
import numbers
import os
import types
import typing
from collections.abc import Iterable
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, Self

from ncf.errors import InputError

Value = int | float | str | bool | None


def option(
    default: Any,
    text: str,
    *flags: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    live: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option.

    `flags` are further spellings of the flag (the first is made from the field's name). `low` and `high` are
    inclusive bounds, `above` and `below` exclusive ones. `choices` are the only values allowed; `words` are allowed
    beside numbers. A `live` option may change when a run is resumed.
    """
    bounds = {"low": low, "above": above, "high": high, "below": below}
    metadata = {"help": text, "flags": flags, "bounds": bounds, "choices": choices, "words": words, "live": live}
    return field(default=default, metadata=metadata)


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


def _plain(item: Field[Any], value: Any) -> Any:
    """A path as text, a number of numpy's as Python's, and a column's number as the text that the command line has."""
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
    if not isinstance(value, (int, float)):
        return False
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


@dataclass(frozen=True)
class Options:
    """The base of the option groups below: checks ranges, and goes to JSON and back."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            many = typing.get_origin(item.type) is tuple
            if many:
                several = value if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
                value = tuple(_plain(item, one) for one in several)
            else:
                value = _plain(item, value)
            object.__setattr__(self, item.name, value)
            if not all(_fits(item, one) for one in (value if many else (value,))):
                allowed = describe_range(item)
                must = f" must be {allowed}" if allowed else " has a value of the wrong type"
                raise InputError(f"{flag_name(item.name)}{must}: got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can hold; `from_dict` reads it back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """From keyword arguments, defaults for the rest. Raises InputError on an unknown name, with the known ones."""
        cls._check_names(options)
        return cls(**options)

    def replaced(self, **options: Any) -> Self:
        """The same with some options changed. Raises InputError where one is unknown or out of its range."""
        self._check_names(options)
        return replace(self, **options)

    @classmethod
    def _check_names(cls, options: dict[str, Any]) -> None:
        known = [item.name for item in fields(cls)]
        if unknown := [name for name in options if name not in known]:
            raise InputError(f"unknown option {', '.join(unknown)}: choose among {', '.join(known)}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The reverse of `to_dict`. Raises InputError on a missing or an unknown name."""
        known = {item.name for item in fields(cls)}
        if known != set(values):
            raise InputError(
                f"its options are not those of this version of ncf: unknown {sorted(set(values) - known)}, "
                f"missing {sorted(known - set(values))}"
            )
        return cls(**values)


@dataclass(frozen=True)
class PrepareConfig(Options):
    """How a log becomes a dataset (`ncf prepare`)."""

    min_ratings: int = option(20, "drop users with fewer distinct items (1 keeps all); 20 as the NVIDIA recipe", low=1)
    min_value: float | None = option(None, "drop rows whose rating or weight is below this; they still count as seen")
    validation: bool = option(True, "hold out each user's last but one interaction to select the epoch on")
    user_column: str | None = option(None, "the column that holds the user: a name, or a number from 1")
    item_column: str | None = option(None, "the column that holds the item: a name, or a number from 1")
    value_column: str | None = option(None, "the column that holds the rating or weight: a name, or a number from 1")
    time_column: str | None = option(None, "the column that holds the time: a name, or a number from 1")
    delimiter: str | None = option(
        None, "what separates the columns of a text file: characters, `tab` or `space` (default: found by itself)"
    )
    header: bool | None = option(None, "whether the first line of a text file names the columns (default: found)")
    on_bad_rows: str = option("error", "a row that cannot be read: stop, or skip and count", choices=("error", "skip"))
    item_names: str | None = option(None, "a file with each item's id and title")
    seed: int = option(0, "fixes the evaluation negatives, and a synthetic log", low=0, high=2**32 - 1)
    users: int = option(2000, "users of a `synthetic` log", low=1)
    items: int = option(1000, "items of a `synthetic` log", low=2)
    interactions: int = option(120_000, "interactions of a `synthetic` log", low=1)


@dataclass(frozen=True)
class TrainConfig(Options):
    """What defines a trained model: the network, the optimization and the exam (`ncf train`).

    Defaults are those of NVIDIA's NCF for TensorFlow (README and `ncf.py`) unless said otherwise.
    """

    # the network
    factors: int = option(64, "width of GMF, the product of user and item; 0 leaves MLP alone", "-f", low=0)
    layers: tuple[int, ...] = option(
        (256, 256, 128, 64), "widths of MLP, the first that of the concatenated embeddings; `none` leaves GMF", low=1
    )
    dropout: float = option(0.5, "share of hidden activations dropped in training; 0 is off", low=0, below=1)
    # the optimization
    epochs: int = option(40, "passes over the interactions", "-e", low=1, live=True)
    batch_size: int | None = option(
        None, "positives and negatives in a step (default: about 100 steps an epoch, at most 1048576)", "-b", low=1
    )
    negative_samples: int = option(4, "negatives drawn for each interaction, anew every epoch", "-n", low=1)
    learning_rate: float = option(0.0045, "Adam's step size", "-l", above=0)
    beta1: float = option(0.25, "Adam's decay of the gradient's mean", "-b1", low=0, below=1)
    beta2: float = option(0.5, "Adam's decay of the gradient's square", "-b2", low=0, below=1)
    eps: float = option(1e-8, "Adam's guard against division by zero", above=0)
    neg_trick: bool = option(False, "draw negatives unchecked, so that a few are positives (the recipe's shortcut)")
    precision: str = option(
        "fp32", "number format of matrix products; parameters stay fp32", choices=("fp32", "bf16", "fp16")
    )
    loss_scale: float | str = option("dynamic", "fp16's loss scale", above=0, words=("dynamic",))
    compile: bool | None = option(None, "compile the step (default: on a GPU with a C compiler at hand)")
    seed: int = option(0, "fixes initial weights, negatives, order and dropout", "-s", low=0, high=2**32 - 1)
    # when to look, and what to keep
    eval_after: int = option(0, "epochs before the first that is evaluated; 0 evaluates every one", low=0)
    target: float | None = option(None, "stop at this HR (default: off)", "-t", above=0, high=1, live=True)
    patience: int = option(0, "stop after this many epochs without a better one; 0 is off", low=0, live=True)
    select_on: str = option(
        "validation",
        "what picks the epoch to keep; `test` is the recipe's habit, `last` keeps the last epoch",
        choices=("validation", "test", "last"),
    )
    fit_all: bool = option(False, "after selection, train again on every interaction, for the model to deploy")
    # the exam
    topk: int = option(10, "cutoff of HR and NDCG", "-k", low=1)
    valid_negative: int | str = option(
        99,
        "items without an interaction of the user that the held-out one is ranked with; `all` is the whole catalogue",
        low=1,
        words=("all",),
    )
    valid_users_per_batch: int = option(5000, "users scored at a time in evaluation", low=1)


@dataclass(frozen=True)
class RunConfig(Options):
    """Where and how a run goes; none of it changes the model (beyond a device's rounding)."""

    checkpoint_dir: str | None = option(None, "the run's directory (default: runs/<dataset>)", live=True)
    resume: bool = option(
        False, "go on from the last finished epoch, with the run's options but for those given", live=True
    )
    overwrite: bool = option(False, "replace an existing run, which is deleted when training begins", live=True)
    device: str = option("auto", "auto, cpu, cuda or cuda:N", live=True)
    verbose: bool = option(False, "a line after every epoch, not only after a new best", live=True)
    tensorboard: bool = option(False, "write TensorBoard events into the run's directory", live=True)


@dataclass(frozen=True)
class BenchmarkConfig(Options):
    """The size of the random log that `ncf benchmark` makes up; MovieLens 20M's by default."""

    users: int = option(138_493, "users of the log", low=1)
    items: int = option(26_744, "items of the log", low=2)
    interactions: int = option(20_000_263, "interactions that an epoch visits", low=1)


@dataclass(frozen=True)
class LaunchConfig(Options):
    """How many processes compute; each has a range of the users."""

    devices: int = option(1, "processes on this machine, each on a GPU of its own or a share of the CPU's cores", low=1)
