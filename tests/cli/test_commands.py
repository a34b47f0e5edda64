import csv
import io
import json
import re
import shutil

import pytest

from ncf.cli import EXAMPLES, main
from ncf.config import GROUPS

SMALL = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "20", "--device", "cpu"]


def test_the_whole_way_from_a_log_to_a_list(ncf, tiny_log):
    status, out, err = ncf("prepare", tiny_log, "--min-ratings", 1)
    assert (status, err) == (0, "")
    assert "written to:" in out
    assert "data/tiny" in out
    status, out, err = ncf("train", "--data", "data/tiny", "-e", 2, *SMALL)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].startswith("New Best Epoch: 01, Train Time: ")
    test = next(line for line in out.splitlines() if line.startswith("Eval Time = "))
    status, out, _ = ncf("evaluate", "--checkpoint-dir", "runs/tiny")
    assert status == 0
    assert out.split(", ", 1)[1].splitlines()[0] == test.split(", ", 1)[1]
    assert "Protocol: the test item of 40 users" in out
    status, out, _ = ncf("recommend", "--checkpoint-dir", "runs/tiny", "--user", 7, "-k", 3)
    assert status == 0
    assert out.startswith("user 7\n")
    assert len(out.splitlines()) == 5


def test_evaluate_prints_one_json_object(ncf, tiny_run):
    status, out, _ = ncf("evaluate", "--checkpoint-dir", tiny_run, "--json", "-k", 5, "--valid-negative", "all")
    found = json.loads(out)
    assert status == 0
    assert {"hr@5", "ndcg@5", "mrr", "users", "negatives", "split", "ties"} <= set(found)
    assert (found["users"], found["negatives"], found["split"]) == (40, "all", "test")
    assert 0 <= found["ndcg@5"] <= found["hr@5"] <= 1


def test_evaluation_takes_the_runs_protocol_and_both_splits(ncf, tiny_run):
    _, out, _ = ncf("evaluate", "--checkpoint-dir", tiny_run, "--split", "validation", "--json")
    found = json.loads(out)
    assert (found["split"], found["negatives"]) == ("validation", 20)
    records = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    assert found["hr@10"] == max(record["hr@10"] for record in records)
    assert set(records[0]) == {"epoch", "loss", "train_time", "eval_time", "hr@10", "ndcg@10", "samples_per_s"}


@pytest.mark.parametrize("batch", [7, 40, 5000])
def test_the_batch_of_evaluation_changes_nothing(ncf, tiny_run, batch):
    _, one, _ = ncf("evaluate", "--checkpoint-dir", tiny_run, "--json")
    _, other, _ = ncf("evaluate", "--checkpoint-dir", tiny_run, "--json", "--valid-users-per-batch", batch)
    assert json.loads(one) == json.loads(other)


def test_mode_test_is_evaluate(ncf, tiny_data, tiny_run):
    status, out, _ = ncf("train", "--mode", "test", "--data", tiny_data, "--checkpoint-dir", tiny_run)
    _, expected, _ = ncf("evaluate", "--checkpoint-dir", tiny_run)
    assert status == 0
    assert out.split(", ", 1)[1] == expected.split(", ", 1)[1]
    status, _, err = ncf("train", "--mode", "test", "--data", tiny_data, "--checkpoint-dir", "nowhere")
    assert status == 2
    assert "nowhere does not exist" in err


def test_evaluate_refuses_another_dataset(ncf, tiny_run, tiny_log):
    ncf("prepare", tiny_log, "-o", "other", "--min-ratings", 1, "--seed", 5)
    status, _, err = ncf("evaluate", "--checkpoint-dir", tiny_run, "--data", "other")
    assert status == 2
    assert "trained on another dataset" in err


def test_recommend_gives_raw_unseen_items_with_scores(ncf, tiny_log, tiny_run):
    seen = {(row["userId"], row["movieId"]) for row in csv.DictReader(tiny_log.read_text().splitlines())}
    status, out, _ = ncf(
        "recommend", "--checkpoint-dir", tiny_run, "--user", 7, "--user", 31, "-k", 60, "--format", "csv"
    )
    assert status == 0
    assert out.splitlines()[0] == "user_id,item_id,title,score,rank"
    rows = list(csv.DictReader(io.StringIO(out)))
    catalogue = {item for _, item in seen}
    for user in ("7", "31"):
        listed = [row for row in rows if row["user_id"] == user]
        assert {row["item_id"] for row in listed} == catalogue - {item for one, item in seen if one == user}
        assert [int(row["rank"]) for row in listed] == list(range(1, len(listed) + 1))
        scores = [float(row["score"]) for row in listed]
        assert scores == sorted(scores, reverse=True)


def test_recommend_as_json_to_a_file_for_everyone(ncf, tiny_run, tmp_path):
    status, out, _ = ncf(
        "recommend", "--checkpoint-dir", tiny_run, "--all", "-k", 2, "--format", "json", "-o", "lists.jsonl"
    )
    assert (status, out) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "lists.jsonl").read_text().splitlines()]
    assert len(rows) == 80
    assert set(rows[0]) == {"user_id", "item_id", "title", "score", "rank"}
    assert isinstance(rows[0]["user_id"], int)


