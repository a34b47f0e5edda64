import hashlib
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(tmp_path, monkeypatch, tiny_log):
    """A server of one small archive in the form of ml-latest-small's, and its published checksum."""
    folder = tmp_path / "server"
    folder.mkdir()
    archive = folder / "ml-latest-small.zip"
    with zipfile.ZipFile(archive, "w") as file:
        rows = tiny_log.read_text().replace("timestamp", "rating,timestamp", 1).splitlines()
        ratings = [rows[0], *(",4.0,".join(row.rsplit(",", 1)) for row in rows[1:])]
        file.writestr("ml-latest-small/ratings.csv", "\r\n".join(ratings) + "\r\n")
        titles = "".join(f'{item},"Film, the {item}th (1999)",Comedy\r\n' for item in range(60))
        file.writestr("ml-latest-small/movies.csv", "movieId,title,genres\r\n" + titles)
    (folder / "ml-latest-small.zip.md5").write_text(hashlib.md5(archive.read_bytes()).hexdigest())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("NCF_MOVIELENS_URL", f"http://127.0.0.1:{server.server_port}")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.usefixtures("mirror")
def test_a_data_set_by_name(ncf, tmp_path):
    status, out, err = ncf("prepare", "ml-latest-small", "--min-ratings", 1)
    assert (status, err) == (0, "")
    assert "titles:                      60 of 60 items" in out
    assert str(tmp_path) not in (tmp_path / "data" / "ml-latest-small" / "dataset.json").read_text()
    assert (tmp_path / "data" / "downloads" / "ml-latest-small.zip").exists()
    status, _, err = ncf("prepare", "ml-latest-small", "--min-ratings", 1)
    assert status == 2
    assert "--overwrite" in err


def test_a_wrong_checksum_and_the_way_round_it(ncf, mirror, tmp_path):
    (mirror / "ml-latest-small.zip.md5").write_text("0" * 32)
    status, out, err = ncf("prepare", "ml-latest-small", "--min-ratings", 1)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "0" * 32 in err
    assert not (tmp_path / "data" / "ml-latest-small").exists()
    status, out, _ = ncf("prepare", mirror / "ml-latest-small.zip", "-o", "local", "--min-ratings", 1)
    assert status == 0
    assert "users:                       40" in out


def test_no_server_at_all(ncf, monkeypatch):
    monkeypatch.setenv("NCF_MOVIELENS_URL", "http://127.0.0.1:9")
    status, out, err = ncf("prepare", "ml-1m")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "http://127.0.0.1:9" in err
    assert "ncf prepare" in err
