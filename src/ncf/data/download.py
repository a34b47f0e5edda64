"""MovieLens archives: fetched from GroupLens once, resumed where cut off, and used only if their checksum is right.

    path = fetch("ml-1m", "data/downloads")

The environment variable NCF_MOVIELENS_URL names another place that holds the same files, such as a mirror
(default: https://files.grouplens.org/datasets/movielens). MovieLens may not be redistributed: its terms of use are
in each archive's README.
"""

import fcntl
import hashlib
import http.client
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from ncf.errors import InputError, RunError

DEFAULT_URL = "https://files.grouplens.org/datasets/movielens"
TIMEOUT = 30.0  # seconds, to connect and for each read
BLOCK = 1 << 18  # bytes

# As GroupLens publishes them beside each archive, in <archive>.zip.md5. ml-latest-small changes from time to time, so
# its checksum is read from there when it is downloaded.
MD5: dict[str, str | None] = {
    "ml-100k": "0e33842e24a9c977be4e0107933c0723",
    "ml-latest-small": None,
    "ml-1m": "c4d9eecfca2ab87c1945afe126590906",
    "ml-10m": "ce571fd55effeba0271552578f2648bd",
    "ml-20m": "cd245b17a1ae2cc31bb14903e1204af3",
    "ml-25m": "6b51fb2759a8657d3bfcbfc42b592ada",
    "ml-32m": "d472be332d4daa821edc399621853b57",
}
NAMES: tuple[str, ...] = tuple(MD5)


def fetch(name: str, folder: Path | str, *, base_url: str | None = None, progress: bool = False) -> Path:
    """The path of a verified MovieLens archive in `folder`: the one that lies there, else downloaded.

    An archive that lies there is checked and used without the network; ml-latest-small, which has no lasting
    checksum, by the CRCs of its members. A download that was cut off leaves `<name>.zip.part`, and the next call goes
    on from it unless the server's file has changed. `base_url` goes before NCF_MOVIELENS_URL.

    Raises InputError where the archive cannot be had (unknown name, no network, wrong checksum, ...), RunError where
    a download that had begun is cut off or the disk fills up.
    """
    if name not in MD5:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(NAMES)}")
    archive = Path(folder) / f"{name}.zip"
    if archive.exists():
        _check_local(archive, MD5[name])
        return archive
    base = base_url or os.environ.get("NCF_MOVIELENS_URL") or DEFAULT_URL
    url = f"{base.rstrip('/')}/{archive.name}"
    if not re.match(r"https?://[^/]", base, re.IGNORECASE):
        raise InputError(f"cannot download {url}: NCF_MOVIELENS_URL must be an address that begins with https://")
    part = archive.with_name(f"{archive.name}.part")
    tag = archive.with_name(f"{part.name}.tag")
    with _alone(part) as file:
        expected = MD5[name] or _published_md5(url)
        try:
            _download(url, file, tag, progress)
        except OSError as error:  # of the disk: those of the network are told apart where they arise
            raise RunError(
                f"cannot write {part} ({_reason(error)}): what arrived is kept; make room and run again to go on"
            ) from error
        found = _md5_of(part)
        tag.unlink(missing_ok=True)
        if found != expected:
            part.unlink()
            raise InputError(
                f"wrong checksum of {part}, downloaded from {url}: its MD5 is {found}, not {expected}; "
                f"it was deleted: run again, or {_by_hand(archive.name)}"
            )
        part.replace(archive)
    return archive


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


def _check_local(archive: Path, expected: str | None) -> None:
    """Raise InputError unless the archive is whole. It may be the user's, so it is never deleted."""
    fix = f"delete it to download it anew, or give a good one by its path: `ncf prepare path/to/{archive.name}`"
    try:
        if expected is None:
            with zipfile.ZipFile(archive) as members:
                broken = members.testzip()
            if broken:
                raise InputError(f"{archive} is damaged: {broken} in it has a wrong CRC; {fix}")
            return
        found = _md5_of(archive)
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"cannot read {archive} ({_reason(error)}): {fix}") from error
    if found != expected:
        raise InputError(f"wrong checksum of {archive}: its MD5 is {found}, not {expected}; {fix}")


@contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """The file, open for reading and appending, with what is in it; locked, so that no other process writes to it."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("a+b")
    except OSError as error:
        raise InputError(f"cannot write {part} ({_reason(error)}): name a folder that can be written to") from error
    with file:
        if not _lock(file, part):
            raise InputError(f"another process is downloading {part}: wait for it to finish, then run again")
        try:
            yield file
        finally:
            if part.exists() and part.stat().st_size == 0:
                part.unlink()


def _lock(file: BinaryIO, part: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have finished, and moved this very file, between our opening and locking it.
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except OSError:
        return False


def _published_md5(url: str) -> str:
    """The checksum beside an archive: `MD5 (ml-1m.zip) = <32 hex digits>` or `<32 hex digits>  ml-1m.zip`."""
    try:
        with _open(f"{url}.md5", {}) as response:
            text = response.read(1000).decode("ascii", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(f"{url}.md5", error) from error
    found = re.search(r"\b[0-9a-fA-F]{32}\b", text)
    if not found:
        raise _unreachable(f"{url}.md5", "there is no MD5 in the answer")
    return found[0].lower()


def _download(url: str, file: BinaryIO, tag: Path, progress: bool) -> None:
    """Make the file whole. `tag` keeps what identifies the server's version of it while it is not."""
    response, offset = _request(url, file.seek(0, os.SEEK_END), tag)
    if response is None:
        return
    with response:
        file.truncate(offset)
        file.seek(offset)
        if not offset:
            tag.write_text(_validator(response), encoding="utf-8")
        total = None if response.length is None else offset + response.length
        with tqdm(
            total=total, initial=offset, desc=Path(tag.stem).stem, unit="B", unit_scale=True, disable=not progress
        ) as bar:
            for block in _blocks(response, url, file, total):
                file.write(block)
                bar.update(len(block))
    file.flush()
    os.fsync(file.fileno())


def _request(url: str, offset: int, tag: Path) -> tuple[Any, int]:
    """An answer and the offset at which its body begins; no answer where the file is whole already."""
    if not offset:
        return _open(url, {}), 0
    headers = {"Range": f"bytes={offset}-"}
    if tag.exists() and (validator := tag.read_text(encoding="utf-8")):
        headers["If-Range"] = validator  # a changed file comes whole
    response = _open(url, headers, or_status=416)
    if response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
        return response, offset
    if response.status == 200:  # changed, or a server without ranges
        return response, 0
    response.close()
    if response.status == 416 and response.headers.get("Content-Range") == f"bytes */{offset}":
        return None, offset
    return _open(url, {}), 0


def _validator(response: Any) -> str:
    etag: str = response.headers.get("ETag", "")
    modified: str = response.headers.get("Last-Modified", "")
    return etag if etag.startswith('"') else modified  # a weak ETag will not do


def _blocks(response: Any, url: str, file: BinaryIO, total: int | None) -> Iterator[bytes]:
    """The body. Raises RunError where it ends early."""
    reason = "the connection was closed"
    try:
        while block := response.read1(BLOCK):  # `read` would lose the bytes of a block that is cut off
            yield block
    except (OSError, http.client.HTTPException) as error:
        reason = _reason(error)
    else:
        if total is None or file.tell() == total:
            return
    raise RunError(
        f"the download of {url} was cut off at {file.tell()} of {total or 'an unknown number of'} bytes ({reason}): "
        f"{file.name} keeps them; run again to go on from there"
    )


def _open(url: str, headers: dict[str, str], *, or_status: int | None = None) -> Any:
    """The server's answer, of a status 2xx or `or_status`. Raises InputError where there is none."""
    opener = urllib.request.OpenerDirector()  # the default one would follow a redirect to ftp
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    opener.addheaders = [("User-Agent", "ncf")]
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - `fetch` has checked the scheme
        return opener.open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == or_status:
            return error
        error.close()
        raise _unreachable(url, f"the server answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unreachable(url, error) from error


def _unreachable(url: str, reason: Exception | str) -> InputError:
    text = reason if isinstance(reason, str) else _reason(reason)
    archive = url.rpartition("/")[2].removesuffix(".md5")
    return InputError(f"cannot download {url} ({text}): name a mirror in NCF_MOVIELENS_URL, or {_by_hand(archive)}")


def _by_hand(archive: str) -> str:
    return f"get the archive some other way and give its path: `ncf prepare path/to/{archive}`"


def _reason(error: BaseException) -> str:
    """What went wrong, on one line."""
    if isinstance(error, urllib.error.URLError):
        return _reason(error.reason) if isinstance(error.reason, BaseException) else str(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(error, socket.gaierror):
        return f"no network, or no such host: {error.strerror}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
