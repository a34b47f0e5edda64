"""A rank's part of a dataset: a contiguous range of its users, cut so that all ranks have as many interactions.

Everything of a part's users is in it, and they are numbered from 0; items keep their numbers. Raw ids and titles stay
in the files, as nothing that computes needs them.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ncf.data.dataset import Dataset, out_of_range
from ncf.data.engine import connect, explain
from ncf.data.parquet import count_rows, read_user_at
from ncf.data.tables import arrays_of, check_mark, has_table, read_manifest, read_table
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError

TABLES = ("train", "heldout", "seen", "negatives")


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetPart(Dataset):
    """The users `first` to `end` of a dataset; what it says of itself, `first_user` and `whole_*` say of the whole."""

    directory: Path
    first: int
    end: int
    sizes: tuple[int, int, int]  # users, items and interactions of the whole
    mark: str  # the whole's fingerprint

    @property
    def n_users(self) -> int:
        """Users of this part."""
        return self.end - self.first

    @property
    def n_items(self) -> int:
        """I."""
        return self.sizes[1]

    @property
    def first_user(self) -> int:
        """The number in the whole of this part's first user."""
        return self.first

    @property
    def whole_users(self) -> int:
        """U."""
        return self.sizes[0]

    @property
    def whole_train(self) -> int:
        """N."""
        return self.sizes[2]

    @cached_property
    def fingerprint(self) -> str:
        """The whole's fingerprint, as it was written; a part cannot check it."""
        return self.mark


def cuts(n_users: int, n_train: int, ranks: int, users_at: Callable[[list[int]], list[int]]) -> list[int]:
    """The borders of `ranks` ranges of users with about equal numbers of training interactions: 0, ..., U.

    `users_at` gives the users of some of the N rows, which are in order of user. The k-th border is the user of row
    N k / ranks, so a range exceeds N / ranks by less than one user's interactions. A range may be empty.
    """
    rows = [n_train * k // ranks for k in range(1, ranks)]
    return [0, *users_at(rows), n_users]


def cut_file(ranks: Ranks, path: Path, n_users: int, n_train: int) -> tuple[int, int]:
    """The range of users of this rank, where the first `n_train` rows of a Parquet file are in order of user."""
    borders = ranks.from_first(lambda: cuts(n_users, n_train, ranks.world, lambda rows: read_user_at(path, rows)))
    return next(itertools.islice(itertools.pairwise(borders), ranks.rank, None))


def load_dataset(directory: str | os.PathLike[str], ranks: Ranks = ALONE) -> Dataset:
    """`Dataset.load`, which reads and checks everything; of several processes each reads its own users alone.

    Raises InputError where the dataset is missing, of another version, incomplete or changed. Several processes check
    that every file bears the dataset's mark and that numbers are in range, but not the fingerprint of the content.
    """
    if ranks.world == 1:
        return Dataset.load(directory)
    path = Path(directory)
    manifest = read_manifest(path)
    file = path / "train.parquet"
    ranks.from_first(lambda: _check_ids(path, manifest))
    n_train = ranks.from_first(lambda: count_rows(file))
    users = cut_file(ranks, file, manifest["users"], n_train)
    with connect() as con:
        tables = {name: read_table(con, path, name, manifest, users) for name in TABLES if has_table(name, manifest)}
    try:
        fields = arrays_of(renumbered(tables, users[0]), manifest | {"users": users[1] - users[0]})
        part = DatasetPart(
            **fields,
            summary=manifest["summary"],
            directory=path,
            first=users[0],
            end=users[1],
            sizes=(manifest["users"], manifest["items"], n_train),
            mark=manifest["fingerprint"],
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {explain(error)}; prepare it again") from error
    if fault := out_of_range(part):
        raise InputError(f"{path} is damaged: {fault}; prepare it again")
    return part


def _check_ids(path: Path, manifest: dict[str, Any]) -> None:
    """Raise InputError where the tables of raw ids, which no rank reads, are not this dataset's."""
    with connect() as con:
        for table in ("users", "items"):
            check_mark(con, path, table, manifest)
            file = path / f"{table}.parquet"
            if (rows := count_rows(file, connection=con)) != manifest[table]:
                raise InputError(f"{file} is damaged: it has {rows} rows, not {manifest[table]}; prepare it again")


def renumbered(tables: dict[str, dict[str, np.ndarray]], first: int) -> dict[str, dict[str, Any]]:
    """The tables with their users counted from `first`."""
    return {
        name: {key: column - np.int32(first) if key == "user" else column for key, column in columns.items()}
        for name, columns in tables.items()
    }
