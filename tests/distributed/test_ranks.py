"""Three ranks in one launch of `worker.py`; each test looks at a part of what they found."""

import json
import sys
from pathlib import Path

import pytest
import torch

from ncf.data.dataset import Dataset
from ncf.data.parquet import read_parquet, read_parquet_metadata
from ncf.model.checkpoint import BEST, Run
from ncf.ranking.evaluate import evaluate
from ncf.ranking.exam import make_exam
from ncf.ranking.scoring import NeuralScorer


@pytest.fixture(scope="module")
def found(data, run, tmp_path_factory):
    import os
    import shutil
    import socket
    import subprocess

    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(run, folder / "run")
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


def test_words_reach_everybody(found):
    assert all(result["all"] for result in found["ranks"])


def test_a_rank_that_dies_is_noticed_at_once_and_told_once(found):
    first, second, _ = found["ranks"]
    assert max(first["seconds"], second["seconds"]) < 5
    assert sorted([str(first["said"]), str(second["said"])]) == [
        "None",
        "error: another process of the run is gone; go on with --resume",
    ]


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
