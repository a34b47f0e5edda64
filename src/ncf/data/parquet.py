"""Arrays to a Parquet file and back, with a few words of metadata."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import duckdb
import numpy as np

from ncf.data.duckdb_session import connect, explain, file_list, identifier, literal
from ncf.errors import InputError, RunError
from ncf.files import sync

FIX = "prepare the dataset again, or train the run again"
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
    query = f"SELECT {selected} FROM columns_to_write"
    try:
        with _given_or_new(connection) as con:
            con.register("columns_to_write", dict(columns))
            con.execute(f"COPY ({query}) TO {literal(path)} ({_write_options(metadata)})")
            con.unregister("columns_to_write")
        sync(path)
    except (duckdb.Error, OSError) as error:
        raise RunError(f"cannot write {path}: {explain(error)}") from error


def read_parquet(
    path: Path, *, connection: Connection = None, users: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Every column of a Parquet file, in the order of its rows: numbers, or `str` objects.

    With `users` (first, end), only the rows whose column `user` is in that range. Raises InputError where the file is
    missing, damaged, or has empty cells, which nothing that ncf writes has.
    """
    where = "" if users is None else f' WHERE "user" >= {users[0]} AND "user" < {users[1]}'
    with _damage(path), _given_or_new(connection) as con:
        query = f"SELECT * FROM read_parquet({file_list((Path(path),))}){where}"
        columns = dict(con.execute(query).fetchnumpy())
    for name, column in columns.items():
        if isinstance(column, np.ma.MaskedArray):
            raise InputError(f"{path} has empty cells in its column {name!r}: it is not as it was written")
    return columns


def read_user_at(path: Path, rows: list[int], *, connection: Connection = None) -> list[int]:
    """The column `user` at some rows, which count from 0. Raises InputError as `read_parquet` does."""
    with _damage(path), _given_or_new(connection) as con:
        files = file_list((Path(path),))
        wanted = ", ".join(map(str, rows)) or "NULL"
        query = f'SELECT file_row_number, "user" FROM read_parquet({files}, file_row_number = true)'
        found = dict(con.execute(f"{query} WHERE file_row_number IN ({wanted})").fetchall())
    if set(rows) - set(found):
        raise InputError(f"{path} is damaged: it has fewer rows than were written; {FIX}")
    return [found[row] for row in rows]


def count_rows(path: Path, *, connection: Connection = None) -> int:
    """How many rows a file has. Raises InputError as `read_parquet` does."""
    with _damage(path), _given_or_new(connection) as con:
        row = con.execute(
            f"SELECT sum(num_rows)::BIGINT FROM parquet_file_metadata({file_list((Path(path),))})"
        ).fetchone()
    return int(row[0]) if row else 0


def _write_options(metadata: Mapping[str, str]) -> str:
    pairs = ", ".join(f"{identifier(key)}: {literal(value)}" for key, value in metadata.items())
    return "FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1" + (f", KV_METADATA {{{pairs}}}" if pairs else "")


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
        raise InputError(f"{path} is missing: {FIX}")
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise RunError(f"out of memory while reading {path}: {explain(error)}") from error
    except duckdb.Error as error:
        raise InputError(f"{path} is damaged: {explain(error)}; {FIX}") from error
