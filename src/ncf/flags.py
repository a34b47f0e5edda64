"""Command-line flags, made from the option classes of `config.py`, so that every option stands in one place."""

import argparse
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, NoReturn, TypeVar

from ncf.config import GROUPS, RECIPES, BenchmarkConfig, LaunchConfig, PrepareConfig, RunConfig, TrainConfig
from ncf.errors import InputError
from ncf.options import Options, describe_range, flag_name, scalar_types

Config = TypeVar("Config", bound=Options)
PROTOCOL = {
    "topk": "cutoff of HR and NDCG (default: the run's)",
    "valid_negative": "items ranked with the held-out one, or all, as for `ncf train` (default: the run's)",
    "valid_users_per_batch": "users scored at a time (default: the run's)",
}
LIST = {"topk": "items per user (default: 10)", "precision": None}
MEASURED = {
    **dict.fromkeys(("recipe", "factors", "layers", "dropout", "history", "item_bias", "loss", "batch_size")),
    **dict.fromkeys(
        ("steps_per_epoch", "smallest_batch", "negative_samples", "shared_negatives", "user_dropout", "compile", "topk")
    ),
    "precision": "fp32, bf16 or fp16 (default: every one that the device supports, one after the other)",
}
OTHER_NAMES = "the recipe's other names"
EPILOG = """
Documentation: README.md and docs/ in the source tree.
Exit status: 0; 2 for input and usage; 1 for a run that failed; 130 for Ctrl-C."""


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of printing usage and exiting.

    What is `needed` is checked after the rest, so that a flag that is wrong is named before one that is missing.
    """

    def __init__(self, **settings: Any) -> None:
        epilog = settings.pop("epilog", "") + EPILOG
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**settings, epilog=epilog, formatter_class=formatter, allow_abbrev=False)
        self.groups = {title: self.add_argument_group(title) for title in (*GROUPS, OTHER_NAMES)}
        self.configs: list[type[Options]] = []  # whose flags the command has

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say as InputError."""
        raise InputError(f"{message}; see `{self.prog} --help`")


def add_options(parser: Parser, config: type[Options], texts: Mapping[str, str | None] | None = None) -> None:
    """Add a flag for every field of `config`, or for those in `texts`, which may replace the help text."""
    parser.configs.append(config)
    for item in fields(config):
        if texts is None or item.name in texts:
            _add_flag(parser, item, texts[item.name] if texts else None)


