"""What users of other tools reported, each as they would meet it on the command line: O01 to O20 of the reports.

A name begins with its report's number; O13 (NDCG's values) is `ranking/test_metrics.py::test_one_user`.
"""

import csv
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ncf.cli import main
from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.interactions import Sequence
from ncf.data.unseen import PAD
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.runs.run import RunDirectory
from ncf.training.batches import Batches

SMALL = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "20", "--device", "cpu"]
PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("always::ncf.errors.NcfWarning")  # they go to stderr, as for a user


def tiny_rows() -> list[tuple[str, str, str]]:
    """TINY: 40 users (ids 1 to 40) with 8 random items of 60 each, distinct timestamps."""
    rng = np.random.default_rng(0)
    pairs = [(user, int(item)) for user in range(1, 41) for item in rng.choice(60, 8, replace=False)]
    return [(str(user), str(item), str(1000 + place)) for place, (user, item) in enumerate(pairs)]


@pytest.fixture
def prepared(ncf, tmp_path) -> Callable[..., Dataset]:
    """Prepare rows into `data`, every user kept unless told otherwise."""

    def run(rows, *arguments: object, header: str = "userId,movieId,timestamp", delimiter: str = ",") -> Dataset:
        lines = [header, *(delimiter.join(map(str, row)) for row in rows)]
        (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
        status, _, err = ncf("prepare", "log.csv", "-o", "data", "--min-ratings", 1, *arguments)
        assert status == 0, err
        return Dataset.load(tmp_path / "data")

    return run


@pytest.fixture
def trained(ncf, prepared, tmp_path) -> Callable[..., Path]:
    """Prepare TINY and train on it into `run`."""

    def run(*arguments: object) -> Path:
        prepared(tiny_rows())
        assert ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 3, *SMALL, *arguments)[0] == 0
        return tmp_path / "run"

    return run


def rows_of(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(out)))


def test_o01_test_rows_and_negative_rows_are_the_kept_users(prepared):
    rows = [(user, item, item) for user, count in ((1, 4), (5, 4), (900, 5), (7, 2)) for item in range(count)]
    dataset = prepared([*rows, (1, 9, 0), (1, 8, 0)], "--min-ratings", 3)
    eval_set = make_eval_set(dataset, "test", 1)
    assert dataset.user_ids.tolist() == [1, 5, 900]
    assert len(eval_set.users) == eval_set.negatives.shape[0] == dataset.n_users


def test_o02_ids_with_gaps_make_three_items_and_train(ncf, prepared):
    rows = [(user, item, user + item) for user in (1, 9, 700, 5000) for item in (10, 500, 193609)]
    dataset = prepared([*rows, (3, 10, 1), (3, 500, 2)])
    assert dataset.item_ids.tolist() == [10, 500, 193609]
    assert ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 1, "--select-on", "test", *SMALL)[0] == 0
    assert RunDirectory.open(Path("run")).dataset.item_ids.tolist() == [10, 500, 193609]


def test_o03_text_ids_come_out_as_they_went_in(ncf, prepared):
    rows = [(f"AMEVO2LY6VEJ{user}", f"00{item}", time) for user, item, time in tiny_rows()]
    prepared(rows)
    ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 1, *SMALL)
    _, out, _ = ncf("recommend", "--checkpoint-dir", "run", "--user", "AMEVO2LY6VEJ7", "--format", "csv", "-k", 60)
    assert {row["user_id"] for row in rows_of(out)} == {"AMEVO2LY6VEJ7"}
    assert {row["item_id"] for row in rows_of(out)} <= {item for _, item, _ in rows}
    _, out, _ = ncf("recommend", "--checkpoint-dir", "run", "--user", "AMEVO2LY6VEJ7", "--format", "json", "-k", 1)
    assert isinstance(json.loads(out)["item_id"], str)


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_o04_other_delimiters_make_the_same_dataset(prepared, delimiter):
    header = delimiter.join(("userId", "movieId", "timestamp"))
    other = prepared(tiny_rows(), header=header, delimiter=delimiter)
    assert other.fingerprint == prepared(tiny_rows(), "--overwrite").fingerprint


