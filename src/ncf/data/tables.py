"""The files of a dataset's directory, and how they become arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from duckdb import DuckDBPyConnection

from ncf.data.directory import is_marked
from ncf.data.negatives import NONE
from ncf.data.parquet import read_parquet, read_parquet_metadata
from ncf.errors import InputError

FORMAT_VERSION = 1
KIND = "ncf dataset"  # what dataset.json says it belongs to
MANIFEST = "dataset.json"
TABLES = ("users", "items", "train", "heldout", "seen", "negatives")
FILES = frozenset({MANIFEST, *(f"{table}.parquet" for table in TABLES)})
SPLITS = ("validation", "test")


def read_manifest(path: Path) -> dict[str, Any]:
    """`dataset.json` of the dataset at `path`. Raises InputError where there is none, or none that this ncf reads."""
    if path.is_file():
        output = Path("data") / path.name.split(".")[0]
        raise InputError(f"{path} is a file, not a dataset: make one of it with `ncf prepare {path} -o {output}`")
    if not path.is_dir():
        raise InputError(f"{path} is not a directory that exists: make a dataset with `ncf prepare LOG -o {path}`")
    if not (path / MANIFEST).is_file():
        raise InputError(f"{path} is not a dataset (it has no {MANIFEST}): make one with `ncf prepare LOG -o NEW`")
    if not is_marked(path / MANIFEST, KIND):
        raise InputError(f"{path / MANIFEST} is damaged, or not of an ncf dataset; prepare it again")
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {manifest.get('format_version')!r} and this ncf reads {FORMAT_VERSION}:"
            " prepare it again"
        )
    kinds = {"name": str, "fingerprint": str, "seed": int, "users": int, "items": int, "summary": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise InputError(f"{path / MANIFEST} is damaged: {key} is {manifest.get(key)!r}; prepare it again")
    return manifest


def has_table(table: str, manifest: dict[str, Any]) -> bool:
    """Whether the dataset has the file of that table."""
    return table != "negatives" or manifest.get("negatives") is not None


def read_table(
    connection: DuckDBPyConnection,
    path: Path,
    table: str,
    manifest: dict[str, Any],
    users: tuple[int, int] | None = None,
) -> dict[str, np.ndarray]:
    """The columns of a table, of all users or of a range. Raises InputError where it is not this dataset's."""
    columns = read_parquet(path / f"{table}.parquet", connection=connection, users=users)
    check_mark(connection, path, table, manifest)
    return columns


def check_mark(connection: DuckDBPyConnection, path: Path, table: str, manifest: dict[str, Any]) -> None:
    """Raise InputError where the file of a table is missing, or says that it is another dataset's."""
    file = path / f"{table}.parquet"
    if read_parquet_metadata(file, connection=connection).get("fingerprint") != manifest["fingerprint"]:
        raise InputError(f"{file} belongs to another dataset (its fingerprint differs); prepare {path} again")


def arrays_of(tables: dict[str, dict[str, np.ndarray]], manifest: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Dataset, from its files; without raw ids where those of ids are not among `tables`."""
    n_users, heldout = manifest["users"], tables["heldout"]
    ids = {"id": np.empty(0, dtype=np.int64)}
    users, items = tables.get("users", ids), tables.get("items", ids)
    held = {}
    for split in SPLITS:
        of_split = heldout["split"] == split
        held[split] = torch.full((n_users,), NONE, dtype=torch.int32)
        held[split][torch.from_numpy(heldout["user"][of_split]).long()] = torch.from_numpy(heldout["item"][of_split])
    width = manifest.get("negatives")
    return {
        "name": manifest["name"],
        "user_ids": users["id"],
        "item_ids": items["id"],
        "train_users": torch.from_numpy(tables["train"]["user"]),
        "train_items": torch.from_numpy(tables["train"]["item"]),
        "validation_items": held["validation"],
        "test_items": held["test"],
        "dropped_users": torch.from_numpy(tables["seen"]["user"]),
        "dropped_items": torch.from_numpy(tables["seen"]["item"]),
        "seed": manifest["seed"],
        "titles": items.get("title"),
        "negatives": None if width is None else torch.from_numpy(tables["negatives"]["item"]).view(n_users, width),
    }
