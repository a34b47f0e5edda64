"""Where a run begins: in an empty directory, over another run, or where it was left off."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from ncf.config import RunConfig, TrainConfig
from ncf.data.shard import AnyDataset
from ncf.data.storage import KIND, MANIFEST
from ncf.errors import InputError
from ncf.files import is_marked, locked, replace_directory
from ncf.options import flag_name
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.runs.run import (
    BEST,
    CONFIG,
    DATASET,
    DEPLOY,
    LOCK,
    METRICS,
    RESULT,
    WEIGHTS,
    RunDirectory,
    is_inside,
    options_of,
)


def run_directory(run: RunConfig, dataset_name: str) -> Path:
    """Where a run on the dataset of that name goes."""
    return Path(run.checkpoint_dir or f"runs/{dataset_name}")


def resolve_config(run: RunConfig, dataset_name: str, **explicit: Any) -> TrainConfig:
    """The explicit options over those of their recipe or, where a run is resumed, over the run's own."""
    resumed = options_of(run_directory(run, dataset_name)) if run.resume else None
    return TrainConfig.from_recipe(**explicit) if resumed is None else resumed.replaced(**explicit)


def make_directory(path: Path, run: RunConfig) -> None:
    """Make the run's directory where there is none. Raises InputError where it cannot be, or holds something else."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--checkpoint-dir {path} cannot be used: {error.strerror}; choose another") from None
    if not run.resume:
        check_free(path, overwrite=run.overwrite)  # as `start_run` does, and before a lock is left where nothing may be


def check_free(path: Path, *, overwrite: bool) -> list[Path]:
    """The files of a run, or of one that was stopped while it began, that a new run in `path` replaces.

    `config.json` comes last: by it the others are recognized. Raises InputError where the directory holds a run
    (without `overwrite`) or anything else.
    """
    is_run = (path / CONFIG).exists()
    if is_run and not overwrite:
        raise InputError(
            f"{path} holds a run already: go on with --resume, start anew with --overwrite, or choose another directory"
        )
    found = []
    for file in path.iterdir():
        ours = is_run and file.name in {CONFIG, METRICS, RESULT, *WEIGHTS}
        ours |= file.name == DATASET and (is_run or is_marked(file / MANIFEST, KIND))
        ours |= file.name.startswith(".") and (file.name.endswith(".tmp") or file.name.startswith(f".{DATASET}-"))
        if ours:
            found.append(file)
        elif file.name != LOCK and not file.name.startswith("events.out.tfevents"):
            raise InputError(f"{path} contains {file.name}, which belongs to no run: choose another --checkpoint-dir")
    return sorted(found, key=lambda file: file.name == CONFIG)


def start_run(
    path: Path, config: TrainConfig, dataset: AnyDataset, *, resume: bool, overwrite: bool, group: ProcessGroup = SINGLE
) -> RunDirectory:
    """The run to train in the directory `path`, which exists: a new one, or with `resume` the one that is there.

    Raises InputError where the directory holds a run (without `resume` or `overwrite`) or anything else, and where
    the run to resume differs in an option that may not change.
    """
    if not (group.broadcast((path / CONFIG).exists) and resume):
        if group.is_main:
            for file in check_free(path, overwrite=overwrite):
                if not file.is_dir():
                    file.unlink()
                elif not (file.name == DATASET and is_inside(dataset, path)):
                    shutil.rmtree(file)
        return RunDirectory.create(path, config, dataset, group)
    run = RunDirectory.open(path, group, dataset=dataset)
    _check_same(run, config, dataset)
    saved = run.has(BEST) or run.has(DEPLOY)
    if saved and not group.broadcast((path / METRICS).exists):  # of Recommender.save
        raise InputError(f"{path} holds a saved model and no training to go on with: choose another --checkpoint-dir")
    run.config = config
    if group.is_main:
        for file in path.glob(".*.tmp"):  # of a process that was killed while it wrote
            file.unlink()
    run.write_config()
    return run


@contextmanager
def new_run(path: Path, config: TrainConfig, dataset: AnyDataset, *, overwrite: bool) -> Iterator[RunDirectory]:
    """A run to fill, which is at `path` afterwards, whole, or not at all; one that is replaced is kept until then.

    Raises InputError where `path` holds something (a run, without `overwrite`) or is in use.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file: choose another directory")
    with locked(path / LOCK, "`ncf train`") if path.exists() else nullcontext():
        if path.exists():
            check_free(path, overwrite=overwrite)
        with replace_directory(path) as folder:
            yield RunDirectory.create(folder, config, dataset)


def _check_same(run: RunDirectory, config: TrainConfig, dataset: AnyDataset) -> None:
    for item in fields(config):
        ours, theirs = getattr(config, item.name), getattr(run.config, item.name)
        if ours != theirs and not item.metadata["resumable"]:
            raise InputError(
                f"--resume cannot change {flag_name(item.name)}: the run in {run.path} has {theirs!r}, got {ours!r}"
            )
    if config.schedule != "constant" and config.epochs != run.config.epochs:
        raise InputError(
            f"--resume cannot change --epochs where the learning rate falls with them (--schedule {config.schedule}): "
            f"the run in {run.path} has {run.config.epochs}, got {config.epochs}"
        )
    if dataset.fingerprint != run.dataset.fingerprint:
        raise InputError(f"--resume: the run in {run.path} was trained on another dataset than {dataset.name}")
