"""The command line: the only module that parses, prints errors and exits.

Data goes to stdout; warnings, notes and progress bars to stderr. Exit status: 0, 2 for input and usage, 1 for a run
that failed, 130 for Ctrl-C.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncf import __version__
from ncf.config import BenchmarkConfig, LaunchConfig, PrepareConfig, RunConfig, TrainConfig
from ncf.errors import InputError, NcfWarning, RunError, explain
from ncf.flags import (
    PROTOCOL,
    Parser,
    add_benchmark,
    add_evaluate,
    add_prepare,
    add_recommend,
    add_train,
    build_config,
    check_given,
    explicit_options,
)
from ncf.parallel.environment import ProcessEnv, process_env
from ncf.parallel.launch import launch

if TYPE_CHECKING:
    from ncf.parallel.group import ProcessGroup

say = partial(print, flush=True)
PARALLEL = ("train", "evaluate")  # commands that several processes run together
EXAMPLES = {
    "prepare": ("clicks.csv -o data/clicks", "ml-1m -o data/ml-1m --min-ratings 5"),
    "train": ("--data data/clicks --checkpoint-dir runs/clicks", "--data data/ml-20m --devices 4 --precision bf16"),
    "evaluate": ("--checkpoint-dir runs/clicks", "--checkpoint-dir runs/clicks --valid-negative all --json"),
    "recommend": ("--checkpoint-dir runs/clicks --user 7 -k 5", "--checkpoint-dir runs/clicks --all --format csv"),
    "benchmark": ("", "--data data/clicks --precision fp32 --json"),
    "doctor": ("", "--json"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    warnings.showwarning = _show_warning
    # Read by torch when it is loaded: huge pages spare gathers from large tables most of their address look-ups.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    env = ProcessEnv()
    try:
        env = process_env()
        if env.world > 1:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its notes on lost connections would hide our line
        if env.rank:
            warnings.showwarning = lambda *_args, **_kwargs: None  # rank 0 shows them
        parsed, unknown = _parser().parse_known_args(arguments)
        if unknown:
            raise InputError(f"unrecognized arguments: {' '.join(unknown)}; see `ncf {parsed.name} --help`")
        check_given(f"ncf {parsed.name}", parsed)
        parsed.env = env
        if (devices := _to_launch(parsed)) > 1:
            return launch(devices, arguments)
        parsed.command(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, RunError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
        status, message = explain(error)
        if not (env.rank and status == 130):  # Ctrl-C reaches all processes, and rank 0 says what is saved
            rank = f"rank {env.rank}: " if env.world > 1 else ""
            print(f"ncf: {rank}{' '.join(message.split())}", file=sys.stderr, flush=True)
        return status
    return 0


def _to_launch(parsed: argparse.Namespace) -> int:
    """How many processes to start; 1 for none, as this is one of them already, or all there is."""
    env: ProcessEnv = parsed.env
    if env.world > 1 and parsed.name not in PARALLEL:
        raise InputError(
            f"`ncf {parsed.name}` runs in one process, and {env.world} were started: leave the launcher out"
        )
    devices = build_config(LaunchConfig, parsed).devices
    if devices == 1 or env.launched:
        return 1
    if env.world > 1:
        raise InputError(f"--devices {devices} starts processes, and this is one of {env.world} already: leave it out")
    TrainConfig.from_recipe(
        **explicit_options(TrainConfig, parsed)
    )  # a wrong option is one line here, and would be one from each process
    build_config(RunConfig, parsed)
    return devices


def _show_warning(message: Warning | str, category: type[Warning], *_args: Any, **_kwargs: Any) -> None:
    if issubclass(category, NcfWarning):
        print(f"ncf: warning: {message}", file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(
        prog="ncf", description="Neural Collaborative Filtering: from a log of interactions to recommendations."
    )
    parser.add_argument("--version", action="version", version=f"ncf {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    add_prepare(_command(commands, "prepare", "turn a log into a dataset", _prepare))
    add_train(_command(commands, "train", "train a model on a dataset", _train))
    add_evaluate(_command(commands, "evaluate", "score a trained model", _evaluate))
    add_recommend(_command(commands, "recommend", "list the best items of users", _recommend))
    add_benchmark(_command(commands, "benchmark", "measure how fast this machine trains and ranks", _benchmark))
    doctor = _command(commands, "doctor", "show versions, devices and what they can do", _doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _command(commands: Any, name: str, text: str, function: Callable[[argparse.Namespace], None]) -> Parser:
    examples = "\n".join(f"  ncf {name} {example}".rstrip() for example in EXAMPLES[name])
    parser: Parser = commands.add_parser(name, help=text, description=text, epilog=f"Examples:\n{examples}\n")
    parser.set_defaults(command=function, name=name, needed=parser.get_default("needed") or [], configs=parser.configs)
    return parser


def _prepare(arguments: argparse.Namespace) -> None:
    from ncf.ingest.prepare import default_output, prepare  # noqa: PLC0415 - a command loads what it needs
    from ncf.ingest.summary import format_summary  # noqa: PLC0415

    dataset = prepare(
        arguments.source,
        arguments.output or default_output(arguments.source),
        config=build_config(PrepareConfig, arguments),
        overwrite=arguments.overwrite,
        progress=sys.stderr.isatty(),
    )
    say("\n".join(format_summary(dataset)))


def _train(arguments: argparse.Namespace) -> None:
    from ncf.data.shard import load_dataset  # noqa: PLC0415
    from ncf.data.storage import read_manifest  # noqa: PLC0415
    from ncf.runs.start import resolve_config, run_directory  # noqa: PLC0415
    from ncf.training.train import train  # noqa: PLC0415

    run = build_config(RunConfig, arguments)
    explicit = explicit_options(TrainConfig, arguments)
    if arguments.mode == "test":
        arguments.checkpoint_dir = run_directory(run, read_manifest(Path(arguments.data))["name"])
        arguments.split, arguments.json = "test", False
        _evaluate(arguments)
        return
    if arguments.env.restarts:  # torchrun has started the processes anew, after one failed
        run = run.replaced(resume=True, overwrite=False)
    with _join(arguments.env, run.device) as group:
        dataset = load_dataset(arguments.data, group)
        config = resolve_config(run, dataset.name, **explicit)
        log = say if group.is_main else lambda _: None
        train(dataset, config, run, progress=sys.stderr.isatty(), log=log, group=group)


def _join(env: ProcessEnv, device: str) -> AbstractContextManager["ProcessGroup"]:
    from ncf.device import backend_for  # noqa: PLC0415
    from ncf.parallel.group import join  # noqa: PLC0415

    return join(env, backend_for(device))


def _evaluate(arguments: argparse.Namespace) -> None:
    from ncf.data.storage import read_manifest  # noqa: PLC0415
    from ncf.recommender import Recommender  # noqa: PLC0415
    from ncf.report import test_line  # noqa: PLC0415
    from ncf.runs.run import BEST, DATASET  # noqa: PLC0415

    config, device = build_config(TrainConfig, arguments), build_config(RunConfig, arguments).device
    protocol = {name: value for name, value in explicit_options(TrainConfig, arguments).items() if name in PROTOCOL}
    path, data = Path(arguments.checkpoint_dir), arguments.data
    if data and (path / DATASET).exists():
        trained_on = read_manifest(path / DATASET)["fingerprint"]
        if read_manifest(Path(data))["fingerprint"] != trained_on:
            raise InputError(f"{path} was trained on another dataset than {data}: leave --data out")
    with _join(arguments.env, device) as group:
        recommender = Recommender._load(path, device, BEST, group)
        start = time.perf_counter()
        found = recommender.evaluate(
            arguments.split, precision=config.precision, progress=sys.stderr.isatty(), **protocol
        )
        seconds = time.perf_counter() - start
    if arguments.env.rank == 0:
        lines = test_line(seconds, found.k, found.hr, found.ndcg), recommender.describe(found)
        say(json.dumps(found.to_dict()) if arguments.json else "\n".join(lines))


def _recommend(arguments: argparse.Namespace) -> None:
    from ncf.lists import write_recommendations  # noqa: PLC0415
    from ncf.recommender import Recommender  # noqa: PLC0415

    options = build_config(TrainConfig, arguments)
    recommender = Recommender.load(arguments.checkpoint_dir, device=build_config(RunConfig, arguments).device)
    rows = recommender.recommend_rows(
        recommender.dataset.user_ids.tolist() if arguments.all else _users(arguments),
        options.topk,
        filter_seen=not arguments.include_seen,
        precision=options.precision,
    )
    write_recommendations(rows, arguments.format, arguments.output)


def _users(arguments: argparse.Namespace) -> list[str]:
    if arguments.user:
        return list(arguments.user)
    try:
        lines = Path(arguments.users_file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--users-file {arguments.users_file} cannot be read: {error}") from None
    users = [line.strip() for line in lines if line.strip()]
    if not users:
        raise InputError(f"--users-file {arguments.users_file} names no user: give an id in each line")
    return users


def _benchmark(arguments: argparse.Namespace) -> None:
    from ncf.benchmark import benchmark, format_benchmark  # noqa: PLC0415
    from ncf.data.dataset import Dataset  # noqa: PLC0415

    config = TrainConfig.from_recipe(**explicit_options(TrainConfig, arguments))
    sizes = build_config(BenchmarkConfig, arguments)
    if arguments.data and explicit_options(BenchmarkConfig, arguments):
        raise InputError(f"--data {arguments.data} has its own sizes: leave --users, --items and --interactions out")
    results = benchmark(
        Dataset.load(arguments.data) if arguments.data else sizes,
        config,
        precisions=[config.precision] if "precision" in explicit_options(TrainConfig, arguments) else [],
        device=build_config(RunConfig, arguments).device,
        progress=sys.stderr.isatty(),
    )
    found = results[0] if len(results) == 1 else {**results[0], "precisions": results}
    say(json.dumps(found) if arguments.json else "\n".join(format_benchmark(results)))


def _doctor(arguments: argparse.Namespace) -> None:
    from ncf.doctor import examine  # noqa: PLC0415

    found = examine()
    if arguments.json:
        say(json.dumps(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        say(f"{name:<{width}}{value}")
