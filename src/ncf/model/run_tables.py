"""The dataset inside a run's directory: Parquet tables that let a run stand alone.

users.parquet      user_id               row = dense index
items.parquet      item_id, title        row = dense index
seen.parquet       user, item, split     every pair: train (in order of time), validation, test, dropped
negatives.parquet  user, item            only where evaluation negatives came with the log
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncf.data.dataset import Dataset
from ncf.data.engine import connect, file_list
from ncf.data.negatives import NONE
from ncf.data.parquet import copy_parquet, count_rows, read_parquet, read_parquet_metadata, write_parquet
from ncf.data.part import DatasetPart, cut_file, renumbered
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError
from ncf.files import atomic_file

SPLITS = ("train", "validation", "test", "dropped")
USERS, ITEMS, SEEN, NEGATIVES = "users.parquet", "items.parquet", "seen.parquet", "negatives.parquet"


def table_names() -> tuple[str, ...]:
    """The file names of a run's tables."""
    return USERS, ITEMS, SEEN, NEGATIVES


def write_dataset(directory: Path, dataset: Dataset, run: str) -> None:
    """Write the tables of all users, each in one piece, marked with the run's fingerprint."""
    if isinstance(dataset, DatasetPart):
        _copy_dataset(dataset.directory, directory, dataset.negatives is not None, run)
        return
    pairs = [
        (dataset.train_users, dataset.train_items),
        _present(dataset.validation_items),
        _present(dataset.test_items),
        (dataset.dropped_users, dataset.dropped_items),
    ]
    split = [np.full(len(users), code, dtype=np.int8) for code, (users, _) in enumerate(pairs)]
    items: dict[str, np.ndarray] = {"item_id": dataset.item_ids}
    if dataset.titles is not None:
        items["title"] = dataset.titles
    tables: dict[str, dict[str, np.ndarray]] = {
        USERS: {"user_id": dataset.user_ids},
        ITEMS: items,
        SEEN: {
            "user": torch.cat([users for users, _ in pairs]).int().numpy(),
            "item": torch.cat([items for _, items in pairs]).int().numpy(),
            "split": np.concatenate(split),
        },
    }
    if dataset.negatives is not None:
        n_users, n = dataset.negatives.shape
        tables[NEGATIVES] = {
            "user": np.repeat(np.arange(n_users, dtype=np.int32), n),
            "item": dataset.negatives.int().flatten().numpy(),
        }
    for name, columns in tables.items():
        with atomic_file(directory / name) as temporary:
            write_parquet(temporary, columns, {"run": run})


def _copy_dataset(source: Path, directory: Path, negatives: bool, run: str) -> None:
    """The tables from a dataset's directory, row by row: no rank holds them all."""

    def rows(table: str) -> str:
        return f"read_parquet({file_list((source / f'{table}.parquet',))})"

    split = "CASE split WHEN 'validation' THEN 1 ELSE 2 END::TINYINT"
    with connect() as con:
        titled = "title" in [row[0] for row in con.execute(f"DESCRIBE SELECT * FROM {rows('items')}").fetchall()]
        queries = {
            USERS: f"SELECT id AS user_id FROM {rows('users')}",
            ITEMS: f"SELECT id AS item_id{', title' * titled} FROM {rows('items')}",
            SEEN: f'SELECT "user", item, 0::TINYINT AS split FROM {rows("train")} '
            f'UNION ALL SELECT "user", item, {split} FROM {rows("heldout")} '
            f'UNION ALL SELECT "user", item, 3::TINYINT FROM {rows("seen")}',
        }
        if negatives:
            queries[NEGATIVES] = f'SELECT "user", item FROM {rows("negatives")}'
        for name, query in queries.items():
            with atomic_file(directory / name) as temporary:
                copy_parquet(query, temporary, {"run": run}, connection=con)


