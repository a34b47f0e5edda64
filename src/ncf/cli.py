"""The command line: the only module that parses, prints errors and exits.

    ncf prepare SOURCE -o DIR        a log becomes a dataset
    ncf train --data DIR             a dataset becomes a model
    ncf evaluate --checkpoint-dir RUN
    ncf recommend --checkpoint-dir RUN --user ID
    ncf benchmark                    how fast this machine does all that
    ncf doctor                       versions and devices

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
from ncf.launch import Place, launch, place_here
from ncf.options import (
    EXAM,
    Parser,
    add_benchmark,
    add_evaluate,
    add_prepare,
    add_recommend,
    add_train,
    given,
    take,
)

if TYPE_CHECKING:
    from ncf.distributed import Ranks

say = partial(print, flush=True)
TOGETHER = ("train", "evaluate")  # commands that several processes do together
FIRST_SECONDS = 1.0  # for rank 0 to say what all ranks meet: a launcher ends all when one ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    warnings.showwarning = _show_warning
    # Read by torch when it is loaded: huge pages spare gathers from large tables most of their address look-ups.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    place = Place()
    try:
        place = place_here()
        _quiet(place)
        parsed, unknown = _parser().parse_known_args(arguments)
        if unknown:
            raise InputError(f"unrecognized arguments: {' '.join(unknown)}; see `ncf {parsed.name} --help`")
        parsed.place = place
        if (devices := _to_launch(parsed)) > 1:
            return launch(devices, arguments)
        parsed.command(parsed)
        sys.stdout.flush()
    except BrokenPipeError as error:  # the reader of our output has had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(place, 1, "", error)
    except (InputError, RunError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
        status, message = explain(error)
        return _fail(place, status, " ".join(message.split()), error)
    return 0


def _quiet(place: Place) -> None:
    """Of several processes the first speaks; torch's own warnings of lost connections would hide our line."""
    if place.world > 1:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        warnings.showwarning = _show_warning if place.rank == 0 else _show_nothing


def _to_launch(parsed: argparse.Namespace) -> int:
    """How many processes to start; 1 for none, as this is one of them already, or all there is."""
    place: Place = parsed.place
    if place.world > 1 and parsed.name not in TOGETHER:
        raise InputError(
            f"`ncf {parsed.name}` is the work of one process, and this is one of {place.world}: start it by itself"
        )
    devices = take(LaunchConfig, parsed).devices
    if devices == 1 or place.ours:
        return 1
    if place.world > 1:
        raise InputError(
            f"--devices {devices} starts processes, and this is one of {place.world} already: leave it out"
        )
    return devices


def _fail(place: Place, status: int, message: str, error: BaseException) -> int:
    """Print what went wrong, where this process is the one to say it; the exit status."""
    said: str | None = message
    if place.world > 1 and "ncf.meeting" in sys.modules:
        from ncf.meeting import spoken, status_of  # noqa: PLC0415 - torch, which a single process may do without

        said, status = spoken(place, message, error), status_of(status, error)
    elif place.rank:
        said = None
        time.sleep(FIRST_SECONDS)
    if said:
        print(f"ncf: {said}", file=sys.stderr, flush=True)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *_args: Any, **_kwargs: Any) -> None:
    if issubclass(category, NcfWarning):
        print(f"ncf: warning: {message}", file=sys.stderr)


