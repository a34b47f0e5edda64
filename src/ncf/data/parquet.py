"""Arrays to a Parquet file and back, with a few words of metadata."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np

from ncf.data.duckdb_session import explain, file_list, identifier, literal, reading
from ncf.errors import InputError, RunError
from ncf.files import sync

Connection = duckdb.DuckDBPyConnection
FIX = "prepare the dataset again, or train the run again"


def write_parquet(con: Connection, path: Path, columns: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of one length, numbers or `str` objects, and sync the file. Raises RunError where it cannot."""
    selected = ", ".join(
        f"{identifier(name)}::VARCHAR AS {identifier(name)}" if column.dtype == object else identifier(name)
        for name, column in columns.items()
    )
    pairs = ", ".join(f"{identifier(key)}: {literal(value)}" for key, value in metadata.items())
    options = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1" + (f", KV_METADATA {{{pairs}}}" if pairs else "")
    try:
        con.register("columns_to_write", dict(columns))
        con.execute(f"COPY (SELECT {selected} FROM columns_to_write) TO {literal(path)} ({options})")
        con.unregister("columns_to_write")
        sync(path)
    except (duckdb.Error, OSError) as error:
        raise RunError(f"cannot write {path}: {explain(error)}") from error


def read_parquet(con: Connection, path: Path, users: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """Every column of a Parquet file, in the order of its rows: numbers, or `str` objects.

    With `users` (first, end), only rows of those. Raises InputError where the file is missing, damaged or has blanks.
    """
    where = "" if users is None else f' WHERE "user" >= {users[0]} AND "user" < {users[1]}'
    with _damage(path):
        columns = dict(con.execute(f"SELECT * FROM read_parquet({file_list((path,))}){where}").fetchnumpy())
    for name, column in columns.items():
        if isinstance(column, np.ma.MaskedArray):
            raise InputError(f"{path} has empty cells in its column {name!r}: it is not as it was written")
    return columns


def count_rows(con: Connection, path: Path) -> int:
    """How many rows a file has. Raises InputError as `read_parquet` does."""
    query = f"SELECT sum(num_rows)::BIGINT FROM parquet_file_metadata({file_list((path,))})"
    with _damage(path):
        (rows,) = con.execute(query).fetchall()[0]
    return int(rows or 0)


def read_parquet_metadata(con: Connection, path: Path) -> dict[str, str]:
    """The metadata given to `write_parquet`. Raises InputError where the file is missing or damaged."""
    query = f"SELECT decode(key), decode(value) FROM parquet_kv_metadata({file_list((path,))})"
    with _damage(path):
        return dict(con.execute(query).fetchall())


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise InputError(f"{path} is missing: {FIX}")
    with reading(str(path), FIX):
        yield