@pytest.mark.parametrize("header", ["user_id,item_id,timestamp", "userId, movieId, timestamp"])
def test_o05_other_header_names(ncf, prepared, tmp_path, header):
    other = prepared(tiny_rows(), header=header)
    assert other.fingerprint == prepared(tiny_rows(), "--overwrite").fingerprint
    (tmp_path / "odd.csv").write_text("who,what\na,b\nc,d\n")
    status, _, err = ncf("prepare", "odd.csv", "-o", "odd")
    assert (status, err.count("\n")) == (2, 1)
    assert "who, what" in err
    assert "--user-column" in err
    assert "--item-column" in err


def test_o06_a_repeated_pair_has_one_winner_and_is_counted(prepared):
    dataset = prepared([(1, 10, 5), (1, 10, 1), (1, 10, 9), (1, 20, 3), (1, 30, 7)])
    assert dataset.summary["repeated_pairs"] == 2
    train = dataset.item_ids[dataset.interactions.train_items.numpy()].tolist()
    held = [int(dataset.item_ids[dataset.interactions.heldout(split)[0]]) for split in ("validation", "test")]
    assert (train, held) == ([10], [20, 30])  # the earliest counts, at time 1


def test_o07_without_a_time_the_last_row_is_held_out(prepared):
    dataset = prepared([(1, 30), (1, 10), (1, 20)], header="userId,movieId")
    assert dataset.item_ids[dataset.interactions.test_items[0]] == 20


def test_o08_a_user_with_one_interaction_is_counted_and_not_evaluated(ncf, prepared, tmp_path):
    lines = ["userId,movieId,timestamp", *(",".join(row) for row in tiny_rows()), "77,3,1"]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    status, _, err = ncf("prepare", "log.csv", "-o", "data", "--min-ratings", 1)
    assert (status, err) == (
        0,
        "ncf: warning: 1 of 41 users have no test item: they are trained on and not evaluated\n",
    )
    _, out, _ = ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 1, *SMALL)
    assert "the test item of 40 users" in out


def test_o09_a_user_with_every_item_is_skipped_with_a_warning(ncf, prepared):
    prepared(
        [*((1, item, item) for item in range(5)), (2, 0, 1), (2, 1, 2), (2, 2, 3), (3, 2, 1), (3, 3, 2), (3, 4, 3)]
    )
    status, out, err = ncf("train", "--data", "data", "--checkpoint-dir", "run", "-e", 2, "--no-neg-trick", *SMALL)
    assert status == 0
    assert "ncf: warning: 1 of 3 users have seen every item and are not evaluated" in err
    assert "the test item of 2 users (1 skipped)" in out


def test_o10_training_negatives_avoid_training_rows_and_may_be_held_out():
    users, items = torch.zeros(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)  # of 5; 3 and 4 held out
    batches = Batches(Sequence(users, items), 1, 5, TrainConfig(negative_samples=50))
    drawn = torch.cat([one.candidates[:, 1:].flatten() for one in batches.epoch(torch.Generator().manual_seed(0))])
    assert set(drawn.tolist()) == {3, 4}
    assert "held-out item may be drawn as a training negative" in (PROJECT / "docs" / "protocol.md").read_text()


def test_o11_evaluation_negatives_are_distinct_unseen_and_exactly_as_many(prepared):
    dataset = prepared(tiny_rows())
    seen = {(user, item) for user, item, _ in tiny_rows()}
    for split in ("validation", "test"):
        eval_set = make_eval_set(dataset, split, 20)
        for user, row in zip(eval_set.users.tolist(), eval_set.negatives.tolist(), strict=True):
            raw = {(str(dataset.user_ids[user]), str(dataset.item_ids[item])) for item in row if item != PAD}
            assert len(raw) == 20
            assert not raw & seen