def test_recommend_reads_users_from_a_file_and_may_include_seen_items(ncf, tiny_run, tmp_path):
    (tmp_path / "users.txt").write_text("3\n\n4\n")
    arguments = ("recommend", "--checkpoint-dir", tiny_run, "--users-file", "users.txt", "-k", 60, "--format", "csv")
    _, out, _ = ncf(*arguments)
    _, more, _ = ncf(*arguments, "--include-seen")
    assert len(more.splitlines()) - len(out.splitlines()) == 2 * 8


def test_an_unknown_user_is_named(ncf, tiny_run):
    status, out, err = ncf("recommend", "--checkpoint-dir", tiny_run, "--user", 7, "--user", 999)
    assert (status, out) == (2, "")
    assert err.startswith("ncf: error: ")
    assert re.search("the 40 users of the model.*: 999;", err)


def test_a_run_moves_to_another_place(ncf, tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "moved")
    _, out, _ = ncf("evaluate", "--checkpoint-dir", "moved", "--json")
    _, expected, _ = ncf("evaluate", "--checkpoint-dir", tiny_run, "--json")
    assert out == expected


def test_train_with_the_recipes_flags(ncf, tiny_data):
    status, out, err = ncf(
        *("train", "--recipe", "nvidia", "--data", tiny_data, "--checkpoint-dir", "run", "-e", 2, "-b", 320, "-n", 4),
        *("-k", 10),
        *("-f", 8, "--layers", 16, 8, "-l", 0.0045, "-b1", 0.25, "-b2", 0.5, "--eps", 1e-8, "--dropout", 0.5),
        *("-s", 3, "-t", 0.99, "--valid-negative", 20, "--valid-users-per-batch", 50, "--loss-scale", 8192),
        *("--eval-after", 1, "--no-neg-trick", "--mode", "train", "--verbose"),
    )
    assert (status, err) == (0, "")
    assert "Epoch: 01, Train Time: " in out


def test_doctor_says_what_is_here(ncf):
    status, out, _ = ncf("doctor")
    assert status == 0
    assert "torch" in out
    _, out, _ = ncf("doctor", "--json")
    assert json.loads(out)["CUDA devices"] >= 0


def test_version_and_help(capsys):
    for arguments in (["--version"], ["--help"], *([name, "--help"] for name in EXAMPLES)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--no-neg-trick" in out
    assert out.count("Examples:") == len(EXAMPLES)
    assert out.count("Exit status: 0; 2 for input and usage") == len(EXAMPLES) + 1
    train = out[out.index("usage: ncf train") : out.index("usage: ncf evaluate")]
    headings = re.findall(r"^([a-z ']+):$", train, re.MULTILINE)
    assert headings == ["options", *GROUPS, "the recipe's other names"]


def test_resume_keeps_the_options_that_are_not_given_again(ncf, tiny_data, tmp_path):
    assert ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "-e", 2, "-l", 0.001, *SMALL)[0] == 0
    again = ("train", "--data", tiny_data, "--checkpoint-dir", "run", "--device", "cpu", "--resume")
    for given, epochs in (((), 2), (("-e", 3), 3), (("--patience", 9), 3)):
        status, _, err = ncf(*again, *given)
        assert (status, err) == (0, "")
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == epochs
    options = json.loads((tmp_path / "run" / "config.json").read_text())["options"]
    assert (options["learning_rate"], options["epochs"], options["patience"]) == (0.001, 3, 9)
    status, _, err = ncf(*again, "-l", 0.002)
    assert (status, err) == (
        2,
        "ncf: error: --resume cannot change --learning-rate: the run in run has 0.001, got 0.002\n",
    )


def test_the_default_recipe_from_a_log_to_a_list(ncf, tiny_data, tmp_path):
    small = ("--factors", 8, "-e", 2, "--valid-negative", 20, "--device", "cpu")
    status, out, err = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", *small)
    assert (status, err) == (0, "")
    assert out.startswith("Recipe: history (factors 8, layers none, history ")
    assert "; --recipe nvidia for NVIDIA's\n" in out
    options = json.loads((tmp_path / "run" / "config.json").read_text())["options"]
    assert (options["recipe"], options["factors"], options["epochs"]) == ("history", 8, 2)
    status, out, _ = ncf("recommend", "--checkpoint-dir", "run", "--user", 7, "-k", 3, "--format", "json")
    assert (status, len(out.splitlines())) == (0, 3)
    status, _, err = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "--resume", "--recipe", "nvidia")
    assert status == 2
    assert "--resume cannot change --recipe: the run in run has 'history', got 'nvidia'" in err


def test_a_history_is_not_for_a_run_without_one(ncf, tiny_data, tiny_run):
    status, _, err = ncf(
        *("train", "--data", tiny_data, "--checkpoint-dir", tiny_run, "--resume", "--history", 5, "--epochs", 9)
    )
    assert status == 2
    assert "--resume cannot change --history: the run in" in err
