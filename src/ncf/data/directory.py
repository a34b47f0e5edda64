"""A directory that appears whole or not at all, and replaces only what it may."""

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ncf.errors import InputError, RunError
from ncf.files import sync


def check_output(path: Path, *, overwrite: bool, marker: str, kind: str, known: frozenset[str]) -> None:
    """Refuse an output that holds something, before any work is done for it.

    A directory that is `kind` (its `marker` file says so) and holds nothing but `known` file names may be replaced
    with `overwrite`; an empty directory may always be filled. Raises InputError for anything else.
    """
    for parent in path.parents:
        if parent.exists():
            if not parent.is_dir():
                raise InputError(f"cannot write {path}: {parent} is a file, not a directory")
            break
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"cannot write {path}: there is a file of that name; choose another output")
    names = {entry.name for entry in path.iterdir()}
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
        if isinstance(error, RunError):
            raise RunError(str(error).replace(str(folder), str(path))) from error
        if isinstance(error, OSError):
            raise RunError(f"cannot write {path}: {error.strerror or error}") from error
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
