"""Any log of interactions becomes a dataset: read, check, drop, renumber, split, write.

ncf prepare ratings.csv -o data/mine
"""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import duckdb
import numpy as np
import torch

from ncf.config import PrepareConfig, PrepareOptions
from ncf.data.dataset import Dataset
from ncf.data.duckdb_session import connect
from ncf.data.interactions import Earlier, Interactions
from ncf.data.storage import check_dataset_output
from ncf.data.unseen import PAD
from ncf.errors import InputError, NcfWarning
from ncf.ingest.locate import Files, find_files, is_table, source_name
from ncf.ingest.presplit import PresplitFiles, find_presplit, read_presplit
from ncf.ingest.read import Log, read_log
from ncf.ingest.scan import Scan, open_scan
from ncf.ingest.split import Split, split_log
from ncf.ingest.times import time_span
from ncf.ingest.titles import find_titles


def prepare(
    source: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    config: PrepareConfig | None = None,
    overwrite: bool = False,
    progress: bool = False,
    **options: Unpack[PrepareOptions],
) -> Dataset:
    """Make a dataset of a log.

    `source` is a file (CSV or the like, JSON lines, Parquet, a MovieLens zip), a glob, a directory, the name of a data
    set (downloaded into `data/downloads`), or a pandas, polars or Arrow table; a path that exists wins over a name.
    `output` is the directory to write, if any; `options` are fields of PrepareConfig, over those of `config`. Memory
    grows with the rows, some 60 bytes each; what DuckDB needs beyond 2 GB it spills beside the output.

    Raises InputError where the source cannot be read, an option is unknown or out of range, or `output` holds something
    (a dataset is replaced with `overwrite`); RunError where writing fails midway. Warns of users who cannot be tested.
    """
    config = (config or PrepareConfig()).replaced(**options)
    path = None if output is None else Path(output)
    if path is not None:
        check_dataset_output(path, overwrite=overwrite)
    if config.item_names is not None and not Path(config.item_names).is_file():
        raise InputError(f"--item-names: no such file: {config.item_names!r}; name one with ids and titles")
    with _workspace(path) as folder, connect(folder / "spill") as con:
        dataset = _prepare(con, source, config, folder, progress=progress)
    facts = dataset.summary | {"written_to": None if path is None else str(path)}
    dataset = replace(dataset, name=path.resolve().name if path else source_name(source), summary=facts)
    if path is not None:
        dataset.save(path, overwrite=overwrite)
    if facts["users_without_test"]:
        few = f"{facts['users_without_test']} of {facts['users']} users have no test item"
        warnings.warn(f"{few}: they are trained on and not evaluated", NcfWarning, stacklevel=2)
    return dataset


def default_output(source: Any) -> Path:
    """Where the dataset of a source goes unless told otherwise: `data/<name>`."""
    return Path("data") / source_name(source)


@contextmanager
def _workspace(output: Path | None) -> Iterator[Path]:
    """A hidden folder for what does not fit in memory, on the output's disk; gone at the end."""
    beside = None if output is None else next(parent for parent in output.resolve().parents if parent.is_dir())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".ncf-prepare-", dir=beside, ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(f"cannot write beside {output}: {error.strerror}; choose another output") from error
    with folder as name:
        yield Path(name)


def _prepare(
    con: duckdb.DuckDBPyConnection, source: Any, config: PrepareConfig, folder: Path, *, progress: bool
) -> Dataset:
    if is_table(source):
        files, table = None, source
    else:
        files, table = find_files(source, config, folder, progress=progress), None
        presplit = find_presplit(files.logs[0]) if len(files.logs) == 1 else None
        if presplit is not None:
            return _from_presplit(con, presplit, config, progress)
    scan = open_scan(con, files, table, config)
    if config.min_value is not None and scan.roles.value is None:
        raise InputError(f"--min-value {config.min_value:g} needs a rating, and no column is one: name --value-column")
    log = read_log(con, scan, config, progress=progress)
    split = split_log(log, config)
    rules = {name: getattr(config, name) for name in ("min_ratings", "min_value", "validation", "ties")}
    facts = _facts_of_scan(source, scan, log) | {"rules": rules}
    ids = log.users.values[split.kept_users], log.items.values[split.kept_items]
    return _assemble(*ids, split, None, config, files, facts)


