"""Files and directories that are whole or absent, whatever happens when; and a lock that ends with its owner."""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    except (OSError, RunError) as error:
        raise _at(path, temporary, error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory beside `path` to write into; at the end it is synced and takes the name `path`.

    On any failure nothing is left of it, and what was at `path` is still there. Raises InputError where nothing can
    be written there, RunError where writing fails midway.
    """
    path = path.resolve()
    missing = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        folder.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another output") from error
    try:
        yield folder
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        _swap(folder, path)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()
        if isinstance(error, (OSError, RunError)):
            raise _at(path, folder, error) from error
        raise


def _swap(folder: Path, path: Path) -> None:
    """Give `folder` the name `path`, and delete what had it."""
    old = folder.with_name(folder.name + "-old")
    if path.exists():
        path.rename(old)
    try:
        folder.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _at(path: Path, temporary: Path, error: OSError | RunError) -> RunError:
    """The error of a writer, in terms of `path`, which the user knows."""
    if isinstance(error, RunError):
        return type(error)(str(error).replace(str(temporary), str(path)))
    return RunError(f"cannot write {path}: {error.strerror or error}")


def check_output(path: Path, *, overwrite: bool, marker: str, kind: str, known: frozenset[str]) -> None:
    """Refuse an output directory that holds something, before any work is done for it.

    Raises InputError for all but an empty directory and, with `overwrite`, one of this `kind` (as its `marker` file
    says) that holds nothing but `known` file names.
    """
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise InputError(f"cannot write {path}: {existing} is a file, not a directory; choose another output")
    names = {entry.name for entry in path.iterdir()} if existing == path else set()
    if not names:
        return
    if not is_marked(path / marker, kind):
        raise InputError(f"{path} holds other files and is no {kind}: choose an empty or a new directory")
    if not overwrite:
        raise InputError(f"{path} is an existing {kind}: choose another output, or replace it with --overwrite")
    if names - known:
        raise InputError(
            f"{path} also holds {min(names - known)!r}, which --overwrite would delete: move it away first"
        )


def is_marked(marker: Path, kind: str) -> bool:
    """Whether the JSON file `marker` says that its directory is `kind`."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == kind


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Give the directory `target` the files `names` of `source`, where they are there.

    They are hard links where the file system allows it: ncf replaces files and never changes them in place.
    """
    for file in filter(Path.exists, (source / name for name in names)):
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


@contextmanager
def locked(path: Path, owner: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` (made where there is none); the system frees it when the process ends.

    Raises InputError where another process holds it; `owner` says in words what that process is.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415 - a tenth of a second, which a reader can do without

    try:
        lock = FileLock(path, timeout=0).acquire()
    except Timeout:
        raise InputError(f"{path.parent} is in use by {owner}: wait for it, or choose another directory") from None
    except OSError as error:
        raise InputError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from None
    with lock:
        yield
