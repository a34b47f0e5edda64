"""DuckDB as this package uses it: bounded memory, its own spill folder, no network, one-line errors."""

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
from tqdm import tqdm

from ncf.errors import InputError, RunError

MEMORY_LIMIT = 2 * 1024**3  # bytes; a quarter of the machine's memory where that is less


@contextmanager
def connect(spill: Path | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory database that spills into `spill`, or into a folder of its own that goes at the end."""
    with tempfile.TemporaryDirectory(prefix=".ncf-spill-") as own:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        settings: dict[str, str | bool | int | float | list[str]] = {
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "memory_limit": f"{min(MEMORY_LIMIT, memory // 4) // 1024**2}MiB",
            "temp_directory": str(spill or own),
            "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        }
        connection = duckdb.connect(config=settings)
        try:
            connection.execute("SET TimeZone = 'UTC'")
            yield connection
        finally:
            connection.close()


def literal(text: object) -> str:
    """`text` as an SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def file_list(files: tuple[Path, ...]) -> str:
    """`files` as an SQL list of paths, each meant literally: in a path DuckDB would expand `*`, `?` and `[`."""
    escaped = ("".join(f"[{c}]" if c in "*?[" else c for c in str(file)) for file in files)
    return "[" + ", ".join(literal(path) for path in escaped) + "]"


def explain(error: Exception) -> str:
    """The first line of what DuckDB has to say, without its own heading."""
    text = str(error).strip()
    if number := re.search(r'"errno":\s*"?(\d+)', text):
        return os.strerror(int(number[1]))
    first = text.splitlines()[0] if text else type(error).__name__
    return first.split("Error: ", 1)[-1]


@contextmanager
def reading(label: str, fix: str = "is it complete, and what its name says?") -> Iterator[None]:
    """Turn what DuckDB raises over a file into InputError, and what it raises over this machine into RunError."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise RunError(f"out of memory or of room to spill while reading {label}: {explain(error)}") from error
    except duckdb.Error as error:
        if isinstance(error, duckdb.IOException) and "could not write" in str(error).lower():  # the spill disk is full
            raise RunError(f"cannot write while reading {label}: {explain(error)}") from error
        raise InputError(f"{label} is damaged or cannot be read: {explain(error)}; {fix}") from error


@contextmanager
def progress_bar(connection: duckdb.DuckDBPyConnection, label: str, *, shown: bool) -> Iterator[None]:
    """A bar on stderr that follows the running query."""
    if not shown:
        yield
        return
    done = threading.Event()
    with tqdm(total=100, desc=label, bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}") as bar:

        def follow() -> None:
            while not done.wait(0.2):
                bar.update(max(0, min(connection.query_progress(), 100.0) - bar.n))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
            done.set()
            follower.join()
            bar.update(100 - bar.n)
        finally:
            done.set()
