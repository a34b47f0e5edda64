"""Where a dataset is written: what is there is not overwritten by accident, and a failure leaves it as it was."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ncf.data.dataset import Dataset
from ncf.errors import InputError, RunError
from ncf.files import replace_directory
from ncf.ingest.prepare import prepare

HISTORIES = [[0, 1, 2], [3, 1]]


@pytest.fixture
def saved(tmp_path, make_dataset):
    make_dataset(HISTORIES, 4, seed=5).save(tmp_path / "out")
    return tmp_path / "out"


def test_an_existing_dataset_is_replaced_only_with_overwrite(saved, make_dataset):
    other = make_dataset(HISTORIES, 4, seed=6)
    with pytest.raises(InputError, match=r"is an existing ncf dataset: .*--overwrite"):
        other.save(saved)
    assert Dataset.load(saved).seed == 5
    other.save(saved, overwrite=True)
    assert Dataset.load(saved).seed == 6
    assert [entry.name for entry in saved.parent.iterdir()] == ["out"]


def test_nothing_but_a_dataset_is_ever_replaced(tmp_path, saved, make_dataset):
    (tmp_path / "mine").mkdir()
    make_dataset(HISTORIES, 4, seed=5).save(tmp_path / "mine")  # an empty directory is filled
    (saved / "notes.txt").write_text("precious")
    with pytest.raises(InputError, match=r"also holds 'notes\.txt', which --overwrite would delete"):
        make_dataset(HISTORIES, 4, seed=5).save(saved, overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dataset.json").write_text('{"kind": "of another program"}')
    (tmp_path / "file").write_text("precious")
    for path, match in (
        (tmp_path / "home", "holds other files and is no ncf dataset"),
        (tmp_path / "file", "file is a file, not a directory"),
        (tmp_path / "file" / "below", "file is a file, not a directory"),
    ):
        with pytest.raises(InputError, match=match):
            make_dataset(HISTORIES, 4, seed=5).save(path, overwrite=True)
    assert (saved / "notes.txt").read_text() == (tmp_path / "file").read_text() == "precious"


def test_prepare_refuses_before_it_reads(tmp_path, saved):
    with pytest.raises(InputError, match="existing ncf dataset"):
        prepare(tmp_path / "no log at all.csv", saved)


def test_missing_parents_are_made_and_links_are_followed(tmp_path, saved, make_dataset):
    make_dataset(HISTORIES, 4, seed=5).save(tmp_path / "a" / "b" / "c")
    assert Dataset.load(tmp_path / "a" / "b" / "c").seed == 5
    (tmp_path / "link").symlink_to(saved)
    make_dataset(HISTORIES, 4, seed=6).save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Dataset.load(saved).seed == 6


def test_a_failure_midway_leaves_everything_as_it_was(tmp_path, saved, monkeypatch, make_dataset):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ncf.files.sync", fail)
    with pytest.raises(RunError, match=r"cannot write .*: No space left on device"):
        make_dataset(HISTORIES, 4, seed=6).save(saved, overwrite=True)
    with pytest.raises(RunError, match="No space left"):
        make_dataset(HISTORIES, 4, seed=5).save(tmp_path / "new" / "deep")
    assert Dataset.load(saved).seed == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_old_directory_comes_back_if_the_new_cannot_take_its_name(saved, monkeypatch):
    rename = Path.rename

    def fail(self, target):
        if "-old" not in str(target) and not self.name.endswith("-old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RunError, match="Input/output error"), replace_directory(saved) as folder:
        (folder / "file").write_text("x")
    assert Dataset.load(saved).seed == 5
    assert [entry.name for entry in saved.parent.iterdir()] == ["out"]


LIMITED = """
import resource, sys
from ncf.ingest.prepare import prepare
from ncf.errors import RunError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    prepare(sys.argv[2], sys.argv[3], min_ratings=1)
except RunError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_full_disk(tmp_path, limit):
    rng = np.random.default_rng(0)
    rows = (f"{user},{item}" for user in range(300) for item in rng.choice(10**6, 100, replace=False))
    (tmp_path / "log.csv").write_text("user,item\n" + "\n".join(rows) + "\n")
    command = [sys.executable, "-c", LIMITED, str(limit), str(tmp_path / "log.csv"), str(tmp_path / "new" / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("cannot write ")
    assert done.stdout.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]
