"""A run's directory: whole, self-contained, and readable by versions with other options."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.errors import InputError, RunError
from ncf.options import option
from ncf.runs import run as run_module
from ncf.runs.run import BEST, CONFIG, LAST, RunDirectory, run_fingerprint
from ncf.runs.start import check_free, start_run

SMALL = TrainConfig(factors=4, layers=(8, 4), epochs=3)
TABLES = ("users", "items", "train", "heldout", "seen")


def new_run(
    path: Path, dataset: Dataset, config: TrainConfig = SMALL, *, resume: bool = False, overwrite: bool = False
) -> RunDirectory:
    return start_run(path, config, dataset, resume=resume, overwrite=overwrite)


@pytest.fixture
def run(tmp_path: Path, tiny: Dataset) -> RunDirectory:
    run = new_run(tmp_path, tiny)
    run.save(BEST, run.new_model().state_dict(), {"epoch": 2})
    return run


def edit_config(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / CONFIG).read_text())
    edit(content)
    (path / CONFIG).write_text(json.dumps(content))


def test_a_run_stands_alone(run: RunDirectory, tmp_path: Path, tiny: Dataset) -> None:
    opened = RunDirectory.open(tmp_path)
    assert opened.config == SMALL
    assert opened.dataset.fingerprint == tiny.fingerprint
    assert opened.dataset.name == "tiny"
    model, state = opened.load_model(BEST)
    assert state == {"epoch": 2}
    for ours, theirs in zip(model.parameters(), run.new_model().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_dataset_of_a_run_is_a_dataset(run: RunDirectory, tmp_path: Path, tiny: Dataset) -> None:
    inside = Dataset.load(tmp_path / "dataset")
    assert inside.fingerprint == tiny.fingerprint
    again = new_run_in(tmp_path / "again", inside)
    assert RunDirectory.open(again).dataset.fingerprint == tiny.fingerprint


def new_run_in(path: Path, dataset: Dataset) -> Path:
    path.mkdir()
    new_run(path, dataset)
    return path


def test_a_dataset_on_disk_is_linked_and_one_that_was_replaced_is_written(tmp_path: Path, tiny: Dataset) -> None:
    tiny.save(tmp_path / "data")
    loaded = Dataset.load(tmp_path / "data")
    linked = new_run_in(tmp_path / "linked", loaded)
    assert (linked / "dataset" / "train.parquet").samefile(tmp_path / "data" / "train.parquet")
    dataclasses.replace(tiny, seed=9).save(tmp_path / "data", overwrite=True)
    for path in (linked, new_run_in(tmp_path / "written", loaded)):
        assert RunDirectory.open(path).dataset.fingerprint == tiny.fingerprint


def test_where_files_cannot_be_linked_they_are_copied(
    tmp_path: Path, tiny: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr("os.link", no_link)
    tiny.save(tmp_path / "data")
    path = new_run_in(tmp_path / "run", Dataset.load(tmp_path / "data"))
    assert RunDirectory.open(path).dataset.fingerprint == tiny.fingerprint


def test_a_run_may_be_overwritten_by_one_on_its_own_dataset(run: RunDirectory, tmp_path: Path, tiny: Dataset) -> None:
    inside = Dataset.load(tmp_path / "dataset")
    assert not new_run(tmp_path, inside, overwrite=True).has(BEST)
    assert RunDirectory.open(tmp_path).dataset.fingerprint == tiny.fingerprint


def test_negatives_titles_and_dropped_pairs_travel_too(tmp_path: Path, make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(
        [[0, 1, 2], [1, 2, 3]],
        6,
        negatives=torch.tensor([[4, 5], [0, -1]], dtype=torch.int32),
        dropped_users=torch.tensor([1], dtype=torch.int32),
        dropped_items=torch.tensor([5], dtype=torch.int32),
        seed=3,
    )
    new_run(tmp_path, dataset)
    assert RunDirectory.open(tmp_path).dataset.fingerprint == dataset.fingerprint


def test_nothing_is_left_beside_the_files(run: RunDirectory, tmp_path: Path) -> None:
    assert {file.name for file in tmp_path.iterdir()} == {CONFIG, "dataset", "best.safetensors"}
    assert {file.name for file in (tmp_path / "dataset").iterdir()} == {
        "dataset.json",
        *(f"{t}.parquet" for t in TABLES),
    }


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("name", ["best.safetensors", CONFIG, *(f"dataset/{table}.parquet" for table in TABLES)])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing"])
def test_damage_is_named(run: RunDirectory, tmp_path: Path, name: str, damage: str) -> None:
    file = tmp_path / name
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    with pytest.raises(InputError, match=f"{name}|holds no run"):
        RunDirectory.open(tmp_path).load_model(BEST)


def test_a_weight_that_changed_is_noticed(run: RunDirectory, tmp_path: Path) -> None:
    content = bytearray((tmp_path / "best.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "best.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="checksum"):
        RunDirectory.open(tmp_path).load_model(BEST)


def test_a_dataset_of_a_run_that_changed_is_noticed(run: RunDirectory, tmp_path: Path, tiny: Dataset) -> None:
    other = dataclasses.replace(tiny, item_ids=tiny.item_ids + 1)
    other.save(tmp_path / "other")
    tables = [tmp_path / name / "items.parquet" for name in ("dataset", "other")]
    tables[0].unlink()
    tables[1].rename(tables[0])
    with pytest.raises(InputError, match="another dataset.*train the run"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update(format=1), "format 1, and ncf .* reads 2"),
        (lambda content: content["options"].update(seed=9), "two runs, or were changed"),
        (lambda content: content["options"].update(dropout=7), "--dropout"),
        (lambda content: content.pop("options"), "damaged: it lacks 'options'"),
        (lambda content: content.update(run="0"), "two runs, or were changed"),
    ],
)
def test_a_config_that_does_not_fit(run: RunDirectory, tmp_path: Path, edit: Callable[..., Any], message: str) -> None:
    edit_config(tmp_path, edit)
    with pytest.raises(InputError, match=message):
        RunDirectory.open(tmp_path)


def test_an_option_of_a_later_version_names_that_version(run: RunDirectory, tmp_path: Path) -> None:
    edit_config(tmp_path, lambda content: (content.update(ncf="9.9"), content["options"].update(attention=3)))
    with pytest.raises(InputError, match=r"does not know \(attention\): it was written by ncf 9.9"):
        RunDirectory.open(tmp_path)


@dataclasses.dataclass(frozen=True)
class LaterConfig(TrainConfig):
    """TrainConfig of a version with one more option."""

    attention: int = option("model", 0, "heads; 0 is off", low=0)


def test_a_new_option_leaves_earlier_runs_readable(
    run: RunDirectory, tmp_path: Path, tiny: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line in the option class is all that a new option takes: here a copy with one more opens this run."""
    monkeypatch.setattr(run_module, "TrainConfig", LaterConfig)
    opened = RunDirectory.open(tmp_path)
    assert opened.config == LaterConfig(factors=4, layers=(8, 4), epochs=3)
    assert opened.load_model(BEST)[1] == {"epoch": 2}
    assert run_fingerprint(LaterConfig(), tiny) == run_fingerprint(TrainConfig(), tiny)
    assert run_fingerprint(LaterConfig(attention=2), tiny) != run_fingerprint(TrainConfig(), tiny)