def test_o12_a_constant_model_hits_nothing(tiny):
    class Constant:
        def user_rows(self, users, history=None):  # noqa: ARG002
            return users

        def score(self, _rows, items):
            return torch.zeros(items.shape)

        def score_all(self, rows):
            return torch.zeros(len(rows), 60)

    found = evaluate(Constant(), make_eval_set(tiny, "test", 20), k=10)
    assert (found.hr, found.ndcg) == (0, 0)


def test_o14_the_full_catalogue_leaves_out_what_the_user_saw(ncf, trained):
    trained()
    _, out, err = ncf("evaluate", "--checkpoint-dir", "run", "--valid-negative", "all", "-k", 53, "--json")
    assert json.loads(out)["hr@53"] == 1  # 60 items without the 8 seen, and the held-out one
    assert "k = 53 is not below the 53 candidates" in err


def test_o15_mixed_precision_has_a_finite_loss(trained):
    run = trained("--precision", "bf16")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in (PROJECT / "docs").glob("*.md"))]
)
def test_o16_the_documents_name_no_flag_that_is_not_there(capsys, page):
    known = {}
    for command in ("prepare", "train", "evaluate", "recommend", "benchmark", "doctor"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known[command] = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))
    text = (PROJECT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"^ncf (.+)$|`ncf ([^`]+)`", text, re.MULTILINE)
    found = 0
    for command in filter(None, (block or inline for block, inline in commands)):
        name, *words = shlex.split(command.split("#")[0])
        if name == "COMMAND":
            continue
        flags = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert flags <= known[name], command
        found += 1
    assert found or page not in ("README.md", "docs/migrating.md")


def test_o17_the_saved_model_is_the_best_and_not_the_last(ncf, trained):
    run = trained("-e", 25, "-b", 100)  # TINY is random, so its training overfits
    hits = [json.loads(line)["hr@10"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert hits[-1] < max(hits), "the last epoch must not be the best one for this test to tell"
    _, out, _ = ncf("evaluate", "--checkpoint-dir", "run", "--split", "validation", "--json")
    assert json.loads(out)["hr@10"] == max(hits)


def test_o18_a_new_process_needs_the_checkpoint_alone(ncf, trained, tmp_path):
    run = trained()
    _, expected, _ = ncf("recommend", "--checkpoint-dir", "run", "--user", 7, "--format", "csv")
    alone = tmp_path / "alone"
    alone.mkdir()
    run.rename(alone / "moved")
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    command = [sys.executable, "-m", "ncf", "recommend", "--checkpoint-dir", "moved", "--user", "7", "--format", "csv"]
    found = subprocess.run(command, cwd=alone, capture_output=True, text=True, check=True)
    seen = {item for user, item, _ in tiny_rows() if user == "7"}
    assert [row["item_id"] for row in rows_of(found.stdout)] == [row["item_id"] for row in rows_of(expected)]
    assert not {row["item_id"] for row in rows_of(found.stdout)} & seen


def test_o19_nothing_in_a_run_is_pickled(trained):
    run = trained()
    kinds = {file.suffix for file in run.rglob("*.*") if file.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".parquet", ".safetensors"}
    assert set(load_file(run / "best.safetensors")) >= {"user_embedding", "item_embedding"}
    for source in (PROJECT / "src").rglob("*.py"):
        assert not re.search(r"\bimport pickle\b|torch\.(load|save)\(", source.read_text()), source


def test_o20_raw_ids_with_scores_for_a_user_and_a_clear_error_for_a_stranger(ncf, trained):
    trained()
    _, out, _ = ncf("recommend", "--checkpoint-dir", "run", "--user", 7, "--format", "csv", "-k", 5)
    rows = rows_of(out)
    assert len(rows) == 5
    assert {row["item_id"] for row in rows} <= {item for _, item, _ in tiny_rows()}
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    status, out, err = ncf("recommend", "--checkpoint-dir", "run", "--user", 999)
    assert (status, out) == (2, "")
    assert re.fullmatch("ncf: error: not among the 40 users of the model.*: 999; give known ids\n", err)
