"""Command-line flags made from the dataclasses of `config.py`, so that every option stands in one place."""

import argparse
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, NoReturn, TypeVar

from ncf.config import (
    BenchmarkConfig,
    LaunchConfig,
    Options,
    PrepareConfig,
    RunConfig,
    TrainConfig,
    describe_range,
    flag_name,
    scalar_types,
)
from ncf.errors import InputError

Group = TypeVar("Group", bound=Options)
EXAM = {
    "topk": "cutoff of HR and NDCG (default: the run's)",
    "valid_negative": "items ranked with the held-out one, or all, as for `ncf train` (default: the run's)",
    "valid_users_per_batch": "users scored at a time (default: the run's)",
}
LIST = {"topk": "items to list for a user (default: 10)", "precision": None}
MEASURED = {
    **dict.fromkeys(("factors", "layers", "dropout", "batch_size", "negative_samples", "compile", "topk")),
    "precision": "fp32, bf16 or fp16 (default: every one that the device supports, one after the other)",
}


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of printing usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say as InputError."""
        raise InputError(f"{message}; see `{self.prog} --help`")


def add_options(
    parser: argparse.ArgumentParser, group: type[Options], texts: Mapping[str, str | None] | None = None
) -> None:
    """Add a flag for every field of `group`, or for those in `texts`, which may give one another help text.

    A flag that is not given leaves no trace.
    """
    for item in fields(group):
        if texts is None or item.name in texts:
            _add(parser, item, texts[item.name] if texts else None)


def add_recipe_names(parser: argparse.ArgumentParser) -> None:
    """Add the recipe's other names of training options."""
    recipe = parser.add_argument_group("the recipe's other names")
    recipe.add_argument(
        "--no-neg-trick",
        dest="neg_trick",
        action="store_false",
        default=argparse.SUPPRESS,
        help="draw exact negatives, which is the default",
    )
    recipe.add_argument(
        "--fp16",
        "--amp",
        dest="precision",
        action="store_const",
        const="fp16",
        default=argparse.SUPPRESS,
        help="--precision fp16",
    )
    recipe.add_argument("--xla", dest="compile", action="store_true", default=argparse.SUPPRESS, help="--compile")


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ncf prepare`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a file (CSV or any delimiter, gzip, Parquet, JSON lines), a glob, a MovieLens zip or directory, or a "
        "name: ml-100k, ml-latest-small, ml-1m, ml-10m, ml-20m, ml-25m, ml-32m, synthetic",
    )
    parser.add_argument("-o", "--output", metavar="DIR", help="where to write the dataset (default: data/<name>)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    add_options(parser, PrepareConfig)


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ncf train`."""
    parser.add_argument("--data", required=True, metavar="DIR", help="the dataset that `ncf prepare` wrote")
    parser.add_argument("--mode", choices=("train", "test"), default="train", help="`test` is `ncf evaluate`")
    add_options(parser, TrainConfig)
    add_options(parser, RunConfig)
    add_options(parser, LaunchConfig)
    add_recipe_names(parser)


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ncf evaluate`."""
    parser.add_argument("--checkpoint-dir", required=True, metavar="RUN", help="the run's directory")
    parser.add_argument("--data", metavar="DIR", help="check that the run was trained on this dataset")
    parser.add_argument("--split", choices=("test", "validation"), default="test", help="(default: test)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, TrainConfig, {**EXAM, "precision": None})
    add_options(parser, RunConfig, {"device": None})
    add_options(parser, LaunchConfig)


def add_recommend(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ncf recommend`."""
    parser.add_argument("--checkpoint-dir", required=True, metavar="RUN", help="the run's directory")
    users = parser.add_mutually_exclusive_group(required=True)
    users.add_argument("--user", action="append", metavar="ID", help="a user, by the log's id; may be repeated")
    users.add_argument("--users-file", metavar="FILE", help="a file with a user's id in each line")
    users.add_argument("--all", action="store_true", help="every user")
    parser.add_argument("--include-seen", action="store_true", help="also list what the user has touched")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(default: table)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write here instead of standard output")
    add_options(parser, TrainConfig, LIST)
    add_options(parser, RunConfig, {"device": None})


def add_benchmark(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ncf benchmark`."""
    parser.add_argument("--data", metavar="DIR", help="measure on a dataset instead of a random log")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, BenchmarkConfig)
    add_options(parser, TrainConfig, MEASURED)
    add_options(parser, RunConfig, {"device": None})


def take(group: type[Group], arguments: argparse.Namespace) -> Group:
    """The option group, from what was given on the command line. Raises InputError for a value out of its range."""
    return group(**given(group, arguments))


def given(group: type[Options], arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `group` that the command line gave."""
    names = {item.name for item in fields(group)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _add(parser: argparse.ArgumentParser, item: Field[Any], text: str | None) -> None:
    flags = [*item.metadata["flags"], flag_name(item.name)]
    settings: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text or _help(item)}
    if bool in scalar_types(item):
        settings["action"] = "store_true" if item.default is False else argparse.BooleanOptionalAction
    elif typing.get_origin(item.type) is tuple:
        settings |= {"nargs": "+", "action": _Many, "metavar": "N", "item": item}
    else:
        settings |= {"type": _Convert(item), "metavar": _metavar(item)}
    parser.add_argument(*flags, **settings)


def _help(item: Field[Any]) -> str:
    """The option's text with its range and default, where they are not said already."""
    parts = [item.metadata["help"]]
    allowed = describe_range(item)
    if allowed:
        parts.append(f"[{allowed}]")
    if item.default is not None and not isinstance(item.default, bool):
        default = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else item.default
        parts.append(f"(default: {default})")
    return " ".join(parts).replace("%", "%%")


def _metavar(item: Field[Any]) -> str:
    kinds = scalar_types(item)
    if item.metadata["choices"]:
        return "|".join(item.metadata["choices"])
    if item.name == "item_names":
        return "FILE"
    return "N" if int in kinds else "X" if float in kinds else item.name.rsplit("_", maxsplit=1)[-1].upper()


class _Convert:
    """Text of the command line to the option's type; the dataclass checks the range."""

    def __init__(self, item: Field[Any]) -> None:
        self.item = item

    def __call__(self, text: str) -> Any:
        kinds = scalar_types(self.item)
        for kind in (int, float):
            if kind in kinds:
                try:
                    return kind(text)
                except ValueError:
                    continue
        if str in kinds and (not self.item.metadata["words"] or text in self.item.metadata["words"]):
            return text
        kind_name = "a whole number" if int in kinds else "a number"
        allowed = describe_range(self.item)
        raise argparse.ArgumentTypeError(f"must be {kind_name}{f', {allowed}' if allowed else ''}: got {text!r}")


class _Many(argparse.Action):
    """Several values to a tuple; the word `none` to the empty one."""

    def __init__(self, *args: Any, item: Field[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.item = item

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _flag: str | None = None) -> None:
        try:
            converted = () if values == ["none"] else tuple(_Convert(self.item)(text) for text in values)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, converted)
