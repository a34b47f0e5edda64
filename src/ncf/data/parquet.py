"""Arrays to a Parquet file and back, with a few words of metadata."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import duckdb
import numpy as np

from ncf.data.engine import connect, explain, file_list, identifier, literal
from ncf.errors import InputError, RunError
from ncf.files import sync

Connection = duckdb.DuckDBPyConnection | None  # to use for several files; None opens one, which takes 50 ms


def write_parquet(
    path: Path, columns: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, connection: Connection = None
) -> None:
    """Write arrays of one length, numbers or `str` objects, and sync the file to the disk.

    Raises RunError when it cannot be written, such as on a full disk.
    """
    selected = ", ".join(
        f"{identifier(name)}::VARCHAR AS {identifier(name)}" if column.dtype == object else identifier(name)
        for name, column in columns.items()
    )
    pairs = ", ".join(f"{identifier(key)}: {literal(value)}" for key, value in metadata.items())
    options = "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1" + (f", KV_METADATA {{{pairs}}}" if pairs else "")
    try:
        with _given_or_new(connection) as con:
            con.register("columns_to_write", dict(columns))
            con.execute(f"COPY (SELECT {selected} FROM columns_to_write) TO {literal(path)} ({options})")
            con.unregister("columns_to_write")
        sync(path)
    except (duckdb.Error, OSError) as error:
        raise RunError(f"cannot write {path}: {explain(error)}") from error


def read_parquet(path: Path, *, connection: Connection = None) -> dict[str, np.ndarray]:
    """Every column of a Parquet file, in the order of its rows: numbers, or `str` objects.

    Raises InputError where the file is missing, damaged, or has empty cells.
    """
    with _damage(path), _given_or_new(connection) as con:
        query = f"SELECT * FROM read_parquet({file_list((Path(path),))})"
        columns = dict(con.execute(query).fetchnumpy())
    for name, column in columns.items():
        if isinstance(column, np.ma.MaskedArray):
            raise InputError(f"{path} has empty cells in its column {name!r}: it is not as it was written")
    return columns


def read_parquet_metadata(path: Path, *, connection: Connection = None) -> dict[str, str]:
    """The metadata given to `write_parquet`. Raises InputError where the file is missing or damaged."""
    with _damage(path), _given_or_new(connection) as con:
        query = f"SELECT decode(key), decode(value) FROM parquet_kv_metadata({file_list((Path(path),))})"
        return dict(con.execute(query).fetchall())


def _given_or_new(connection: Connection) -> AbstractContextManager[duckdb.DuckDBPyConnection]:
    return connect() if connection is None else nullcontext(connection)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    if not Path(path).is_file():
        raise InputError(f"{path} is missing: what it is part of must be made again")
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise RunError(f"out of memory while reading {path}: {explain(error)}") from error
    except duckdb.Error as error:
        raise InputError(f"{path} is damaged: {explain(error)}; what it is part of must be made again") from error
