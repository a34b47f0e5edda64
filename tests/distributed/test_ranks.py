"""Three ranks in one launch of `worker.py`; each test looks at a part of what they found."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ncf.data.dataset import Dataset
from ncf.data.parquet import read_parquet, read_parquet_metadata
from ncf.model.checkpoint import BEST, LAST, Run
from ncf.ranking.evaluate import evaluate
from ncf.ranking.exam import make_exam
from ncf.ranking.scoring import NeuralScorer
from ncf.recommender import Recommender
from ncf.training.trainer import Trainer

HISTORIES = {"middle": [5, 22, 5], "first": [22, 5, 5], "few": [6, 6]}  # interactions of each user, two held out
USERS = {"middle": [1, 0, 2], "first": [0, 0, 3], "few": [0, 1, 1]}  # of each of three ranks


@pytest.fixture(scope="module")
def found(data, run, make_dataset, tmp_path_factory):
    import os
    import shutil
    import socket
    import subprocess

    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(run, folder / "run")
    shutil.copytree(run, folder / "stale")
    stale = Run.open(folder / "stale")
    tensors, state = stale.load(BEST)
    stale.save(BEST, tensors, state | {"epoch": 99})
    given = {"negatives": torch.arange(30, 36, dtype=torch.int32).repeat(3, 1)}
    for name, lengths in HISTORIES.items():
        histories = [list(range(user, user + length)) for user, length in enumerate(lengths)]
        make_dataset(histories, 40, name=name, **(given if name == "first" else {})).save(folder / name)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    environ = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("worker.py"), data, folder / "run", folder / "found"]
    processes = [
        subprocess.Popen(list(map(str, command)), env=environ | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        errors = [process.communicate(timeout=80)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 9], errors
    results = [json.loads((folder / f"found.{rank}").read_text()) for rank in range(3)]
    return {"folder": folder, "ranks": results}


def test_the_sum_of_the_ranks_gradients_is_that_of_one_process(found):
    compared = [result["gradients"] for result in found["ranks"]]
    assert [len(one) for one in compared] == [48, 48, 36]
    for one in compared:
        assert max(one.values()) < 1e-10, {key: value for key, value in one.items() if value >= 1e-10}


def test_an_overflow_on_one_rank_skips_the_step_on_all(found):
    for result in found["ranks"]:
        assert result["overflow"] == {"skipped": True, "scale": 65536 / 2, "went_on": True}


def test_a_count_that_fp32_cannot_hold_is_exact(found):
    assert [result["count"] for result in found["ranks"]] == [0, 0, 0]


def test_scores_do_not_depend_on_the_number_of_ranks(found, run):
    one = Run.open(run)
    model, _ = one.load_model(BEST)
    expected = []
    for split in ("test", "validation"):
        for negatives in (12, "all"):
            exam = make_exam(one.dataset, split, negatives)
            expected.append(evaluate(NeuralScorer(model), exam, k=5).to_dict() | {"pairs": exam.pairs})
    assert [one["users"] for one in expected] == [7] * 4
    for result in found["ranks"]:
        assert result["scores of three"] == expected
    assert [result["scores of two"] for result in found["ranks"]] == [expected, expected, None]


def test_every_interaction_is_on_one_rank(found, data):
    whole = Dataset.load(data)
    parts = [result["part"] for result in found["ranks"]]
    assert [first for first, *_ in parts] == [0, *(end for _, end, *_ in parts[:-1])]
    assert parts[-1][1] == 7
    assert sum(n_train for _, _, n_train, *_ in parts) == whole.n_train
    users = [first + user for first, _, _, *users in parts for user in users]
    assert users == whole.train_users.tolist()


def test_a_file_written_by_three_ranks_is_that_of_one(found):
    """Read by three ranks, each its rows, and written by them: the very bytes that one process wrote."""
    folder = found["folder"] / "run"
    assert (folder / "deploy.safetensors").read_bytes() == (folder / "best.safetensors").read_bytes()


def test_tables_copied_by_ranks_are_those_of_one(found, run):
    for name in ("users", "items", "seen"):
        ours, theirs = (read_parquet(path / f"{name}.parquet") for path in (found["folder"] / "copy", run))
        assert list(ours) == list(theirs)
        for key, column in ours.items():
            assert column.dtype == theirs[key].dtype
            assert column.tolist() == theirs[key].tolist()
        marks = [read_parquet_metadata(path / f"{name}.parquet") for path in (found["folder"] / "copy", run)]
        assert marks[0] == marks[1]
    assert Run.open(found["folder"] / "copy").dataset.fingerprint == Run.open(run).dataset.fingerprint


@pytest.mark.parametrize("name", HISTORIES)
def test_ranks_without_users_train_resume_and_evaluate(found, name):
    results = [result["empty"][name] for result in found["ranks"]]
    assert [result["users"] for result in results] == USERS[name]
    one = Recommender.load(found["folder"] / f"{name} run", device="cpu", weights=BEST)
    expected = one.evaluate().to_dict()
    assert expected["users"] == len(HISTORIES[name])
    assert all(result["test"] == result["evaluated"] == expected for result in results)
    width = None if name != "first" else 6
    assert [result["given"] and result["given"][1] for result in results] == [width] * 3
    assert (width is not None) == (expected["protocol"] == "the 6 negatives that came with the log")


def test_adams_moments_of_three_ranks_go_on_in_one_process(found):
    path = found["folder"] / "middle run"
    own = [load_file(path / f"own.{rank}") for rank in range(3)]
    run = Run.open(path)
    dataset = run.dataset
    trainer = Trainer(
        run.new_model(), dataset.train_users, dataset.train_items, run.config, torch.device("cpu"), "train"
    )
    trainer.load_state(*run.load(LAST))
    tensors, values = trainer.state()
    assert values["adam_steps"] == len(trainer.batches) > 1
    assert set(tensors) == set(own[0])
    for name, tensor in tensors.items():
        assert tensor.abs().sum() > 0, name
        if name.endswith("user_embedding"):
            assert torch.equal(tensor, torch.cat([one[name] for one in own]))
        else:
            assert all(torch.equal(tensor, one[name]) for one in own)


def test_a_step_sends_what_the_formula_says(found):
    items, width, hidden, output = 9, 4 + 8 // 2, 8 * 6 + 6, 4 + 6 + 1
    expected = 4 * (items * width + hidden + output + 3)
    assert [result["sent"] for result in found["ranks"]] == [expected, expected, None]


def test_ranks_that_differ_are_named(found):
    said = [result["differing"] for result in found["ranks"]]
    for one in said:
        assert one["options"] == "rank 2 has another set of options than rank 0: start all processes with the same"
        assert one["dataset"] == "rank 1 has another dataset than rank 0: start all processes with the same"
        assert one["evaluation"] == "rank 1 has another set of options than rank 0: start all processes with the same"
    assert [one["file"] for one in said[::2]] == [None, None]
    assert "best.safetensors is not the file that rank 0 finds there" in said[1]["file"]
    assert not (found["folder"] / "never").exists()


def test_words_reach_everybody(found):
    assert all(result["all"] for result in found["ranks"])


def test_a_rank_that_dies_is_noticed_at_once_and_told_once(found):
    first, second, _ = found["ranks"]
    assert max(first["seconds"], second["seconds"]) < 5
    silent, told = sorted([str(first["said"]), str(second["said"])])
    assert silent == "None"
    assert re.fullmatch(r"error: another process of the run is gone; go on with --resume \(.+\)", told)


def store_of_four() -> list:
    from ncf.distributed import Ranks

    store = torch.distributed.HashStore()
    return [Ranks(rank, 4, joined=True, store=store) for rank in range(4)]


def test_what_ranks_but_the_first_meet_is_said_once(monkeypatch):
    from ncf import distributed
    from ncf.errors import InputError

    monkeypatch.setattr(distributed, "HEARING_SECONDS", 0.01)
    ranks = store_of_four()
    error = InputError("data is not a directory")
    said = [ranks[rank].spoken("error: data is not a directory", error) for rank in (2, 1, 3)]
    assert said == ["error: rank 2: data is not a directory", None, None]
    assert ranks[0].spoken("error: gone", distributed.LostRankError("gone")) is None


@pytest.mark.parametrize(("error", "message"), [(KeyboardInterrupt(), "interrupted"), (BrokenPipeError(), "")])
def test_after_rank_0_ended_as_told_no_other_says_that_it_is_gone(error, message):
    from ncf.distributed import LostRankError

    ranks = store_of_four()
    assert ranks[1].spoken("interrupted", KeyboardInterrupt()) is None
    assert ranks[0].spoken(message, error) == message
    assert [ranks[rank].spoken("error: gone", LostRankError("gone")) for rank in (1, 2, 3)] == [None] * 3


def test_one_process_gives_nothing_to_anybody():
    from ncf.distributed import ALONE

    tensor = torch.tensor([3.0])
    assert ALONE.sum_(tensor) is tensor
    assert ALONE.every(7) == [7]
    assert ALONE.from_first(lambda: {"any": object}) == {"any": object}
    assert not torch.distributed.is_initialized()


def test_one_rank_with_a_group_steps_as_one_without():
    """As the GPU benchmark does, to go NCCL's way with one GPU."""
    from ncf.config import TrainConfig
    from ncf.distributed import ALONE, Ranks
    from ncf.meeting import connect
    from ncf.model.neumf import NeuMF
    from ncf.training.step import Step

    ranks = Ranks(joined=True, store=torch.distributed.HashStore())
    connect(ranks, "gloo")
    try:
        models = []
        for group in (ranks, ALONE):
            model = NeuMF(9, 7, factors=4, layers=(8, 6), dropout=0.0)
            step = Step(model, TrainConfig(), group)
            step(torch.arange(9), torch.arange(18).view(9, 2) % 7, None, 18, None)
            models.append(model)
        shared = [parameter for name, parameter in model.named_parameters() if name != "user_embedding"]
        assert ranks.sent == 4 * (sum(parameter.numel() for parameter in shared) + 3)
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        torch.distributed.destroy_process_group()
