"""A prepared dataset: interactions, raw ids and titles.

dataset = Dataset.load("data/ml-1m")
"""

import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor

from ncf.data.ids import IdMap
from ncf.data.interactions import Interactions
from ncf.data.storage import damaged, read_interactions, read_manifest, read_tables, write_dataset


@dataclass(frozen=True, eq=False)
class Dataset:
    """A log of U users and I items, split. Users and items are dense indices, in order of their raw ids."""

    name: str
    user_ids: np.ndarray  # [U] raw ids: int64, or str objects
    item_ids: np.ndarray  # [I]
    interactions: Interactions
    seed: int = 0  # of the evaluation negatives
    titles: np.ndarray | None = None  # [I] str objects, "" where unknown
    summary: dict[str, Any] = field(default_factory=dict)  # counts and rules of the preparation
    directory: Path | None = None  # where it lies on disk, if it was loaded

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
        """Training interactions."""
        return self.interactions.n_train

    @cached_property
    def users(self) -> IdMap:
        """Raw user ids to indices and back."""
        return IdMap(self.user_ids, "users")

    @cached_property
    def items(self) -> IdMap:
        """Raw item ids to indices and back."""
        return IdMap(self.item_ids, "items")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over everything that training and evaluation can see, however it is stored.

        Name and summary are left out. A new field must enter only if it is not neutral: earlier fingerprints stay.
        """
        mine = self.interactions
        content = {
            "user_ids": self.user_ids,
            "item_ids": self.item_ids,
            "train_users": mine.train_users,
            "train_items": mine.train_items,
            "validation_items": mine.validation_items,
            "test_items": mine.test_items,
            "dropped_users": mine.dropped_users,
            "dropped_items": mine.dropped_items,
            "seed": self.seed,
            "titles": self.titles,
            "negatives": mine.negatives,
        }
        if mine.earlier is not None:
            content |= {f"earlier {name}": counts for name, counts in mine.earlier._asdict().items()}
        content |= {} if mine.ordered else {"ordered": False}
        digest = hashlib.sha256(b"ncf dataset 1")
        for name, value in content.items():
            digest.update(f"\n{name} ".encode())
            _digest_value(digest, value)
        return digest.hexdigest()

    def save(self, directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the dataset's directory, whole or not at all.

        Raises InputError where something is there (but for a dataset, with `overwrite`), RunError where writing fails.
        """
        about = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "users": self.n_users,
            "items": self.n_items,
            "summary": self.summary,
        }
        ids = {"users": self.user_ids, "items": self.item_ids}
        write_dataset(Path(directory), about, ids, self.titles, self.interactions, overwrite=overwrite)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a dataset's directory. Raises InputError where it is missing, of another version, damaged or changed."""
        path = Path(directory)
        manifest = read_manifest(path)
        tables = read_tables(path, manifest)
        with damaged(path):
            dataset = cls(
                name=manifest["name"],
                user_ids=tables["users"]["id"],
                item_ids=tables["items"]["id"],
                interactions=read_interactions(tables, manifest),
                seed=manifest["seed"],
                titles=tables["items"].get("title"),
                summary=manifest["summary"],
                directory=path,
            )
            if dataset.fingerprint != manifest["fingerprint"]:
                raise ValueError("it was changed after it was prepared (its fingerprint differs)")
        return dataset


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
