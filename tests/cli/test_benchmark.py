import json

import pytest

from ncf import benchmark as module

SIZES = ["--users", "150", "--items", "130", "--interactions", "1500"]
SMALL = ["--recipe", "nvidia", "--factors", "4", "--layers", "8", "4", "--device", "cpu", "--precision", "fp32"]
KEYS = {
    *("train_samples_per_s", "evaluate_items_per_s", "full_ranking_pairs_per_s", "latency_ms", "peak_memory_mb"),
    *("device", "precision", "users", "items", "interactions", "batch_size"),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("RUN_SECONDS", "TRAIN_SECONDS", "LATENCY_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)


def test_a_table(ncf):
    status, out, err = ncf("benchmark", *SIZES, *SMALL)
    assert (status, err) == (0, "")
    assert "150 users, 130 items, 1,500 interactions" in out
    assert sum(line.split()[:1] == ["fp32"] for line in out.splitlines()) == 1


def test_json_is_one_object(ncf):
    status, out, err = ncf("benchmark", *SIZES, *SMALL, "--batch-size", "500", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert set(found) >= KEYS
    assert set(found["latency_ms"]) == {"p50", "p99"}
    assert (found["users"], found["items"], found["interactions"], found["batch_size"]) == (150, 130, 1500, 500)
    assert "precisions" not in found


def test_the_history_recipe_is_measured_unless_told_otherwise(ncf):
    status, out, err = ncf("benchmark", *SIZES, "--factors", 4, "--device", "cpu", "--precision", "fp32", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["recipe"], found["layers"]) == ("history", [])
    assert found["history"] > 0


@pytest.mark.filterwarnings("default::ncf.errors.NcfWarning")
def test_a_dataset(ncf, tiny_data):
    status, out, err = ncf("benchmark", "--data", tiny_data, *SMALL, "--json")
    found = json.loads(out)
    assert status == 0
    assert err == "ncf: warning: 40 of 40 users have fewer than 99 unseen items: all of theirs are ranked\n"
    assert (found["users"], found["items"], found["interactions"]) == (40, 60, 40 * 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--data", "nowhere", "--users", "5"], "leave --users, --items and --interactions out"),
        (["--users", "0"], "--users must be at least 1: got 0"),
        (["--interactions", "5"], "5 interactions cannot give each of 138493 users one"),
        (["--precision", "fp8"], "--precision must be fp32, bf16 or fp16: got 'fp8'"),
        (["--precision", "fp16"], "--precision fp16 (--fp16) needs a CUDA device"),
        (["--batch-size", "4"], "so at least 5: got 4"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N: got 'tpu'"),
        (["--epochs", "3"], "unrecognized arguments: --epochs 3"),
    ],
)
def test_errors_are_one_line(ncf, arguments, message):
    status, out, err = ncf("benchmark", *SMALL, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ncf: error: ")
    assert message in err