def _show_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Another process shows the warnings that all of them meet."""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ncf", description="Neural Collaborative Filtering.", allow_abbrev=False)
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


def _command(
    commands: Any, name: str, text: str, function: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(command=function, name=name)
    return parser


def _prepare(arguments: argparse.Namespace) -> None:
    from ncf.data.prepare import default_output, prepare  # noqa: PLC0415 - a command loads what it needs
    from ncf.data.summary import format_summary  # noqa: PLC0415

    dataset = prepare(
        arguments.source,
        arguments.output or default_output(arguments.source),
        config=take(PrepareConfig, arguments),
        overwrite=arguments.overwrite,
        progress=sys.stderr.isatty(),
    )
    say("\n".join(format_summary(dataset)))


def _train(arguments: argparse.Namespace) -> None:
    from ncf.data.part import load_dataset  # noqa: PLC0415
    from ncf.data.tables import read_manifest  # noqa: PLC0415
    from ncf.model.checkpoint import options_of  # noqa: PLC0415
    from ncf.model.start import run_directory  # noqa: PLC0415
    from ncf.training.train import train  # noqa: PLC0415

    config, run = take(TrainConfig, arguments), take(RunConfig, arguments)
    if arguments.mode == "test":
        _print_evaluation(
            arguments.place,
            run_directory(run, read_manifest(Path(arguments.data))["name"]),
            data=arguments.data,
            device=run.device,
            precision=config.precision,
            protocol={name: value for name, value in given(TrainConfig, arguments).items() if name in EXAM},
        )
        return
    if arguments.place.restarts:  # torchrun has started the processes anew, after one failed
        run = run.replaced(resume=True, overwrite=False)
    with _joined(arguments.place, run.device) as ranks:
        dataset = load_dataset(arguments.data, ranks)
        if run.resume and (own := options_of(run_directory(run, dataset.name))):  # what is not said again is as it was
            config = own.replaced(**given(TrainConfig, arguments))
        train(
            dataset, config, run, progress=sys.stderr.isatty(), log=say if ranks.first else _show_nothing, ranks=ranks
        )


def _joined(place: Place, device: str) -> AbstractContextManager["Ranks"]:
    from ncf.device import backend_for  # noqa: PLC0415
    from ncf.meeting import join  # noqa: PLC0415

    return join(place, backend_for(device))


def _evaluate(arguments: argparse.Namespace) -> None:
    options = given(TrainConfig, arguments)
    _print_evaluation(
        arguments.place,
        arguments.checkpoint_dir,
        data=arguments.data,
        device=take(RunConfig, arguments).device,
        precision=options.pop("precision", "fp32"),
        protocol=options,
        split=arguments.split,
        as_json=arguments.json,
    )


def _print_evaluation(
    place: Place,
    checkpoint_dir: str | Path,
    *,
    data: str | None,
    device: str,
    precision: str,
    protocol: dict[str, Any],
    split: str = "test",
    as_json: bool = False,
) -> None:
    from ncf.data.tables import read_manifest  # noqa: PLC0415
    from ncf.recommender import Recommender  # noqa: PLC0415
    from ncf.report import test_line  # noqa: PLC0415

    with _joined(place, device) as ranks:
        recommender = Recommender.load(checkpoint_dir, device=device, weights="best", ranks=ranks)
        if data and read_manifest(Path(data))["fingerprint"] != recommender.dataset.fingerprint:
            raise InputError(
                f"the run in {checkpoint_dir} was trained on another dataset than {data}: leave --data out"
            )
        start = time.perf_counter()
        found = recommender.evaluate(split, precision=precision, progress=sys.stderr.isatty(), **protocol)
        seconds = time.perf_counter() - start
    if place.rank:
        return
    if as_json:
        say(json.dumps(found.to_dict()))
        return
    say(test_line(seconds, found.k, found.hr, found.ndcg))
    say(recommender.describe(found))


def _recommend(arguments: argparse.Namespace) -> None:
    from ncf.listing import write_lists  # noqa: PLC0415
    from ncf.recommender import Recommender  # noqa: PLC0415

    options = take(TrainConfig, arguments)
    recommender = Recommender.load(arguments.checkpoint_dir, device=take(RunConfig, arguments).device)
    write_lists(
        recommender,
        _users(arguments, recommender.dataset.user_ids.tolist()),
        k=options.topk,
        filter_seen=not arguments.include_seen,
        precision=options.precision,
        style=arguments.format,
        output=arguments.output,
    )


def _users(arguments: argparse.Namespace, everyone: list[Any]) -> list[Any]:
    if arguments.all:
        return everyone
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
    from ncf.benchmark import benchmark  # noqa: PLC0415
    from ncf.benchmark_table import format_benchmark, merged  # noqa: PLC0415
    from ncf.data.dataset import Dataset  # noqa: PLC0415

    config, sizes = take(TrainConfig, arguments), take(BenchmarkConfig, arguments)
    if arguments.data and given(BenchmarkConfig, arguments):
        raise InputError(f"--data {arguments.data} has its own sizes: leave --users, --items and --interactions out")
    results = benchmark(
        Dataset.load(arguments.data) if arguments.data else sizes,
        config,
        precisions=[config.precision] if "precision" in given(TrainConfig, arguments) else [],
        device=take(RunConfig, arguments).device,
        progress=sys.stderr.isatty(),
    )
    say(json.dumps(merged(results)) if arguments.json else "\n".join(format_benchmark(results)))


def _doctor(arguments: argparse.Namespace) -> None:
    from ncf.doctor import examine  # noqa: PLC0415

    found = examine()
    if arguments.json:
        say(json.dumps(found))
        return
    width = max(map(len, found)) + 2
    for name, value in found.items():
        say(f"{name:<{width}}{value}")
