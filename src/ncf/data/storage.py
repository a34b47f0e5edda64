"""A dataset's directory: one JSON file and some Parquet tables. A run's `dataset/` is such a directory too.

    dataset.json        name, sizes, fingerprint, what the preparation did
    users.parquet       id                   the row's number is the index
    items.parquet       id, title
    train.parquet       user, item           by user, within a user in order of time
    heldout.parquet     user, item, split    `validation` or `test`
                        earlier              in both, only where a user has rows of equal time: see `Interactions`
    seen.parquet        user, item           what --min-value dropped
    negatives.parquet   user, item           only where evaluation negatives came with the log

Every table carries the dataset's fingerprint, so that tables of two datasets do not mix.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ncf.data.duckdb_session import connect, explain
from ncf.data.interactions import SPLITS, Earlier, Interactions
from ncf.data.parquet import read_parquet, read_parquet_metadata, write_parquet
from ncf.data.unseen import PAD
from ncf.errors import InputError
from ncf.files import check_output, copy_files, is_marked, replace_directory

FORMAT_VERSION = 1
KIND = "ncf dataset"  # what dataset.json says it belongs to
MANIFEST = "dataset.json"
TABLES = ("users", "items", "train", "heldout", "seen", "negatives")
FILES = frozenset({MANIFEST, *(f"{table}.parquet" for table in TABLES)})

Tables = dict[str, dict[str, np.ndarray]]  # table -> column -> values


def check_dataset_output(path: Path, *, overwrite: bool) -> None:
    """Raise InputError where a dataset may not be written to `path`."""
    check_output(path, overwrite=overwrite, marker=MANIFEST, kind=KIND, known=FILES)


def write_dataset(
    path: Path,
    about: Mapping[str, Any],
    ids: Mapping[str, np.ndarray],
    titles: np.ndarray | None,
    interactions: Interactions,
    *,
    overwrite: bool,
) -> None:
    """Write a directory, whole or not at all; `about` goes into the manifest. Raises as `Dataset.save` does."""
    check_dataset_output(path, overwrite=overwrite)
    negatives = interactions.negatives
    manifest = {"kind": KIND, "format_version": FORMAT_VERSION, **about}
    manifest["negatives"] = None if negatives is None else negatives.shape[1]
    manifest |= {} if interactions.ordered else {"ordered": False}
    tables = {"users": {"id": ids["users"]}, "items": {"id": ids["items"]}, **_tables_of(interactions)}
    if titles is not None:
        tables["items"]["title"] = titles
    with replace_directory(path) as folder, connect() as connection:
        for table, columns in tables.items():
            mark = {"fingerprint": about["fingerprint"]}
            write_parquet(connection, folder / f"{table}.parquet", columns, mark)
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def copy_dataset(source: Path, path: Path) -> None:
    """Make `path` a dataset's directory with the files of `source`, whole or not at all. Raises RunError."""
    with replace_directory(path) as folder:
        copy_files(source, folder, FILES)


def read_manifest(path: Path) -> dict[str, Any]:
    """`dataset.json` of the dataset at `path`. Raises InputError where there is none, or none that this ncf reads."""
    file = path / MANIFEST
    if path.is_file():
        output = Path("data") / path.name.split(".")[0]
        raise InputError(f"{path} is a file, not a dataset: make one of it with `ncf prepare {path} -o {output}`")
    if not file.is_file():
        what = f"is not a dataset (it has no {MANIFEST})" if path.is_dir() else "is not a directory that exists"
        raise InputError(f"{path} {what}: make a dataset with `ncf prepare LOG -o DIR`")
    if not is_marked(file, KIND):
        raise InputError(f"{file} is damaged, or not of an ncf dataset; prepare it again")
    manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
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


