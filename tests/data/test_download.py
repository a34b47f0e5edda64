import hashlib
import io
import os
import random
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ncf.data import download
from ncf.data.download import NAMES, fetch
from ncf.errors import InputError, RunError

SMALL = "ml-latest-small"


def make_archive(seed):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{SMALL}/ratings.csv", random.Random(seed).randbytes(600_000))
    return buffer.getvalue()


class Server(ThreadingHTTPServer):
    """What GroupLens's server does, and what else a server may do."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.archive = make_archive(0)
        self.md5 = f"MD5 ({SMALL}.zip) = {hashlib.md5(self.archive).hexdigest()}\n"
        self.validators = {"ETag": '"v1"', "Last-Modified": "Fri, 01 Jan 2016 00:00:00 GMT"}
        self.ranges = True  # whether Range is understood
        self.range_shift = 0  # a server that answers with another range
        self.length = True  # whether it tells the length
        self.cut_at = None  # bytes of the body after which it hangs up
        self.stall = threading.Event()  # set: it never sends the rest instead
        self.status = 200
        self.location = None
        self.log = []  # (path, Range, If-Range)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.log.append((self.path, self.headers["Range"], self.headers["If-Range"]))
        if server.location and not self.path.startswith("/moved"):
            self.answer(301, b"", {"Location": server.location + self.path})
        elif self.path.endswith(".md5"):
            self.answer(200, server.md5.encode())
        elif server.status != 200:
            self.answer(server.status, b"sorry")
        else:
            self.send_archive()

    def send_archive(self):
        server, body = self.server, self.server.archive
        begin = int(self.headers["Range"][6:-1]) if self.headers["Range"] and server.ranges else 0
        if self.headers["If-Range"] not in (None, *server.validators.values()):
            begin = 0
        headers = dict(server.validators)
        if begin >= len(body):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        elif begin:
            begin += server.range_shift
            self.answer(206, body[begin:], headers | {"Content-Range": f"bytes {begin}-{len(body) - 1}/{len(body)}"})
        else:
            self.answer(200, body, headers)

    def answer(self, status, body, headers=None):
        server = self.server
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut_at] if status in (200, 206) and not self.path.endswith(".md5") else body)
        self.wfile.flush()
        if server.stall.is_set():
            time.sleep(1)


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("NCF_MOVIELENS_URL", raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def failure(server, tmp_path):
    """Call fetch, check that it fails in one line that gives address and way out, and return that line."""

    def call(kind=InputError, name=SMALL, **options):
        with pytest.raises(kind) as caught:
            fetch(name, tmp_path, **{"base_url": server.url} | options)
        text = str(caught.value)
        assert "\n" not in text
        return text

    return call


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut_off(server, failure, at=200_000):
    server.cut_at = at
    text = failure(RunError)
    server.cut_at = None
    server.log.clear()
    return text


def test_download_verify_and_use_again(server, tmp_path, capsys):
    path = fetch(SMALL, tmp_path / "new" / "folder", base_url=server.url + "/", progress=True)
    assert path == tmp_path / "new" / "folder" / f"{SMALL}.zip"
    assert path.read_bytes() == server.archive
    assert names(path.parent) == [path.name]
    assert f"{SMALL}.zip: 100%" in capsys.readouterr().err
    assert [request[0] for request in server.log] == [f"/{SMALL}.zip.md5", f"/{SMALL}.zip"]
    server.log.clear()
    assert fetch(SMALL, path.parent, base_url=server.url) == path
    assert server.log == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", sorted(set(NAMES) - {SMALL}))
def test_pinned_checksum_needs_no_published_one(server, tmp_path, monkeypatch, name):
    assert re.fullmatch("[0-9a-f]{32}", download.MD5[name])
    monkeypatch.setitem(download.MD5, name, hashlib.md5(server.archive).hexdigest())
    monkeypatch.setenv("NCF_MOVIELENS_URL", server.url)
    assert fetch(name, tmp_path).read_bytes() == server.archive
    assert [request[0] for request in server.log] == [f"/{name}.zip"]


def test_checksums_known_from_elsewhere():
    assert download.MD5["ml-1m"] == "c4d9eecfca2ab87c1945afe126590906"
    assert download.MD5["ml-20m"] == "cd245b17a1ae2cc31bb14903e1204af3"


def test_default_address():
    assert download.DEFAULT_URL == "https://files.grouplens.org/datasets/movielens"


def test_md5_file_of_md5sum_is_read_too(server, tmp_path):
    server.md5 = f"{hashlib.md5(server.archive).hexdigest().upper()}  {SMALL}.zip\n"
    assert fetch(SMALL, tmp_path, base_url=server.url).exists()


def test_unknown_name(failure):
    assert failure(name="ml-2m") == f"unknown data set 'ml-2m': choose one of {', '.join(NAMES)}"


def test_cut_off_keeps_the_part_and_goes_on(server, failure, tmp_path, capsys):
    text = cut_off(server, failure)
    part = tmp_path / f"{SMALL}.zip.part"
    assert f"{server.url}/{SMALL}.zip was cut off at 200000 of {len(server.archive)} bytes" in text
    assert f"{part} keeps them; run again to go on from there" in text
    assert part.read_bytes() == server.archive[:200_000]
    path = fetch(SMALL, tmp_path, base_url=server.url, progress=True)
    assert server.log[-1] == (f"/{SMALL}.zip", "bytes=200000-", '"v1"')
    assert path.read_bytes() == server.archive
    assert names(tmp_path) == [path.name]
    assert "100%" in capsys.readouterr().err


def test_cut_off_again_and_again(server, failure, tmp_path):
    for at in (100_000, 200_000, 200_000):
        cut_off(server, failure, at)
    assert (tmp_path / f"{SMALL}.zip.part").stat().st_size == 500_000
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive


@pytest.mark.parametrize(
    ("validators", "sent"),
    [
        ({"ETag": 'W/"1"', "Last-Modified": "Fri, 01 Jan 2016 00:00:00 GMT"}, "Fri, 01 Jan 2016 00:00:00 GMT"),
        ({}, None),
    ],
)
def test_resume_without_a_strong_etag(server, failure, tmp_path, validators, sent):
    server.validators = validators
    cut_off(server, failure)
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert server.log[-1] == (f"/{SMALL}.zip", "bytes=200000-", sent)


def test_changed_file_restarts(server, failure, tmp_path):
    cut_off(server, failure)
    server.archive = make_archive(1)
    server.md5 = hashlib.md5(server.archive).hexdigest()
    server.validators = {"ETag": '"v2"'}
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert [request[1] for request in server.log] == [None, "bytes=200000-"]
    assert names(tmp_path) == [f"{SMALL}.zip"]


def test_changed_file_cut_off_again_goes_on_with_the_new_one(server, failure, tmp_path):
    cut_off(server, failure)
    server.archive = make_archive(1)
    server.md5 = hashlib.md5(server.archive).hexdigest()
    server.validators = {"ETag": '"v2"'}
    cut_off(server, failure, 150_000)
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert server.log[-1] == (f"/{SMALL}.zip", "bytes=150000-", '"v2"')


def test_server_that_ignores_range(server, failure, tmp_path):
    cut_off(server, failure)
    server.ranges = False
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive


def test_server_that_answers_another_range(server, failure, tmp_path):
    cut_off(server, failure)
    server.range_shift = 1
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert [request[1] for request in server.log] == [None, "bytes=200000-", None]


def test_part_that_is_whole_already(server, tmp_path):
    (tmp_path / f"{SMALL}.zip.part").write_bytes(server.archive)
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert len(server.log) == 2
    assert names(tmp_path) == [f"{SMALL}.zip"]


def test_part_that_is_too_long(server, tmp_path):
    (tmp_path / f"{SMALL}.zip.part").write_bytes(server.archive + b"more")
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive


def test_unknown_length(server, tmp_path):
    server.length = False
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive


def test_wrong_content(server, failure, tmp_path):
    server.archive = b"<html>Please log in to this network</html>"
    found, expected = hashlib.md5(server.archive).hexdigest(), server.md5.split()[-1]
    text = failure()
    assert text.startswith(f"wrong checksum of {tmp_path / SMALL}.zip.part, downloaded from {server.url}/{SMALL}.zip:")
    assert f"its MD5 is {found}, not {expected}" in text
    assert f"`ncf prepare path/to/{SMALL}.zip`" in text
    assert names(tmp_path) == []


def test_part_of_something_else(server, failure, tmp_path):
    (tmp_path / f"{SMALL}.zip.part").write_bytes(b"x" * 1000)
    assert "wrong checksum" in failure()
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive


def test_no_md5_published(server, failure, tmp_path):
    server.md5 = "<html></html>"
    assert f"cannot download {server.url}/{SMALL}.zip.md5 (there is no MD5 in the answer)" in failure()
    assert names(tmp_path) == []


def test_not_found(server, failure, tmp_path):
    server.status = 404
    text = failure()
    assert text.startswith(f"cannot download {server.url}/{SMALL}.zip (the server answers 404 Not Found): ")
    assert "NCF_MOVIELENS_URL" in text
    assert f"`ncf prepare path/to/{SMALL}.zip`" in text
    assert names(tmp_path) == []


def test_failure_keeps_the_part(server, failure, tmp_path):
    cut_off(server, failure)
    server.status = 503
    assert "503" in failure()
    server.status = 200
    assert (tmp_path / f"{SMALL}.zip.part").stat().st_size == 200_000
    fetch(SMALL, tmp_path, base_url=server.url)
    assert server.log[-1][1] == "bytes=200000-"


def test_redirect(server, failure, tmp_path):
    server.location = server.url + "/moved"
    cut_off(server, failure)
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert server.log[-1] == (f"/moved/{SMALL}.zip", "bytes=200000-", '"v1"')


@pytest.mark.parametrize("location", ["ftp://127.0.0.1", "file:///etc"])
def test_redirect_away_from_http(server, failure, location):
    server.location = location
    assert f"cannot download {server.url}/{SMALL}.zip.md5 (" in failure()


@pytest.mark.parametrize("url", ["file:///tmp", "ftp://example.org", "/tmp", "files.grouplens.org", "http:"])
def test_only_http(failure, url):
    assert f"cannot download {url}/{SMALL}.zip: NCF_MOVIELENS_URL must be an address" in failure(base_url=url)


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:port", "http://a b", "http://" + "x" * 70])
def test_nonsense_address(failure, url):
    assert f"cannot download {url}" in failure(base_url=url)


def test_refused(failure):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert f"cannot download {url}/{SMALL}.zip.md5 (Connection refused): " in failure(base_url=url)


def test_no_network(failure, monkeypatch):
    def lookup(*_args, **_options):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    text = failure(base_url="https://files.grouplens.org/datasets/movielens")
    assert "(no network, or no such host: Temporary failure in name resolution)" in text


def test_no_answer(server, failure, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "(no answer within 0.1 s)" in failure(base_url=url)
    server.cut_at = 1000
    server.stall.set()
    text = failure(RunError)
    assert f"cut off at 1000 of {len(server.archive)} bytes (no answer within 0.1 s)" in text


def test_expired_certificate(failure, monkeypatch):
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "certificate has expired"

    def connect(*_args, **_options):
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "(its TLS certificate is not valid: certificate has expired)" in failure(base_url="https://127.0.0.1")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_untrusted_certificate(server, failure, tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "cert")]
    subprocess.run([*made, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    server.handle_error = lambda *_: None
    server.socket = context.wrap_socket(server.socket, server_side=True)
    text = failure(base_url=f"https://localhost:{server.server_port}")
    assert "(its TLS certificate is not valid: self" in text


def test_full_disk_keeps_the_part(server, failure, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
    try:
        text = failure(RunError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot write {tmp_path / SMALL}.zip.part (File too large): what arrived is kept; make room" in text
    kept = (tmp_path / f"{SMALL}.zip.part").stat().st_size
    assert 0 < kept <= 400_000
    assert fetch(SMALL, tmp_path, base_url=server.url).read_bytes() == server.archive
    assert server.log[-1][1] == f"bytes={kept}-"


def test_unwritable_folder(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/ml-1m\.zip\.part .*: name a folder"):
        fetch("ml-1m", tmp_path / "file", base_url=server.url)


def test_two_at_a_time(server, failure, tmp_path):
    """A second process is turned away while the first one writes, and the first one's archive is whole."""
    server.cut_at = 100_000
    server.stall.set()
    code = f"from ncf.data.download import fetch; fetch({SMALL!r}, {str(tmp_path)!r}, base_url={server.url!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    part = tmp_path / f"{SMALL}.zip.part"
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as first:
        while first.poll() is None and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        assert f"another process is downloading {part}" in failure()
        assert "RunError" in first.communicate()[1].decode()
    assert part.read_bytes() == server.archive[:100_000]


