"""MovieLens archives: downloaded from GroupLens once, resumed where the connection broke, checked by their MD5.

    path = fetch("ml-1m", "data/downloads")

The environment variable NCF_MOVIELENS_URL names a mirror that holds the same files. MovieLens may not be
redistributed: its terms of use are in each archive's README.
"""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ncf.errors import InputError, RunError
from ncf.files import locked

DEFAULT_URL = "https://files.grouplens.org/datasets/movielens"
TIMEOUT = 30.0  # seconds, to connect and for each read
BLOCK = 1 << 18  # bytes

# As GroupLens publishes them in <archive>.zip.md5. ml-latest-small changes from time to time, so its MD5 is read there.
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


def fetch(name: str, folder: Path | str, *, progress: bool = False) -> Path:
    """The path of a MovieLens archive in `folder`: the one that lies there, else downloaded.

    An archive that lies there is used without the network, if its MD5 is right (ml-latest-small has no lasting one; its
    members have CRCs, which unpacking checks). A download that breaks off leaves `<name>.zip.part`, and the next call
    resumes it.

    Raises InputError where the archive cannot be had (unknown name, no network, wrong MD5, ...), RunError where a
    download breaks off or the disk is full.
    """
    if name not in MD5:
        raise InputError(f"unknown data set {name!r}: choose one of {', '.join(NAMES)}")
    archive = Path(folder) / f"{name}.zip"
    if archive.exists():
        _check_md5(archive, MD5[name], "delete it to download it again")
        return archive
    url = f"{(os.environ.get('NCF_MOVIELENS_URL') or DEFAULT_URL).rstrip('/')}/{archive.name}"
    if not re.match("https?://[^/]", url, re.IGNORECASE):
        raise InputError(f"cannot download {url}: NCF_MOVIELENS_URL must begin with https:// and name a server")
    with suppress(OSError):  # what is wrong, taking the lock will say
        archive.parent.mkdir(parents=True, exist_ok=True)
    with locked(archive.with_name(f".{archive.name}.lock"), f"another download of {name}"):
        if not archive.exists():  # another process may just have finished
            _download(url, archive, MD5[name] or _published_md5(url), progress=progress)
    return archive


def _download(url: str, archive: Path, expected: str, *, progress: bool) -> None:
    """Make `archive` of its `.part`, which is resumed where it exists and deleted where its MD5 is wrong."""
    part = archive.with_name(f"{archive.name}.part")
    response = _open(url, part.stat().st_size if part.exists() else 0)
    try:
        if response is not None:
            with response:
                _save(url, response, part, progress=progress)
        _check_md5(part, expected, f"it was deleted: run again, or {_by_hand(url)}")
    except InputError:
        part.unlink()
        raise
    except OSError as error:
        raise RunError(f"cannot write {part}: {_reason(error)}; make room and run again to resume") from error
    part.replace(archive)


def _save(url: str, response: Any, part: Path, *, progress: bool) -> None:
    """Append the body to `part`, or write it anew where the server ignored the range that was asked for."""
    with part.open("ab" if response.status == 206 else "wb") as file:
        start = file.tell()
        total = None if response.length is None else start + response.length
        with tqdm(desc=part.stem, total=total, initial=start, unit="B", unit_scale=True, disable=not progress) as bar:
            for block in _blocks(url, response):
                file.write(block)
                bar.update(len(block))


def _blocks(url: str, response: Any) -> Iterator[bytes]:
    """The body as it arrives. Raises RunError where the connection breaks."""
    try:
        while block := response.read1(BLOCK):  # `read` would lose a block that breaks off
            yield block
        if response.length:
            raise ConnectionError(f"the server closed the connection {response.length} bytes early")
    except (OSError, http.client.HTTPException) as error:
        raise RunError(f"the download of {url} broke off: {_reason(error)}; run again to resume it") from error


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https alone; urllib would follow one to ftp."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.HTTPError(newurl, code, f"a redirect to {newurl}", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, offset: int = 0) -> Any:
    """The server's answer, from a byte of the file on; None where the file ends there. Raises InputError."""
    headers = {"User-Agent": "ncf"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - `fetch` has checked the scheme
        return urllib.request.build_opener(_WebOnly).open(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            if offset and error.code == 416:
                return None
        fix = f"name a mirror in NCF_MOVIELENS_URL, or {_by_hand(url)}"
        raise InputError(f"cannot download {url}: {_reason(error)}; {fix}") from error


def _published_md5(url: str) -> str:
    """The MD5 beside an archive: `MD5 (ml-1m.zip) = <32 hex digits>` or `<32 hex digits>  ml-1m.zip`."""
    with _open(f"{url}.md5") as response:
        text = b"".join(_blocks(f"{url}.md5", response)).decode("ascii", "replace")
    if not (found := re.search(r"\b[0-9a-fA-F]{32}\b", text)):
        raise InputError(f"cannot download {url}: there is no MD5 in {url}.md5; {_by_hand(url)}")
    return found[0].lower()


def _check_md5(path: Path, expected: str | None, fix: str) -> None:
    if expected is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()
        if found != expected:
            raise InputError(f"wrong checksum of {path}: its MD5 is {found}, not {expected}; {fix}")


def _by_hand(url: str) -> str:
    return f"get the archive another way: `ncf prepare path/to/{url.rpartition('/')[2].removesuffix('.md5')}`"


def _reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(text.split()) or type(error).__name__