def read_tables(path: Path, manifest: Mapping[str, Any], users: tuple[int, int] | None = None) -> Tables:
    """The tables, or those of interactions for a range of `users`. Raises InputError for one missing or damaged."""
    names = [name for name in TABLES if name != "negatives" or manifest.get("negatives") is not None]
    wanted = names if users is None else names[2:]
    tables = {}
    with connect() as con:
        for name in names:
            file = path / f"{name}.parquet"
            if read_parquet_metadata(con, file).get("fingerprint") != manifest["fingerprint"]:
                raise InputError(f"{file} belongs to another dataset (its fingerprint differs); prepare it again")
            if name in wanted:
                tables[name] = read_parquet(con, file, users)
    return tables


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turn what arrays that do not fit together raise into InputError."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InputError(f"{path} is damaged: {explain(error)}; prepare it again") from error


def read_interactions(
    tables: Tables, manifest: Mapping[str, Any], users: tuple[int, int] | None = None
) -> Interactions:
    """The interactions of the dataset's users, or of the range (first, end) of `users`, which `tables` then hold.

    Raises ValueError or the like where the tables do not fit together.
    """
    offset, end = users or (0, manifest["users"])
    for table in (tables[name] for name in tables if name not in ("users", "items")):
        table["user"] = table["user"] - np.int32(offset)
    n_users, width = end - offset, manifest.get("negatives")
    heldout = tables["heldout"]
    held_rows = [heldout["split"] == split for split in SPLITS]
    held = [_spread(heldout, "item", rows, n_users) for rows in held_rows]
    result = Interactions(
        n_users,
        manifest["items"],
        torch.from_numpy(tables["train"]["user"]),
        torch.from_numpy(tables["train"]["item"]),
        held[0],
        held[1],
        torch.from_numpy(tables["seen"]["user"]),
        torch.from_numpy(tables["seen"]["item"]),
        None if width is None else torch.from_numpy(tables["negatives"]["item"]).view(n_users, width),
        offset,
        _earlier(tables, held_rows, n_users) if "earlier" in tables["train"] else None,
        bool(manifest.get("ordered", True)),
    )
    sizes = [len(tables[name]["id"]) for name in ("users", "items") if name in tables]
    if sizes and sizes != [n_users, manifest["items"]]:
        raise ValueError("its tables of ids differ in length from its manifest")
    if fault := result.find_fault():
        raise ValueError(fault)
    return result


def _spread(table: dict[str, np.ndarray], column: str, rows: np.ndarray, n_users: int) -> Tensor:
    """A column of each user in the chosen rows, [U]; PAD where there is none."""
    users, values = torch.from_numpy(table["user"][rows]).long(), torch.from_numpy(table[column][rows])
    return torch.full((n_users,), PAD, dtype=torch.int32).index_put_((users,), values)


def _earlier(tables: Tables, held_rows: list[np.ndarray], n_users: int) -> Earlier:
    held = (_spread(tables["heldout"], "earlier", rows, n_users) for rows in held_rows)
    return Earlier(torch.from_numpy(tables["train"]["earlier"]), *held)


def _tables_of(interactions: Interactions) -> Tables:
    """What each Parquet file of interactions holds."""
    held = [(split, torch.nonzero(interactions.heldout(split) != PAD).flatten()) for split in SPLITS]
    tables = {
        "train": {"user": interactions.train_users.numpy(), "item": interactions.train_items.numpy()},
        "heldout": {
            "user": torch.cat([users for _, users in held]).int().numpy(),
            "item": torch.cat([interactions.heldout(split)[users] for split, users in held]).numpy(),
            "split": np.array([split for split, users in held for _ in range(len(users))], dtype=object),
        },
        "seen": {"user": interactions.dropped_users.numpy(), "item": interactions.dropped_items.numpy()},
    }
    if interactions.earlier is not None:
        tables["train"]["earlier"] = interactions.earlier.train.numpy()
        of_held = [interactions.earlier.of(split)[users] for split, users in held]
        tables["heldout"]["earlier"] = torch.cat(of_held).numpy()
    if interactions.negatives is not None:
        n_users, width = interactions.negatives.shape
        users = np.repeat(np.arange(n_users, dtype=np.int32), width)
        tables["negatives"] = {"user": users, "item": interactions.negatives.flatten().numpy()}
    return tables
