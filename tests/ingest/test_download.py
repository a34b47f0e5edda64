import hashlib
import os
import random
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ncf.errors import InputError, RunError
from ncf.ingest import download
from ncf.ingest.download import NAMES, fetch

SMALL = "ml-latest-small"
ARCHIVE = random.Random(0).randbytes(600_000)


class Server(ThreadingHTTPServer):
    """What GroupLens's server does, and what else a server may do."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive = ARCHIVE
        self.md5 = f"MD5 ({SMALL}.zip) = {hashlib.md5(ARCHIVE).hexdigest()}\n"
        self.ranges = True  # whether Range is understood
        self.length = True  # whether it tells the length
        self.cut_at = None  # bytes of the body after which it hangs up
        self.stall = 0  # seconds that it waits before it hangs up
        self.status = 200
        self.location = None
        self.log = []  # (path, Range)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, body = self.server, self.server.archive
        server.log.append((self.path, self.headers["Range"]))
        begin = int(self.headers["Range"][6:-1]) if self.headers["Range"] and server.ranges else 0
        if server.location and not self.path.startswith("/moved"):
            self.answer(301, b"", Location=server.location + self.path)
        elif self.path.endswith(".md5"):
            self.answer(200, server.md5.encode())
        elif server.status != 200:
            self.answer(server.status, b"sorry")
        elif begin >= len(body):
            self.answer(416, b"")
        else:
            self.answer(206 if begin else 200, body[begin:], cut_at=server.cut_at)

    def answer(self, status, body, cut_at=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut_at])
        self.wfile.flush()
        if cut_at:
            time.sleep(self.server.stall)


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        monkeypatch.setenv("NCF_MOVIELENS_URL", running.url)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def failure(folder, match, kind=InputError, name=SMALL):
    """Check that `fetch` fails in one line."""
    with pytest.raises(kind, match=match) as caught:
        fetch(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def break_off(server, folder, at=200_000):
    server.cut_at = at
    failure(folder, f"{server.url}/{SMALL}.zip broke off.*run again to resume", RunError)
    server.cut_at = None
    server.log.clear()


def test_download_verify_and_use_again(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NCF_MOVIELENS_URL", server.url + "/")
    path = fetch(SMALL, tmp_path / "new" / "folder", progress=True)
    assert path == tmp_path / "new" / "folder" / f"{SMALL}.zip"
    assert path.read_bytes() == ARCHIVE
    assert names(path.parent) == [path.name]
    assert f"{SMALL}.zip: 100%" in capsys.readouterr().err
    assert server.log == [(f"/{SMALL}.zip.md5", None), (f"/{SMALL}.zip", None)]
    assert fetch(SMALL, path.parent) == path
    assert len(server.log) == 2
    assert capsys.readouterr().err == ""


def test_a_pinned_md5_needs_no_published_one(server, tmp_path, monkeypatch):
    monkeypatch.setitem(download.MD5, "ml-1m", hashlib.md5(ARCHIVE).hexdigest())
    assert fetch("ml-1m", tmp_path).read_bytes() == ARCHIVE
    assert server.log == [("/ml-1m.zip", None)]


def test_the_form_of_md5sum_is_read_too(server, tmp_path):
    server.md5 = f"{hashlib.md5(ARCHIVE).hexdigest().upper()}  {SMALL}.zip\n"
    assert fetch(SMALL, tmp_path).exists()


def test_unknown_name(tmp_path):
    assert failure(tmp_path, "'ml-2m'", name="ml-2m").endswith(", ".join(NAMES))


def test_what_broke_off_is_kept_and_resumed(server, tmp_path, capsys):
    for at in (100_000, 100_000, 300_000):
        break_off(server, tmp_path, at)
    assert (tmp_path / f"{SMALL}.zip.part").read_bytes() == ARCHIVE[:500_000]
    path = fetch(SMALL, tmp_path, progress=True)
    assert server.log[-1] == (f"/{SMALL}.zip", "bytes=500000-")
    assert path.read_bytes() == ARCHIVE
    assert names(tmp_path) == [path.name]
    assert "100%" in capsys.readouterr().err


def test_a_server_that_ignores_range(server, tmp_path):
    break_off(server, tmp_path)
    server.ranges = False
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE


def test_a_part_that_is_whole_already(server, tmp_path):
    (tmp_path / f"{SMALL}.zip.part").write_bytes(ARCHIVE)
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE
    assert names(tmp_path) == [f"{SMALL}.zip"]


@pytest.mark.parametrize("stale", [b"x" * 1000, ARCHIVE + b"more"])
def test_a_part_of_another_file_is_deleted(server, tmp_path, stale):
    (tmp_path / f"{SMALL}.zip.part").write_bytes(stale)
    failure(tmp_path, "wrong checksum.*deleted: run again")
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE


def test_an_unknown_length(server, tmp_path):
    server.length = False
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE


def test_wrong_content(server, tmp_path):
    server.archive = b"<html>Please log in to this network</html>"
    found, expected = hashlib.md5(server.archive).hexdigest(), hashlib.md5(ARCHIVE).hexdigest()
    failure(tmp_path, f"{found}, not {expected}.*`ncf prepare path/to/{SMALL}.zip`")
    assert names(tmp_path) == []


def test_no_md5_published(server, tmp_path):
    server.md5 = "<html></html>"
    failure(tmp_path, f"no MD5 in {server.url}/{SMALL}.zip.md5")
    assert names(tmp_path) == []


def test_an_error_of_the_server_keeps_the_part(server, tmp_path):
    break_off(server, tmp_path)
    server.status = 503
    failure(tmp_path, f"{server.url}/{SMALL}.zip: .*503.*NCF_MOVIELENS_URL.*`ncf prepare path/to/{SMALL}.zip`")
    server.status = 200
    fetch(SMALL, tmp_path)
    assert server.log[-1][1] == "bytes=200000-"


def test_a_redirect_is_followed(server, tmp_path):
    server.location = server.url + "/moved"
    break_off(server, tmp_path)
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE
    assert server.log[-1] == (f"/moved/{SMALL}.zip", "bytes=200000-")


@pytest.mark.parametrize("location", ["ftp://127.0.0.1", "file:///etc"])
def test_a_redirect_away_from_http(server, tmp_path, location):
    server.location = location
    failure(tmp_path, f"cannot download {server.url}/{SMALL}.zip.md5: .*{location}")


@pytest.mark.parametrize("url", ["file:///tmp", "ftp://example.org", "/tmp", "files.grouplens.org", "http:"])
def test_an_address_that_is_not_http(tmp_path, monkeypatch, url):
    monkeypatch.setenv("NCF_MOVIELENS_URL", url)
    failure(tmp_path, f"{url}/{SMALL}.zip: NCF_MOVIELENS_URL must begin with https://")


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:port", "http://a b", "http://" + "x" * 70])
def test_a_nonsense_address(server, tmp_path, monkeypatch, url):
    monkeypatch.setenv("NCF_MOVIELENS_URL", url)
    assert url in failure(tmp_path, "cannot download")


def test_no_network(server, tmp_path, monkeypatch):
    def lookup(*_args, **_options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.delenv("NCF_MOVIELENS_URL")
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    failure(tmp_path, r"files\.grouplens\.org/datasets/movielens/.*: Temporary failure in name resolution")


def test_no_answer(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    server.cut_at, server.stall = 1000, 1
    failure(tmp_path, "broke off: timed out", RunError)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("NCF_MOVIELENS_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        failure(tmp_path, "cannot download .*timed out")


def test_an_expired_certificate(server, tmp_path, monkeypatch):
    def connect(*_args, **_options):
        raise ssl.SSLCertVerificationError(1, "certificate verify failed: certificate has expired")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setenv("NCF_MOVIELENS_URL", "https://127.0.0.1")
    failure(tmp_path, "certificate has expired")


def test_a_full_disk_keeps_the_part(server, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
    try:
        failure(tmp_path, f"cannot write .*{SMALL}.zip.part: File too large; make room", RunError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fetch(SMALL, tmp_path).read_bytes() == ARCHIVE
    assert server.log[-1][1] is not None


def test_an_unwritable_folder(server, tmp_path):
    (tmp_path / "file").touch()
    failure(tmp_path / "file", "file cannot be written")


def test_two_at_a_time(server, tmp_path):
    """A second process is turned away while the first one writes."""
    server.cut_at, server.stall = 100_000, 1
    code = f"from ncf.ingest.download import fetch; fetch({SMALL!r}, {str(tmp_path)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    part = tmp_path / f"{SMALL}.zip.part"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as first:
        while first.poll() is None and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        failure(tmp_path, f"in use by another download of {SMALL}")
        assert "RunError" in first.communicate()[1].decode()
    assert part.read_bytes() == ARCHIVE[:100_000]


def test_an_archive_that_lies_there(server, tmp_path, monkeypatch):
    path = tmp_path / "ml-1m.zip"
    path.write_bytes(ARCHIVE)
    found = hashlib.md5(ARCHIVE).hexdigest()
    failure(tmp_path, f"{path}.*{found}, not {download.MD5['ml-1m']}.*delete it to download", name="ml-1m")
    assert path.read_bytes() == ARCHIVE
    monkeypatch.setitem(download.MD5, "ml-1m", found)
    assert fetch("ml-1m", tmp_path) == path
    assert server.log == []