def add_prepare(parser: Parser) -> None:
    """Add the flags of `ncf prepare`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a file (CSV or any delimiter, gzip, Parquet, JSON lines), a glob, a MovieLens zip or directory, or a "
        "name: ml-100k, ml-latest-small, ml-1m, ml-10m, ml-20m, ml-25m, ml-32m, synthetic",
    )
    data = parser.groups["data and run"]
    data.add_argument("-o", "--output", metavar="DIR", help="where to write the dataset (default: data/<name>)")
    data.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    add_options(parser, PrepareConfig)
    parser.set_defaults(needed=[("source",)])


def add_train(parser: Parser) -> None:
    """Add the flags of `ncf train`."""
    data = parser.groups["data and run"]
    data.add_argument("--data", metavar="DIR", help="the dataset that `ncf prepare` wrote (required)")
    data.add_argument("--mode", choices=("train", "test"), default="train", help="`test` is `ncf evaluate`")
    for config in (TrainConfig, RunConfig, LaunchConfig):
        add_options(parser, config)
    other = parser.groups[OTHER_NAMES]
    suppress: dict[str, Any] = {"default": argparse.SUPPRESS}
    other.add_argument("--no-neg-trick", dest="neg_trick", action="store_false", help="the default", **suppress)
    half: dict[str, Any] = {"dest": "precision", "action": "store_const", "const": "fp16", "help": "--precision fp16"}
    other.add_argument("--fp16", "--amp", **half, **suppress)
    other.add_argument("--xla", dest="compile", action="store_true", help="--compile", **suppress)
    parser.set_defaults(needed=[("data",)])


def add_evaluate(parser: Parser) -> None:
    """Add the flags of `ncf evaluate`."""
    _add_run(parser)
    data = parser.groups["data and run"]
    data.add_argument("--data", metavar="DIR", help="check that the run was trained on this dataset")
    data.add_argument("--split", choices=("test", "validation"), default="test", help="(default: test)")
    data.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, TrainConfig, {**PROTOCOL, "precision": None})
    add_options(parser, RunConfig, {"device": None})
    add_options(parser, LaunchConfig)


def add_recommend(parser: Parser) -> None:
    """Add the flags of `ncf recommend`."""
    _add_run(parser)
    data = parser.groups["data and run"]
    users = data.add_mutually_exclusive_group()
    users.add_argument("--user", action="append", metavar="ID", help="a user, by the log's id; may be repeated")
    users.add_argument("--users-file", metavar="FILE", help="a file with one user id per line")
    users.add_argument("--all", action="store_true", default=None, help="every user")
    data.add_argument("--include-seen", action="store_true", help="also list what the user has interacted with")
    data.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(default: table)")
    data.add_argument("-o", "--output", metavar="FILE", help="write here instead of standard output")
    add_options(parser, TrainConfig, LIST)
    add_options(parser, RunConfig, {"device": None})
    parser.set_defaults(needed=[("checkpoint_dir",), ("user", "users_file", "all")])


def add_benchmark(parser: Parser) -> None:
    """Add the flags of `ncf benchmark`."""
    data = parser.groups["data and run"]
    data.add_argument("--data", metavar="DIR", help="measure on a dataset instead of a random log")
    data.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, BenchmarkConfig)
    add_options(parser, TrainConfig, MEASURED)
    add_options(parser, RunConfig, {"device": None})


def check_given(parser_prog: str, arguments: argparse.Namespace) -> None:
    """Raise InputError for a value out of its range, then where none of the alternatives of a needed flag was given."""
    for config in arguments.configs:
        build_config(config, arguments)
    for names in arguments.needed:
        if all(getattr(arguments, name, None) is None for name in names):
            flags = [name.upper() if name == "source" else flag_name(name) for name in names]
            wanted = flags[0] if len(flags) == 1 else f"one of {', '.join(flags)}"
            raise InputError(f"{wanted} is missing; see `{parser_prog} --help`")


def build_config(config: type[Config], arguments: argparse.Namespace) -> Config:
    """The options of one class, from the command line. Raises InputError for a value out of its range."""
    return config(**explicit_options(config, arguments))


def explicit_options(config: type[Options], arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `config` that the command line gave."""
    names = {item.name for item in fields(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _add_run(parser: Parser) -> None:
    parser.groups["data and run"].add_argument("--checkpoint-dir", metavar="RUN", help="the run's directory (required)")
    parser.set_defaults(needed=[("checkpoint_dir",)])


def _add_flag(parser: Parser, item: Field[Any], text: str | None) -> None:
    flags = [*item.metadata["flags"], flag_name(item.name)]
    settings: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text or _help(item)}
    if bool in scalar_types(item):
        plain = item.default is False and item.name not in RECIPES["history"]
        settings["action"] = "store_true" if plain else argparse.BooleanOptionalAction
    elif typing.get_origin(item.type) is tuple:
        settings |= {"nargs": "+", "type": _converter(item), "metavar": "N"}
    else:
        settings |= {"type": _converter(item), "metavar": _metavar(item)}
    parser.groups[item.metadata["group"]].add_argument(*flags, **settings)


def _help(item: Field[Any]) -> str:
    """The option's text with its range and default, where they are not said already."""
    parts = [item.metadata["help"]]
    if (allowed := describe_range(item)) and not item.metadata["choices"]:  # those stand in the metavar
        parts.append(f"[{allowed}]")
    default = RECIPES["history"].get(item.name, item.default)
    if item.name == "recipe":
        parts.append("(default: history)")
    elif default != item.default:
        parts.append(f"(default: {_spelled(default)}; --recipe nvidia: {_spelled(item.default)})")
    elif default is not None and not isinstance(default, bool):
        parts.append(f"(default: {_spelled(default)})")
    return " ".join(parts).replace("%", "%%")


def _spelled(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _metavar(item: Field[Any]) -> str:
    kinds = scalar_types(item)
    if item.metadata["choices"]:
        return "|".join(item.metadata["choices"])
    if item.name == "item_names":
        return "FILE"
    return "N" if int in kinds else "X" if float in kinds else item.name.rsplit("_", maxsplit=1)[-1].upper()


def _converter(item: Field[Any]) -> Callable[[str], Any]:
    """Text of the command line to the option's type; the option class checks the range."""
    kinds, several = scalar_types(item), typing.get_origin(item.type) is tuple

    def convert(text: str) -> Any:
        if several and text == "none":
            return text
        for kind in (int, float):
            if kind in kinds:
                try:
                    return kind(text)
                except ValueError:
                    continue
        if str in kinds and (not item.metadata["words"] or text in item.metadata["words"]):
            return text
        kind_name = "a whole number" if int in kinds else "a number"
        allowed = describe_range(item)
        raise argparse.ArgumentTypeError(f"must be {kind_name}{f', {allowed}' if allowed else ''}: got {text!r}")

    return convert