def test_part_that_was_moved_before_it_was_locked(tmp_path):
    part = tmp_path / "a.part"
    with part.open("a+b") as file:
        part.rename(tmp_path / "a")
        assert not download._lock(file, part)
        part.touch()
        assert not download._lock(file, part)
    with part.open("a+b") as file:
        assert download._lock(file, part)


def test_local_archive_with_a_pinned_checksum(server, failure, tmp_path, monkeypatch):
    path = tmp_path / "ml-1m.zip"
    path.write_bytes(server.archive)
    found = hashlib.md5(server.archive).hexdigest()
    text = failure(name="ml-1m")
    assert f"wrong checksum of {path}: its MD5 is {found}, not {download.MD5['ml-1m']}" in text
    assert "`ncf prepare path/to/ml-1m.zip`" in text
    assert path.read_bytes() == server.archive
    monkeypatch.setitem(download.MD5, "ml-1m", found)
    assert fetch("ml-1m", tmp_path, base_url=server.url) == path
    assert server.log == []


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "a folder"])
def test_damaged_local_archive_without_a_checksum(server, failure, tmp_path, damage):
    path = tmp_path / f"{SMALL}.zip"
    content = bytearray(server.archive)
    if damage == "a folder":
        path.mkdir()
    else:
        content[300_000] ^= 1
        path.write_bytes({"empty": b"", "cut": server.archive[:-30], "flipped": bytes(content)}[damage])
    text = failure()
    assert str(path) in text
    assert "delete it to download it anew" in text
    assert path.exists()
    assert server.log == []
