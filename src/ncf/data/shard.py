"""A process's shard of a dataset: a contiguous range of its users, cut so that all shards have as many interactions.

Everything that those users did is in it, and they are numbered from 0; items keep their numbers. Raw ids and titles
stay in the files, as nothing that computes needs them.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ncf.data.dataset import Dataset
from ncf.data.duckdb_session import connect
from ncf.data.interactions import Interactions
from ncf.data.parquet import count_rows, read_parquet
from ncf.data.storage import copy_dataset, damaged, read_interactions, read_manifest, read_tables
from ncf.errors import InputError
from ncf.parallel.group import SINGLE, ProcessGroup


@dataclass(frozen=True, eq=False)
class Shard:
    """Some users' interactions, and what the dataset that they are part of says of itself."""

    name: str
    fingerprint: str  # as it was written: a shard alone cannot check it
    seed: int
    n_users: int  # of the dataset
    n_items: int
    n_train: int  # training interactions of the dataset
    interactions: Interactions
    directory: Path


AnyDataset = Dataset | Shard


def load_dataset(directory: str | os.PathLike[str], group: ProcessGroup = SINGLE) -> AnyDataset:
    """`Dataset.load`, which reads and checks everything; of several processes each reads its own shard.

    Raises InputError where the dataset is missing, of another version, incomplete or changed. Several processes check
    that every table carries the dataset's fingerprint and that indices are in range, but not the content's fingerprint.
    """
    if group.world == 1:
        return Dataset.load(directory)
    path = Path(directory)
    manifest = read_manifest(path)
    borders = group.broadcast(lambda: _check_and_cut(path, manifest, group.world))
    users = borders[group.rank], borders[group.rank + 1]
    tables = read_tables(path, manifest, users)
    name, mark, seed, n_users, n_items = (manifest[key] for key in ("name", "fingerprint", "seed", "users", "items"))
    with damaged(path):
        interactions = read_interactions(tables, manifest, users)
    n_train = group.all_sum(interactions.n_train)[0]
    return Shard(name, mark, seed, n_users, n_items, n_train, interactions, path)


def save_dataset(dataset: AnyDataset, path: Path) -> None:
    """Make `path` the dataset's directory; files on disk are linked or copied. Raises RunError where it cannot."""
    if isinstance(dataset, Dataset) and (dataset.directory is None or not _is_at(dataset.directory, dataset)):
        dataset.save(path)
    elif dataset.directory is not None:
        copy_dataset(dataset.directory, path)


def shard_borders(users: np.ndarray, n_users: int, shards: int) -> list[int]:
    """The borders of ranges of users with about equal numbers of training interactions: 0, ..., U.

    `users` [N] are those of the training rows, ascending. The k-th border is the user of row N k / shards, so a range
    exceeds N / shards by less than one user's interactions. A range may be empty.
    """
    rows = [len(users) * k // shards for k in range(1, shards)]
    return [0, *users[rows].tolist(), n_users]


def _is_at(directory: Path, dataset: Dataset) -> bool:
    """Whether the directory still holds this very dataset."""
    with suppress(InputError):
        manifest = read_manifest(directory)
        return bool(manifest["fingerprint"] == dataset.fingerprint and manifest["name"] == dataset.name)
    return False


def _check_and_cut(path: Path, manifest: dict[str, Any], shards: int) -> list[int]:
    """The borders of the shards. Raises InputError where a table of raw ids, which no process reads, is short."""
    with connect() as con:
        for table in ("users", "items"):
            file = path / f"{table}.parquet"
            if (rows := count_rows(con, file)) != manifest[table]:
                raise InputError(f"{file} is damaged: it has {rows} rows, not {manifest[table]}; prepare it again")
        return shard_borders(read_parquet(con, path / "train.parquet")["user"], manifest["users"], shards)
