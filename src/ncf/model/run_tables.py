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
from ncf.data.negatives import NONE
from ncf.data.parquet import read_parquet, read_parquet_metadata, write_parquet
from ncf.errors import InputError
from ncf.files import atomic_file

SPLITS = ("train", "validation", "test", "dropped")
USERS, ITEMS, SEEN, NEGATIVES = "users.parquet", "items.parquet", "seen.parquet", "negatives.parquet"


def table_names() -> tuple[str, ...]:
    """The file names of a run's tables."""
    return USERS, ITEMS, SEEN, NEGATIVES


def write_dataset(directory: Path, dataset: Dataset, run: str) -> None:
    """Write the tables, each in one piece, marked with the run's fingerprint."""
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


def read_dataset(directory: Path, name: str, seed: int, summary: dict[str, Any], run: str) -> Dataset:
    """Read the tables back. Raises InputError where one is missing, damaged or of another run."""
    users, items, seen = (_read(directory / file, run) for file in (USERS, ITEMS, SEEN))
    n_users, n_items = len(users["user_id"]), len(items["item_id"])
    parts = [
        (torch.from_numpy(seen["user"][chosen]), torch.from_numpy(seen["item"][chosen]))
        for chosen in (seen["split"] == code for code in range(len(SPLITS)))
    ]
    negatives = None
    if (directory / NEGATIVES).exists():
        negatives = torch.from_numpy(_read(directory / NEGATIVES, run)["item"]).view(n_users, -1)
    if len(seen["user"]) and (seen["user"].max() >= n_users or seen["item"].max() >= n_items):
        raise InputError(f"{directory / SEEN} is damaged: an index is out of range; train the run again")
    return Dataset(
        name=name,
        user_ids=users["user_id"],
        item_ids=items["item_id"],
        train_users=parts[0][0],
        train_items=parts[0][1],
        validation_items=_spread(*parts[1], n_users),
        test_items=_spread(*parts[2], n_users),
        dropped_users=parts[3][0],
        dropped_items=parts[3][1],
        seed=seed,
        titles=items.get("title"),
        negatives=negatives,
        summary=summary,
    )


def is_run_table(path: Path) -> bool:
    """Whether a file is a table that `write_dataset` wrote, of any run."""
    try:
        return "run" in read_parquet_metadata(path)
    except InputError:
        return False


def _read(path: Path, run: str) -> dict[str, np.ndarray]:
    if not path.exists():
        raise InputError(f"{path} is missing: a run's directory must stay whole; train the run again")
    columns = read_parquet(path)
    if read_parquet_metadata(path).get("run") != run:
        raise InputError(f"{path} belongs to another run: do not mix the files of two runs")
    return columns


def _present(items: Tensor) -> tuple[Tensor, Tensor]:
    users = torch.nonzero(items != NONE).squeeze(1).int()
    return users, items[users.long()]


def _spread(users: Tensor, items: Tensor, n_users: int) -> Tensor:
    return torch.full((n_users,), NONE, dtype=torch.int32).index_put_((users.long(),), items)
