"""Files that are whole or absent, whatever happens when; and a lock that dies with its owner."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ncf.errors import InputError, RunError


def sync(path: Path) -> None:
    """Wait until a file's, or a directory's, content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; what was written there takes its place, synced, when the block ends well.

    Where the block fails, `path` is as it was and the temporary file is gone. An OSError becomes a RunError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    except RunError as error:  # of a writer that knows the temporary name alone
        raise type(error)(str(error).replace(str(temporary), str(path))) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, owner: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made where there is none); the system frees it when the process ends.

    Raises InputError where another process holds it; `owner` says in words what that process is.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise InputError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path.parent} is in use by {owner}: wait for it, or choose another directory") from None
        yield
