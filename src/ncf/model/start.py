"""Where a run begins: in an empty directory, over another run, or where it was left off."""

from dataclasses import fields
from pathlib import Path

from ncf.config import RunConfig, TrainConfig, flag_name
from ncf.data.dataset import Dataset
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError
from ncf.model.checkpoint import BEST, CONFIG, DEPLOY, DEPLOY_LAST, LAST, LOCK, METRICS, RESULT, Run
from ncf.model.run_tables import is_run_table, table_names


def run_directory(run: RunConfig, dataset_name: str) -> Path:
    """Where a run on the dataset of that name goes."""
    return Path(run.checkpoint_dir or f"runs/{dataset_name}")


def make_directory(path: Path, run: RunConfig) -> None:
    """Make the run's directory where there is none. Raises InputError where it cannot be, or holds something else."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--checkpoint-dir {path} cannot be used: {error.strerror}; choose another") from None
    if not run.resume:
        check_free(path, overwrite=run.overwrite)  # as `start_run` does, and before a lock is left where nothing may be


def check_free(path: Path, *, overwrite: bool) -> list[Path]:
    """The files that a new run in the directory `path` replaces, `config.json` last.

    Raises InputError where a run may not be written there: it holds one (without `overwrite`), or something else.
    """
    if (path / CONFIG).exists() and not overwrite:
        raise InputError(
            f"{path} holds a run already: go on with --resume, start anew with --overwrite, or choose another directory"
        )
    return _leftovers(path)


def start_run(
    path: Path, config: TrainConfig, dataset: Dataset, *, resume: bool, overwrite: bool, ranks: Ranks = ALONE
) -> Run:
    """The run to train in the directory `path`, which exists: a new one, or with `resume` the one that is there.

    Raises InputError where the directory holds a run (without `resume` or `overwrite`) or anything else, and where
    the run to resume differs in more than a live option.
    """
    if ranks.from_first((path / CONFIG).exists) and resume:
        run = Run.open(path, ranks)
        _check_same(run, config, dataset)
        saved = run.has(BEST) or run.has(DEPLOY)
        if saved and not ranks.from_first((path / METRICS).exists):  # of Recommender.save
            raise InputError(
                f"{path} holds a saved model and no training to go on with: choose another --checkpoint-dir"
            )
        run.config = config
        if ranks.first:
            for file in path.glob(".*.tmp"):  # of a process that was killed while it wrote
                file.unlink()
        run.write_config()
        return run
    if ranks.first:
        for file in check_free(path, overwrite=overwrite):
            file.unlink()
    return Run.create(path, config, dataset, ranks)


def _check_same(run: Run, config: TrainConfig, dataset: Dataset) -> None:
    for item in fields(config):
        ours, theirs = getattr(config, item.name), getattr(run.config, item.name)
        if ours != theirs and not item.metadata["live"]:
            raise InputError(
                f"--resume cannot change {flag_name(item.name)}: the run in {run.path} has {theirs!r}, got {ours!r}"
            )
    if dataset.fingerprint != run.dataset.fingerprint:
        raise InputError(f"--resume: the run in {run.path} was trained on another dataset than {dataset.name}")


def _leftovers(path: Path) -> list[Path]:
    """What may be deleted to start a new run in `path`: the files of a run, whole or stopped while it began.

    Raises InputError where there is anything else, as the directory then serves another purpose.
    """
    weights = {f"{name}.safetensors" for name in (BEST, LAST, DEPLOY, DEPLOY_LAST)}
    is_run = (path / CONFIG).exists()
    found = []
    for file in path.iterdir():
        ours = file.name in table_names() and (is_run or is_run_table(file))
        ours |= is_run and file.name in {CONFIG, METRICS, RESULT, *weights}
        ours |= file.name.startswith(".") and file.name.endswith(".tmp")
        if ours:
            found.append(file)
        elif file.name != LOCK and not file.name.startswith("events.out.tfevents"):
            raise InputError(f"{path} holds something else than a run ({file.name}): choose another --checkpoint-dir")
    return sorted(found, key=lambda file: file.name == CONFIG)  # by it what a kill leaves of the others is recognized
