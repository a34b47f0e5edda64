"""Where a log comes from: a file, a glob, a directory, an archive, a data-set name or a table in memory."""

import glob
import os
import re
import shutil
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ncf.config import PrepareConfig
from ncf.errors import InputError

LOGS = ("ratings.csv", "ratings.dat", "u.data")  # as in the MovieLens archives
TITLES = {"ratings.csv": "movies.csv", "ratings.dat": "movies.dat", "u.data": "u.item"}
GIVEN_SPLIT = re.compile(r"(.+)\.(train\.rating|test\.rating|test\.negative)(\.gz)?")
SUFFIXES = (".csv", ".tsv", ".txt", ".dat", ".data", ".parquet", ".jsonl", ".ndjson", ".json")
DOWNLOADS = Path("data/downloads")
HELP = "give a file, a glob, a directory or one of"


@dataclass(frozen=True)
class Files:
    """The files of a source: one or more logs of one form, or the three of a given split."""

    logs: tuple[Path, ...]
    titles: Path | None = None
    labels: tuple[str, ...] = ()  # what the user knows each log by, where that is not its path
    titles_label: str | None = None  # and the titles

    def label(self, file: Path) -> str:
        """What to call `file` in a message."""
        return self.labels[self.logs.index(file)] if self.labels else str(file)


def is_table(source: Any) -> bool:
    """Whether a source is a table in memory, such as of pandas, polars or Arrow, and not a path or a name."""
    return not isinstance(source, (str, os.PathLike))


def source_name(source: Any) -> str:
    """A short name for a source, such as `ml-1m`: to name a dataset by."""
    if is_table(source):
        return "table"
    path = Path(source)
    stem = path.name.split(".")[0] if not path.is_dir() else path.resolve().name
    if match := GIVEN_SPLIT.fullmatch(path.name):
        stem = match[1]
    elif stem in {"ratings", "u"}:
        stem = path.resolve().parent.name
    return re.sub(r"[*?\[\]]+", "", stem).strip("-_") or "log"


def find_files(source: str | os.PathLike[str], config: PrepareConfig, folder: Path, *, progress: bool) -> Files:
    """The files that hold a log. `folder` takes what has to be unpacked or made. Raises InputError for none."""
    path = Path(source)
    if path.is_dir():
        return _in_directory(path, folder, progress=progress)
    if path.exists():
        packed = path.suffix == ".zip" or zipfile.is_zipfile(path)
        return _in_zip(path, folder, progress=progress) if packed else _beside(path)
    if matches := [Path(match) for match in sorted(glob.glob(str(source), recursive=True)) if Path(match).is_file()]:  # noqa: PTH207
        return Files(tuple(matches)) if len(matches) > 1 else _beside(matches[0])
    return _by_name(str(source), config, folder, progress=progress)


def _by_name(name: str, config: PrepareConfig, folder: Path, *, progress: bool) -> Files:
    if name == "synthetic":
        from ncf.ingest.synthetic import write_log  # noqa: PLC0415 -- needed for this name alone

        log, titles = folder / "synthetic.parquet", folder / "titles.parquet"
        sizes = {"users": config.users, "items": config.items, "interactions": config.interactions}
        write_log(log, titles, **sizes, seed=config.seed, progress=progress)
        return Files((log,), titles, ("synthetic",), "synthetic")
    from ncf.ingest import download  # noqa: PLC0415 -- needed for names alone

    if name in download.NAMES:
        return _in_zip(download.fetch(name, DOWNLOADS, progress=progress), folder, progress=progress)
    if glob.has_magic(name):
        raise InputError(f"no file matches {name!r}")
    raise InputError(f"no such file or data set: {name!r}; {HELP} {', '.join((*download.NAMES, 'synthetic'))}")


def _beside(log: Path) -> Files:
    """A log with the titles that MovieLens keeps beside it."""
    titles = TITLES.get(log.name.removesuffix(".gz"))
    found = [log.with_name(titles + suffix) for suffix in ("", ".gz") if titles]
    return Files((log,), next((file for file in found if file.is_file()), None))


def _in_directory(path: Path, folder: Path, *, progress: bool) -> Files:
    """The log in a directory: MovieLens's own file names first, then an archive, then the one file there is."""
    if (path / "dataset.json").is_file():
        raise InputError(f"{path} is already a prepared dataset: train on it, or prepare the log it was made from")
    for inner in (path, *sorted(entry for entry in path.iterdir() if entry.is_dir())):
        for name in LOGS:
            for file in (inner / name, inner / f"{name}.gz"):
                if file.is_file():
                    return _beside(file)
    if archives := sorted(path.glob("*.zip")):
        if len(archives) > 1:
            raise InputError(f"{path} holds several archives: name one of {_some(archives)}")
        return _in_zip(archives[0], folder, progress=progress)
    files = sorted(entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
    given = [file for file in files if GIVEN_SPLIT.fullmatch(file.name) and "train" in file.name]
    logs = given or [file for file in files if file.name.removesuffix(".gz").endswith(SUFFIXES)]
    if len(logs) != 1:
        raise InputError(f"{path} holds {'several files' if logs else 'no log'}: name the log; found {_some(files)}")
    return _beside(logs[0])


def _some(files: list[Path]) -> str:
    names = [file.name for file in files[:10]]
    return ", ".join(names) + (", ..." if len(files) > 10 else "") if names else "nothing"


def _in_zip(path: Path, folder: Path, *, progress: bool) -> Files:
    """Unpack the log of an archive, and its titles, into `folder`."""
    try:
        return _unpack_log(path, folder, progress=progress)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged archive: {error}; get it again") from error


def _unpack_log(path: Path, folder: Path, *, progress: bool) -> Files:
    with zipfile.ZipFile(path) as archive:
        members = {Path(name).name: name for name in reversed(archive.namelist()) if not name.endswith("/")}
        log = next((name for name in LOGS if name in members), None)
        if log is None and len(members) == 1:
            (log,) = members
        if log is None:
            found = ", ".join(sorted(members)[:10])
            raise InputError(f"{path} holds no {', '.join(LOGS)}: unpack it and name the log; found {found}")
        member = members.get(TITLES.get(log, ""))
        title_file = _unpack(archive, member, folder, progress=progress) if member else None
        titles_label = f"{path}:{member}" if member else None
        log_file = _unpack(archive, members[log], folder, progress=progress)
    return Files((log_file,), title_file, (f"{path}:{members[log]}",), titles_label)


def _unpack(archive: zipfile.ZipFile, member: str, folder: Path, *, progress: bool) -> Path:
    target = folder / Path(member).name
    how = {"total": archive.getinfo(member).file_size, "desc": f"unpacking {target.name}", "disable": not progress}
    with archive.open(member) as packed, target.open("wb") as out, tqdm.wrapattr(out, "write", **how) as counted:
        shutil.copyfileobj(packed, counted)
    return target
