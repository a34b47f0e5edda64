"""Three ranks in one launch of `worker.py`; each test looks at one of their computations."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ncf.data.dataset import Dataset
from ncf.parallel.group import SINGLE
from ncf.recommender import Recommender
from ncf.runs.run import BEST, LAST, RunDirectory
from ncf.training.trainer import Trainer

HISTORIES = {"middle": [5, 22, 5], "first": [22, 5, 5], "few": [6, 6]}  # interactions of each user, two held out
USERS = {"middle": [1, 0, 2], "first": [0, 0, 3], "few": [0, 1, 1]}  # of each of three ranks

Found = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def folder(
    fork: Callable[..., dict[str, Any]],
    free_ports: Iterator[int],
    data: Path,
    run: Path,
    make_dataset: Callable[..., Dataset],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What the ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("run", "stale", "moments"):
        shutil.copytree(run, folder / name)
    stale = RunDirectory.open(folder / "stale")
    tensors, state = stale.load(BEST)
    stale.save(BEST, tensors, state | {"epoch": 99})
    given = {"negatives": torch.arange(30, 36, dtype=torch.int32).repeat(3, 1)}
    for name, lengths in HISTORIES.items():
        histories = [list(range(user, user + length)) for user, length in enumerate(lengths)]
        make_dataset(histories, 40, name=name, **(given if name == "first" else {})).save(folder / name)
    command = [Path(__file__).with_name("worker.py"), data, folder / "run", folder / "found"]
    common = {"WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": next(free_ports)}
    ranks = {f"rank {rank}": (common | {"RANK": rank}, command) for rank in range(3)}
    ended = fork(folder, ranks, "ncf.recommender", "torch._dynamo")  # which the first optimizer of a process loads
    assert [process["status"] for process in ended.values()] == [0, 0, 0], ended
    return folder


@pytest.fixture
def found(folder: Path) -> Found:
    """The results of a computation, in order of rank."""

    def results(name: str) -> list[Any]:
        ranks = [json.loads((folder / f"found.{rank}").read_text()) for rank in range(3)]
        entries = [rank[name] for rank in ranks if name in rank]
        for entry in entries:
            assert "traceback" not in entry, entry["traceback"]
        return [entry["result"] for entry in entries]

    return results


@pytest.mark.parametrize(("name", "compared"), [("gradients of two", [20] * 2), ("gradients of three", [60] * 3)])
def test_the_ranks_gradients_are_one_process_s(found: Found, name: str, compared: list[int]) -> None:
    errors = found(name)
    assert [len(one) for one in errors] == compared
    for one in errors:
        assert max(one.values()) < 1e-10, {key: value for key, value in one.items() if value >= 1e-10}


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: Found) -> None:
    assert found("overflow") == [{"skipped": True, "scale": 65536 / 2, "went_on": True}] * 3


def test_a_count_that_fp32_cannot_hold_is_exact(found: Found) -> None:
    assert found("count") == [3 * (2**24 + 1)] * 3


def test_a_step_sends_what_the_formula_says(found: Found) -> None:
    items, width, hidden, output = 9, 4 + 8 // 2, 8 * 6 + 6, 4 + 6 + 1
    assert found("sent") == [4 * (items * width + hidden + output + 3)] * 2


def test_scores_do_not_depend_on_the_number_of_ranks(found: Found) -> None:
    expected = found("scores of one")[0]
    assert [one["users"] for one in expected] == [7] * 4
    assert found("scores of two") == [expected] * 2
    assert found("scores of three") == [expected] * 3


def test_every_interaction_is_on_one_rank(found: Found, data: Path) -> None:
    shards = found("shard")
    assert [first for first, *_ in shards] == [0, *(end for _, end, *_ in shards[:-1])]
    assert shards[-1][1] == 7
    users = [first + user for first, _, *users in shards for user in users]
    assert users == Dataset.load(data).interactions.train_users.tolist()


def test_a_file_written_by_three_ranks_is_that_of_one(found: Found, folder: Path) -> None:
    """Read by three ranks, each its rows, and written by them: the very bytes that one process wrote."""
    assert found("files") == [None] * 3
    assert (folder / "run/deploy.safetensors").read_bytes() == (folder / "run/best.safetensors").read_bytes()


def test_tables_copied_by_ranks_are_those_of_one(found: Found, folder: Path, run: Path) -> None:
    assert found("files") == [None] * 3
    copy = folder / "copy"
    assert RunDirectory.open(copy).dataset.fingerprint == RunDirectory.open(run).dataset.fingerprint
    for name in ("users", "items", "train", "heldout", "seen"):
        ours, theirs = (path / "dataset" / f"{name}.parquet" for path in (copy, run))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", HISTORIES)
def test_ranks_without_users_train_resume_and_evaluate(found: Found, folder: Path, name: str) -> None:
    results = [result[name] for result in found("empty")]
    assert [result["users"] for result in results] == USERS[name]
    expected = Recommender.load(folder / f"{name} run", device="cpu", weights=BEST).evaluate().to_dict()
    assert expected["users"] == len(HISTORIES[name])
    assert all(result["test"] == result["evaluated"] == expected for result in results)
    width = None if name != "first" else 6
    assert [result["given"] and result["given"][1] for result in results] == [width] * 3
    assert (width is not None) == (expected["protocol"] == "the 6 negatives that came with the log")


def test_adams_moments_of_three_ranks_go_on_in_one_process(found: Found, folder: Path) -> None:
    assert found("moments") == [None] * 3
    path = folder / "moments"
    own = [load_file(path / f"own.{rank}") for rank in range(3)]
    run = RunDirectory.open(path)
    trainer = Trainer(run.new_model(), run.dataset.interactions.sequence(), run.config, torch.device("cpu"), "train")
    trainer.load_state(*run.load(LAST))
    tensors, values = trainer.state()
    assert values["adam_steps"] > 1
    assert set(tensors) == set(own[0])
    for name, tensor in tensors.items():
        assert tensor.abs().sum() > 0, name
        if name.endswith("user_embedding"):
            assert torch.equal(tensor, torch.cat([one[name] for one in own]))
        else:
            assert all(torch.equal(tensor, one[name]) for one in own)


def test_ranks_that_differ_are_named(found: Found, folder: Path) -> None:
    first, second, third = found("differing")
    for one in (first, second, third):
        assert "rank 2 has another set of options" in one["options"]
        assert "rank 1 has another dataset" in one["dataset"]
        assert "rank 1 has another set of options" in one["evaluation"]
    assert "best.safetensors is not the file that rank 0 finds" in second["file"]
    assert first["file"] is third["file"] is None
    assert not (folder / "never").exists()


def test_what_ranks_tell_each_other_arrives(found: Found) -> None:
    assert found("words") == [[True, [0, 1, 2], [3, 6]]] * 3


def test_one_process_sends_nothing() -> None:
    tensor = torch.tensor([3.0])
    assert SINGLE.all_reduce_(tensor) is tensor
    assert SINGLE.all_gather(7) == [7]
    assert SINGLE.broadcast(lambda: {"any": object}) == {"any": object}
    assert not torch.distributed.is_initialized()