def read_dataset(directory: Path, about: dict[str, Any], run: str, ranks: Ranks = ALONE) -> Dataset:
    """Read the tables back; of several ranks each reads its own users.

    `about` is what `config.json` says of the dataset. Raises InputError where a table is missing, damaged or of
    another run.
    """
    if ranks.world > 1:
        return _read_part(directory, about, run, ranks)
    users, items, seen = (_read(directory / file, run) for file in (USERS, ITEMS, SEEN))
    n_users = len(users["user_id"])
    negatives = _read(directory / NEGATIVES, run) if (directory / NEGATIVES).exists() else None
    width = len(negatives["item"]) // max(1, n_users) if negatives else 0
    return Dataset(
        name=about["name"],
        user_ids=users["user_id"],
        item_ids=items["item_id"],
        seed=about["seed"],
        titles=items.get("title"),
        summary=about["summary"],
        **_pairs(directory, seen, negatives, width, (n_users, len(items["item_id"]))),
    )


def _read_part(directory: Path, about: dict[str, Any], run: str, ranks: Ranks) -> DatasetPart:
    sizes = about["users"], about["items"], about["interactions"]
    first, end = cut_file(ranks, directory / SEEN, sizes[0], sizes[2])
    width = ranks.from_first(lambda: _width(directory / NEGATIVES, sizes[0]))
    names = (SEEN,) if width is None else (SEEN, NEGATIVES)
    read = {name: _read(directory / name, run, (first, end)) for name in names}
    tables = renumbered(read, first)
    return DatasetPart(
        name=about["name"],
        user_ids=np.empty(0, dtype=np.int64),
        item_ids=np.empty(0, dtype=np.int64),
        seed=about["seed"],
        summary=about["summary"],
        directory=directory,
        first=first,
        end=end,
        sizes=sizes,
        mark=about["fingerprint"],
        **_pairs(directory, tables[SEEN], tables.get(NEGATIVES), width or 0, (end - first, sizes[1])),
    )


def _width(file: Path, n_users: int) -> int | None:
    """How many negatives came with the log for each user, also for a rank without users; None where none came."""
    return count_rows(file) // max(1, n_users) if file.exists() else None


def _pairs(
    directory: Path,
    seen: dict[str, np.ndarray],
    negatives: dict[str, np.ndarray] | None,
    width: int,
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """The fields of a Dataset that hold users and items, of `sizes` U and I, with `width` negatives a user."""
    n_users, n_items = sizes
    if len(seen["user"]) and (seen["user"].max() >= n_users or seen["item"].max() >= n_items):
        raise InputError(f"{directory / SEEN} is damaged: an index is out of range; train the run again")
    parts = [
        (torch.from_numpy(seen["user"][chosen]), torch.from_numpy(seen["item"][chosen]))
        for chosen in (seen["split"] == code for code in range(len(SPLITS)))
    ]
    return {
        "train_users": parts[0][0],
        "train_items": parts[0][1],
        "validation_items": _spread(*parts[1], n_users),
        "test_items": _spread(*parts[2], n_users),
        "dropped_users": parts[3][0],
        "dropped_items": parts[3][1],
        "negatives": None if negatives is None else torch.from_numpy(negatives["item"]).view(n_users, width),
    }


def is_run_table(path: Path) -> bool:
    """Whether a file is a table that `write_dataset` wrote, of any run."""
    try:
        return "run" in read_parquet_metadata(path)
    except InputError:
        return False


def _read(path: Path, run: str, users: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    if not path.exists():
        raise InputError(f"{path} is missing: a run's directory must stay whole; train the run again")
    columns = read_parquet(path, users=users)
    if read_parquet_metadata(path).get("run") != run:
        raise InputError(f"{path} belongs to another run: do not mix the files of two runs")
    return columns


def _present(items: Tensor) -> tuple[Tensor, Tensor]:
    users = torch.nonzero(items != NONE).squeeze(1).int()
    return users, items[users.long()]


def _spread(users: Tensor, items: Tensor, n_users: int) -> Tensor:
    return torch.full((n_users,), NONE, dtype=torch.int32).index_put_((users.long(),), items)
