"""The prepared dataset: training pairs, held-out items, id maps; and its directory on disk.

dataset = Dataset.load("data/ml-1m")
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ncf.data.directory import check_output, replace_directory
from ncf.data.engine import connect, explain
from ncf.data.negatives import NONE
from ncf.data.parquet import write_parquet
from ncf.data.tables import (
    FILES,
    FORMAT_VERSION,
    KIND,
    MANIFEST,
    SPLITS,
    TABLES,
    arrays_of,
    has_table,
    read_manifest,
    read_table,
)
from ncf.errors import InputError


@dataclass(frozen=True, eq=False)
class Dataset:
    """A log of U users and I items, split. Users and items are dense indices, in order of their raw ids.

    Held-out items and padding of negatives are `NONE` (-1) where there is none.
    """

    name: str
    user_ids: np.ndarray  # [U] raw ids: int64, or str objects
    item_ids: np.ndarray  # [I]
    train_users: Tensor  # [N] int32, ascending
    train_items: Tensor  # [N] int32, within a user in order of time
    validation_items: Tensor  # [U] int32
    test_items: Tensor  # [U] int32
    dropped_users: Tensor  # [M] int32: pairs that --min-value dropped; seen, not trained on
    dropped_items: Tensor  # [M] int32
    seed: int = 0  # of the evaluation negatives
    titles: np.ndarray | None = None  # [I] str objects, "" where unknown
    negatives: Tensor | None = None  # [U, n] int32: the evaluation negatives that came with the log (He's files)
    summary: dict[str, Any] = field(default_factory=dict)  # counts and rules of the preparation

    @property
    def n_users(self) -> int:
        """U."""
        return len(self.user_ids)

    @property
    def n_items(self) -> int:
        """I."""
        return len(self.item_ids)

    @property
    def n_train(self) -> int:
        """N."""
        return len(self.train_users)

    @property
    def first_user(self) -> int:
        """The number in the whole dataset of the user who is 0 here; see `part.py`."""
        return 0

    @property
    def whole_users(self) -> int:
        """Users of the whole dataset, of which this may be a part."""
        return self.n_users

    @property
    def whole_train(self) -> int:
        """Training interactions of the whole dataset."""
        return self.n_train

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over everything that training and evaluation can see, however it is stored.

        The name and the summary are not part of it.
        """
        digest = hashlib.sha256(f"{KIND} {FORMAT_VERSION}".encode())
        for item in fields(self):
            if item.name not in ("name", "summary"):
                digest.update(f"\n{item.name} ".encode())
                _digest_value(digest, getattr(self, item.name))
        return digest.hexdigest()

    def heldout(self, split: str) -> Tensor:
        """The held-out item of each user in `validation` or `test`, [U] int32. Raises InputError for another split."""
        if split not in SPLITS:
            raise InputError(f"--split must be validation or test: got {split!r}")
        return self.validation_items if split == "validation" else self.test_items

    def touched(self) -> tuple[Tensor, Tensor]:
        """Every distinct pair of a user and an item they touched, in any split or dropped: users and items, int32.

        Ascending by user, then item.
        """
        users, items = self.everything()
        users, items = torch.cat((users, self.dropped_users)), torch.cat((items, self.dropped_items))
        keys = torch.unique(users.long() * self.n_items + items)
        return (keys // self.n_items).int(), (keys % self.n_items).int()

    def everything(self) -> tuple[Tensor, Tensor]:
        """All interactions, held-out ones too, by user and within a user in order of time: users and items, int32."""
        users, items = [self.train_users], [self.train_items]
        for split in SPLITS:
            held = self.heldout(split)
            has = torch.nonzero(held != NONE).flatten()
            users.append(has.int())
            items.append(held[has])
        order = torch.sort(torch.cat(users), stable=True)
        return order.values, torch.cat(items)[order.indices]

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the dataset's directory, whole or not at all.

        Raises InputError where something is there already (but for a dataset, with `overwrite`) or nothing can be
        written, RunError where writing fails midway, such as on a full disk.
        """
        path = Path(directory)
        check_dataset_output(path, overwrite=overwrite)
        manifest = {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "name": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "users": self.n_users,
            "items": self.n_items,
            "negatives": None if self.negatives is None else self.negatives.shape[1],
            "summary": self.summary,
        }
        marks = {"fingerprint": self.fingerprint}
        with replace_directory(path) as folder, connect() as connection:
            for table, columns in self._tables().items():
                write_parquet(folder / f"{table}.parquet", columns, marks, connection=connection)
            text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
            (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a dataset's directory, and check that it is whole and as it was written.

        Raises InputError where it is missing, of another version, incomplete or changed.
        """
        path = Path(directory)
        manifest = read_manifest(path)
        with connect() as con:
            tables = {table: read_table(con, path, table, manifest) for table in TABLES if has_table(table, manifest)}
        try:
            dataset = cls(**arrays_of(tables, manifest), summary=manifest["summary"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InputError(f"{path} is damaged: {explain(error)}; prepare it again") from error
        if fault := out_of_range(dataset) or _unlike(dataset._tables(), tables):
            raise InputError(f"{path} is damaged: {fault}; prepare it again")
        if dataset.fingerprint != manifest["fingerprint"]:
            raise InputError(f"{path} was changed after it was prepared (its fingerprint differs); prepare it again")
        return dataset

    def _tables(self) -> dict[str, dict[str, np.ndarray]]:
        """What each Parquet file holds."""
        items = {"id": self.item_ids} | ({} if self.titles is None else {"title": self.titles})
        held = [(split, torch.nonzero(self.heldout(split) != NONE).flatten()) for split in SPLITS]
        tables = {
            "users": {"id": self.user_ids},
            "items": items,
            "train": {"user": self.train_users.numpy(), "item": self.train_items.numpy()},
            "heldout": {
                "user": torch.cat([users for _, users in held]).int().numpy(),
                "item": torch.cat([self.heldout(split)[users] for split, users in held]).numpy(),
                "split": np.array([split for split, users in held for _ in range(len(users))], dtype=object),
            },
            "seen": {"user": self.dropped_users.numpy(), "item": self.dropped_items.numpy()},
        }
        if self.negatives is not None:
            width = self.negatives.shape[1]
            users = np.repeat(np.arange(self.n_users, dtype=np.int32), width)
            tables["negatives"] = {"user": users, "item": self.negatives.flatten().numpy()}
        return tables


def check_dataset_output(path: Path, *, overwrite: bool) -> None:
    """Raise InputError where a dataset may not be written to `path`."""
    check_output(path, overwrite=overwrite, marker=MANIFEST, kind=KIND, known=FILES)


def _digest_value(digest: Any, value: Any) -> None:
    """Feed a field into the digest, such that different values give different bytes."""
    if isinstance(value, Tensor):
        value = value.cpu().contiguous().numpy()
    if not isinstance(value, np.ndarray):
        digest.update(repr(value).encode())
        return
    if value.dtype == object:
        texts = [str(text).encode("utf-8", "surrogatepass") for text in value]
        lengths = np.array([len(text) for text in texts], dtype="<i8")
        digest.update(b"text" + lengths.tobytes() + b"".join(texts))
        return
    little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    digest.update(f"{little.dtype.str} {little.shape} ".encode())
    digest.update(little.data)


def _unlike(written: dict[str, dict[str, np.ndarray]], read: dict[str, dict[str, np.ndarray]]) -> str | None:
    """Which file does not hold what this dataset would be written as; None where all do."""
    for table, columns in written.items():
        if set(columns) != set(read[table]) or not all(
            column.dtype == read[table][name].dtype and np.array_equal(column, read[table][name])
            for name, column in columns.items()
        ):
            return f"{table}.parquet is not as it was written"
    return None


def out_of_range(dataset: Dataset) -> str | None:
    """What is wrong with the arrays' lengths, types or values; None where nothing is."""
    users = {"train users": dataset.train_users, "dropped users": dataset.dropped_users}
    items = {
        "train items": dataset.train_items,
        "dropped items": dataset.dropped_items,
        "validation items": dataset.validation_items,
        "test items": dataset.test_items,
    }
    items |= {} if dataset.negatives is None else {"negatives": dataset.negatives}
    for size, low, named in ((dataset.n_users, 0, users), (dataset.n_items, NONE, items)):
        for name, array in named.items():
            floor = 0 if name in ("train items", "dropped items") else low
            if array.dtype != torch.int32 or (array.numel() and not floor <= array.min() <= array.max() < size):
                return f"{name} are out of range"
    if (dataset.train_users[1:] < dataset.train_users[:-1]).any():
        return "train users are out of order"
    if len(dataset.train_users) != len(dataset.train_items) or len(dataset.validation_items) != dataset.n_users:
        return "its files differ in length"
    return None
