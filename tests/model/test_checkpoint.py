import dataclasses
import json

import pytest
import torch

from ncf.config import TrainConfig
from ncf.errors import InputError, RunError
from ncf.model.checkpoint import BEST, CONFIG, LAST, Run
from ncf.model.start import check_free, start_run

CONFIG_SMALL = TrainConfig(factors=4, layers=(8, 4), epochs=3)


@pytest.fixture
def run(tmp_path, tiny):
    run = start_run(tmp_path, CONFIG_SMALL, tiny, resume=False, overwrite=False)
    run.save(BEST, run.new_model().state_dict(), {"epoch": 2})
    return run


def test_a_run_stands_alone(run, tmp_path, tiny):
    opened = Run.open(tmp_path)
    assert opened.config == CONFIG_SMALL
    assert opened.dataset.fingerprint == tiny.fingerprint
    assert opened.dataset.name == "tiny"
    model, state = opened.load_model(BEST)
    assert state == {"epoch": 2}
    for ours, theirs in zip(model.parameters(), run.new_model().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_negatives_titles_and_dropped_pairs_travel_too(tmp_path, make_dataset):
    dataset = make_dataset(
        [[0, 1, 2], [1, 2, 3]],
        6,
        negatives=torch.tensor([[4, 5], [0, -1]], dtype=torch.int32),
        dropped_users=torch.tensor([1], dtype=torch.int32),
        dropped_items=torch.tensor([5], dtype=torch.int32),
        seed=3,
    )
    start_run(tmp_path, CONFIG_SMALL, dataset, resume=False, overwrite=False)
    assert Run.open(tmp_path).dataset.fingerprint == dataset.fingerprint


def test_nothing_is_left_beside_the_files(run, tmp_path):
    expected = {CONFIG, "users.parquet", "items.parquet", "seen.parquet", "best.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == expected


def test_no_run_there(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no run"):
        Run.open(tmp_path)


@pytest.mark.parametrize("name", ["best.safetensors", "users.parquet", "items.parquet", "seen.parquet", CONFIG])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing"])
def test_damage_is_named(run, tmp_path, name, damage):
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    with pytest.raises(InputError, match=f"{name}|holds no run"):
        Run.open(tmp_path).load_model(BEST)


def test_an_edited_weight_is_noticed(run, tmp_path):
    file = tmp_path / "best.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="checksum"):
        Run.open(tmp_path).load_model(BEST)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda content: content.update(format=99), "format 99"),
        (lambda content: content["options"].update(seed=9), "was changed since training"),
        (lambda content: content["options"].update(extra=9), "not those of this version of ncf: unknown .'extra'"),
        (lambda content: content["options"].update(dropout=7), "--dropout"),
        (lambda content: content["dataset"].update(fingerprint="0"), "were changed since training"),
        (lambda content: content.pop("dataset"), "damaged"),
        (lambda content: content.update(run="0"), "another run"),
    ],
)
def test_an_edited_config_is_noticed(run, tmp_path, edit, message):
    content = json.loads((tmp_path / CONFIG).read_text())
    edit(content)
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        Run.open(tmp_path)


def test_files_of_two_runs_do_not_mix(run, tmp_path, tiny):
    other = tmp_path / "other"
    other.mkdir()
    second = start_run(other, dataclasses.replace(CONFIG_SMALL, seed=1), tiny, resume=False, overwrite=False)
    second.save(BEST, second.new_model().state_dict(), {})
    (other / "best.safetensors").replace(tmp_path / "best.safetensors")
    with pytest.raises(InputError, match="another run"):
        Run.open(tmp_path).load_model(BEST)


def test_weights_of_other_shapes_are_refused(run, tmp_path):
    tensors, _ = run.load(BEST)
    tensors["item_embedding"] = tensors["item_embedding"][:5]
    run.save(BEST, tensors, {})
    with pytest.raises(InputError, match="item_embedding"):
        Run.open(tmp_path).load_model(BEST)


def test_an_existing_run_is_kept_unless_told_otherwise(run, tmp_path, tiny):
    with pytest.raises(InputError, match="--resume.*--overwrite"):
        start_run(tmp_path, CONFIG_SMALL, tiny, resume=False, overwrite=False)
    (tmp_path / "metrics.jsonl").touch()
    assert start_run(tmp_path, CONFIG_SMALL, tiny, resume=True, overwrite=False).has(BEST)
    assert not start_run(tmp_path, CONFIG_SMALL, tiny, resume=False, overwrite=True).has(BEST)


@pytest.mark.parametrize("deleted", range(7))
def test_a_run_whose_overwriting_was_killed_can_be_overwritten(run, tmp_path, tiny, deleted):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "events.out.tfevents.1").touch()
    files = check_free(tmp_path, overwrite=True)
    assert len(files) == 6
    for file in files[:deleted]:
        file.unlink()
    assert not start_run(tmp_path, CONFIG_SMALL, tiny, resume=False, overwrite=True).has(BEST)


def test_what_a_killed_process_was_writing_goes_when_its_run_is_resumed(run, tmp_path, tiny):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / ".last.safetensors.77.tmp").write_bytes(b"half")
    start_run(tmp_path, CONFIG_SMALL, tiny, resume=True, overwrite=False)
    assert not (tmp_path / ".last.safetensors.77.tmp").exists()


def test_a_directory_with_something_else_is_never_touched(tmp_path, tiny):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="thesis.tex"):
        start_run(tmp_path, CONFIG_SMALL, tiny, resume=False, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_resume_may_change_epochs_and_nothing_that_defines_the_run(run, tmp_path, tiny, planted):
    (tmp_path / "metrics.jsonl").touch()
    longer = dataclasses.replace(CONFIG_SMALL, epochs=9, patience=2, target=0.5)
    start_run(tmp_path, longer, tiny, resume=True, overwrite=False)
    assert Run.open(tmp_path).config == longer
    with pytest.raises(InputError, match="--seed.*has 0, got 1"):
        start_run(tmp_path, dataclasses.replace(CONFIG_SMALL, seed=1), tiny, resume=True, overwrite=False)
    with pytest.raises(InputError, match="another dataset"):
        start_run(tmp_path, CONFIG_SMALL, planted, resume=True, overwrite=False)


def test_a_write_that_fails_leaves_the_old_file_whole(run, tmp_path, monkeypatch):
    before = (tmp_path / "best.safetensors").read_bytes()

    def fail(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ncf.model.checkpoint.write_weights", fail)
    with pytest.raises(RunError, match="No space left"):
        run.save(BEST, run.new_model().state_dict(), {"epoch": 3})
    assert (tmp_path / "best.safetensors").read_bytes() == before
    test_nothing_is_left_beside_the_files(run, tmp_path)


def test_last_is_missing_before_the_first_epoch(run):
    with pytest.raises(InputError, match="before its first epoch"):
        run.load(LAST)