def _assemble(
    user_ids: np.ndarray,
    item_ids: np.ndarray,
    split: Split,
    negatives: np.ndarray | None,
    config: PrepareConfig,
    files: Files | None,
    facts: dict[str, Any],
) -> Dataset:
    titles, titles_file = _titles(item_ids, config, files)
    interactions = Interactions(
        n_users=len(user_ids),
        n_items=len(item_ids),
        train_users=torch.from_numpy(split.train[0]),
        train_items=torch.from_numpy(split.train[1]),
        validation_items=torch.from_numpy(split.validation),
        test_items=torch.from_numpy(split.test),
        dropped_users=torch.from_numpy(split.dropped[0]),
        dropped_items=torch.from_numpy(split.dropped[1]),
        negatives=None if negatives is None else torch.from_numpy(negatives),
        earlier=None if split.earlier is None else Earlier(*map(torch.from_numpy, split.earlier)),
        ordered=split.ordered,
    )
    dataset = Dataset("", user_ids, item_ids, interactions, seed=config.seed, titles=titles)
    return replace(dataset, summary={**facts, **split.counts, "titles": titles_file, **_counts(dataset)})


def _from_presplit(
    con: duckdb.DuckDBPyConnection, files: PresplitFiles, config: PrepareConfig, progress: bool
) -> Dataset:
    if config.min_value is not None or config.min_ratings > PrepareConfig().min_ratings:
        message = "this log is split already and is kept as it is: --min-ratings and --min-value have no effect"
        warnings.warn(message, NcfWarning, stacklevel=4)
    found = read_presplit(con, files, config, progress=progress)
    parts = [str(path) for path in (files.train, files.test, files.negatives) if path]
    facts = {
        "source": parts[0],
        "files": parts,
        "format": "a ready-made split, kept as it is",
        "columns": {"user": "column 1", "item": "column 2"},
        "delimiter": None,
        "header": None,
        "rows_read": found.rows_read,
        "bad_rows": found.bad_rows,
        "negatives": 0 if found.negatives is None else found.negatives.shape[1],
        "rules": {"min_ratings": 1, "min_value": None, "validation": False, "ties": config.ties, "given_split": True},
    }
    return _assemble(found.user_ids, found.item_ids, found.split, found.negatives, config, None, facts)


def _titles(item_ids: np.ndarray, config: PrepareConfig, files: Files | None) -> tuple[np.ndarray | None, str | None]:
    """Items' titles, and the file they are from."""
    path = Path(config.item_names) if config.item_names else files.titles if files else None
    if path is None:
        return None, None
    titles = find_titles(path, item_ids, asked=config.item_names is not None)
    label = files.titles_label if files and path == files.titles else None
    return titles, None if titles is None else label or str(path)


def _facts_of_scan(source: Any, scan: Scan, log: Log) -> dict[str, Any]:
    facts = {
        "source": "a table in memory" if is_table(source) else str(source),
        "files": [scan.files.label(path) for path in scan.files.logs],
        "format": scan.form,
        "columns": {role: scan.name(role) for role in ("user", "item", "value", "time")},
        "delimiter": scan.dialect.delimiter if scan.dialect else None,
        "header": scan.names is not None if scan.dialect else None,
        "rows_read": len(log.users.codes) + log.bad_rows,
        "bad_rows": log.bad_rows,
    }
    return facts if log.times is None else facts | time_span(log.times, scan.kinds["time"])


def _counts(dataset: Dataset) -> dict[str, Any]:
    """The sizes of a dataset."""
    held = {split: int((dataset.interactions.heldout(split) != PAD).sum()) for split in ("validation", "test")}
    interactions = dataset.n_train + sum(held.values())
    return {
        "users": dataset.n_users,
        "items": dataset.n_items,
        "interactions": interactions,
        "density": interactions / (dataset.n_users * dataset.n_items),
        "train": dataset.n_train,
        **held,
        **{f"users_without_{split}": dataset.n_users - number for split, number in held.items()},
        "dropped_pairs": len(dataset.interactions.dropped_users),
        "titled_items": 0 if dataset.titles is None else sum(map(bool, dataset.titles)),
    }
