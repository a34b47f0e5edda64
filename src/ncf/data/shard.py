"""A process's shard of a dataset: a contiguous range of its users, cut so that all shards have as many interactions.

Everything that those users did is in it, and they are numbered from 0; items keep their numbers. Raw ids and titles
stay in the files, as nothing that computes needs them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncf.data.dataset import Dataset
from ncf.data.interactions import Interactions
from ncf.data.parquet import count_rows, read_user_at
from ncf.data.storage import copy_dataset, damaged, read_interactions, read_manifest, read_tables
from ncf.errors import InputError
from ncf.parallel.group import SINGLE, ProcessGroup


@dataclass(frozen=True, eq=False)
class Shard:
    """Some users' interactions, and what the dataset that they are part of says of itself."""

    directory: Path
    manifest: dict[str, Any]
    interactions: Interactions
    n_train: int  # training interactions of the dataset

    @property
    def name(self) -> str:
        """The dataset's name."""
        return str(self.manifest["name"])

    @property
    def seed(self) -> int:
        """The seed of the evaluation negatives."""
        return int(self.manifest["seed"])

    @property
    def fingerprint(self) -> str:
        """The dataset's fingerprint, as it was written; a shard alone cannot check it."""
        return str(self.manifest["fingerprint"])

    @property
    def n_users(self) -> int:
        """Users of the dataset."""
        return int(self.manifest["users"])

    @property
    def n_items(self) -> int:
        """Items of the dataset."""
        return self.interactions.n_items


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
    file = path / "train.parquet"
    n_train = group.broadcast(lambda: _check_rows(path, manifest))
    borders = group.broadcast(
        lambda: shard_borders(manifest["users"], n_train, group.world, lambda rows: read_user_at(file, rows))
    )
    users = borders[group.rank], borders[group.rank + 1]
    tables = read_tables(path, manifest, users)
    with damaged(path):
        return Shard(path, manifest, read_interactions(tables, manifest, users), n_train)


def save_dataset(dataset: AnyDataset, path: Path) -> None:
    """Make `path` the dataset's directory; files that are on disk already are linked or copied.

    Raises RunError where it cannot be written.
    """
    if isinstance(dataset, Dataset) and (dataset.directory is None or not _is_at(dataset.directory, dataset)):
        dataset.save(path)
    elif dataset.directory is not None:
        copy_dataset(dataset.directory, path)


def shard_borders(n_users: int, n_train: int, shards: int, users_at: Callable[[list[int]], list[int]]) -> list[int]:
    """The borders of ranges of users with about equal numbers of training interactions: 0, ..., U.

    `users_at` gives the users of some of the N rows, which are in order of user. The k-th border is the user of row
    N k / shards, so a range exceeds N / shards by less than one user's interactions. A range may be empty.
    """
    rows = [n_train * k // shards for k in range(1, shards)]
    return [0, *users_at(rows), n_users]


def _is_at(directory: Path, dataset: Dataset) -> bool:
    """Whether the directory still holds this very dataset."""
    try:
        manifest = read_manifest(directory)
    except InputError:
        return False
    return bool(manifest["fingerprint"] == dataset.fingerprint and manifest["name"] == dataset.name)


def _check_rows(path: Path, manifest: dict[str, Any]) -> int:
    """The number of training rows. Raises InputError where a table of raw ids, which no process reads, is short."""
    for table in ("users", "items"):
        file = path / f"{table}.parquet"
        if (rows := count_rows(file)) != manifest[table]:
            raise InputError(f"{file} is damaged: it has {rows} rows, not {manifest[table]}; prepare it again")
    return count_rows(path / "train.parquet")