def test_files_of_two_runs_do_not_mix(run: RunDirectory, tmp_path: Path, tiny: Dataset, planted: Dataset) -> None:
    (tmp_path / "seed").mkdir()
    second = new_run(tmp_path / "seed", tiny, dataclasses.replace(SMALL, seed=1))
    second.save(BEST, second.new_model().state_dict(), {})
    shutil.copy(tmp_path / "seed" / "best.safetensors", tmp_path)
    with pytest.raises(InputError, match="another run"):
        RunDirectory.open(tmp_path).load_model(BEST)
    other = new_run_in(tmp_path / "planted", planted)
    shutil.rmtree(tmp_path / "dataset")
    shutil.copytree(other / "dataset", tmp_path / "dataset")
    with pytest.raises(InputError, match="two runs"):
        RunDirectory.open(tmp_path)


def test_weights_of_other_shapes_are_refused(run: RunDirectory, tmp_path: Path) -> None:
    tensors, _ = run.load(BEST)
    tensors["item_embedding"] = tensors["item_embedding"][:5]
    run.save(BEST, tensors, {})
    with pytest.raises(InputError, match="item_embedding"):
        RunDirectory.open(tmp_path).load_model(BEST)


def test_an_existing_run_is_kept_unless_told_otherwise(run: RunDirectory, tmp_path: Path, tiny: Dataset) -> None:
    with pytest.raises(InputError, match="--resume.*--overwrite"):
        new_run(tmp_path, tiny)
    (tmp_path / "metrics.jsonl").touch()
    assert new_run(tmp_path, tiny, resume=True).has(BEST)
    assert not new_run(tmp_path, tiny, overwrite=True).has(BEST)


@pytest.mark.parametrize("deleted", range(5))
def test_a_run_whose_overwriting_was_killed_can_be_overwritten(
    run: RunDirectory, tmp_path: Path, tiny: Dataset, deleted: int
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "events.out.tfevents.1").touch()
    files = check_free(tmp_path, overwrite=True)
    assert len(files) == 4
    for file in files[:deleted]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert not new_run(tmp_path, tiny, overwrite=True).has(BEST)


def test_a_run_that_was_killed_while_it_began_can_be_started_again(tmp_path: Path, tiny: Dataset) -> None:
    new_run(tmp_path, tiny)
    (tmp_path / CONFIG).unlink()
    (tmp_path / ".dataset-1234").mkdir()
    new_run(tmp_path, tiny)
    assert {file.name for file in tmp_path.iterdir()} == {CONFIG, "dataset"}


def test_what_a_killed_process_was_writing_goes_when_its_run_is_resumed(
    run: RunDirectory, tmp_path: Path, tiny: Dataset
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / ".last.safetensors.77.tmp").write_bytes(b"half")
    new_run(tmp_path, tiny, resume=True)
    assert not (tmp_path / ".last.safetensors.77.tmp").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "dataset"])
def test_a_directory_with_something_else_is_never_touched(tmp_path: Path, tiny: Dataset, name: str) -> None:
    (tmp_path / name).write_text("years of work")
    with pytest.raises(InputError, match=name):
        new_run(tmp_path, tiny, overwrite=True)
    assert (tmp_path / name).read_text() == "years of work"


def test_resume_may_change_epochs_and_nothing_that_defines_the_run(
    run: RunDirectory, tmp_path: Path, tiny: Dataset, planted: Dataset
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    longer = dataclasses.replace(SMALL, epochs=9, patience=2, target=0.5)
    new_run(tmp_path, tiny, longer, resume=True)
    assert RunDirectory.open(tmp_path).config == longer
    with pytest.raises(InputError, match="--seed.*has 0, got 1"):
        new_run(tmp_path, tiny, dataclasses.replace(SMALL, seed=1), resume=True)
    with pytest.raises(InputError, match="another dataset"):
        new_run(tmp_path, planted, resume=True)


def test_a_write_that_fails_leaves_the_old_file_whole(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tmp_path / "best.safetensors").read_bytes()

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "write_weights", fail)
    with pytest.raises(RunError, match="No space left"):
        run.save(BEST, run.new_model().state_dict(), {"epoch": 3})
    assert (tmp_path / "best.safetensors").read_bytes() == before
    test_nothing_is_left_beside_the_files(run, tmp_path)


def test_last_is_missing_before_the_first_epoch(run: RunDirectory) -> None:
    with pytest.raises(InputError, match="before its first epoch"):
        run.load(LAST)
