import os
import re
import shutil

import pytest

SMALL = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "20", "--device", "cpu"]


def check(result, status, message):
    """One clear line on stderr, nothing on stdout, never a traceback."""
    found, out, err = result
    assert (found, out) == (status, ""), err
    assert err.count("\n") == 1
    assert err.startswith("ncf: error: ")
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1: got 0"),
        (["--batch-size", "4"], "--batch-size must hold .* at least 5: got 4"),
        (["--factors", "-1"], "--factors must be at least 0: got -1"),
        (["--layers", "15", "8"], "--layers must be none, or .* even .*: got 15 8"),
        (["--layers", "x"], "--layers: must be a whole number, at least 1: got 'x'"),
        (["--factors", "0", "--layers", "none"], "--factors 0 with --layers none leaves no model"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1: got 1.0"),
        (["--learning-rate", "0"], "--learning-rate must be above 0: got 0.0"),
        (["--learning-rate", "nan"], "--learning-rate must be above 0: got nan"),
        (["--beta1", "1"], "--beta1 must be at least 0 and below 1: got 1.0"),
        (["--target", "1.5"], "--target must be above 0 and at most 1: got 1.5"),
        (["--topk", "0"], "--topk must be at least 1: got 0"),
        (["--valid-negative", "0"], "--valid-negative must be at least 1, or all: got 0"),
        (["--valid-negative", "most"], "--valid-negative: must be a whole number, at least 1, or all: got 'most'"),
        (["--loss-scale", "-2"], "--loss-scale must be above 0, or dynamic: got -2.0"),
        (["--precision", "fp8"], "--precision must be fp32, bf16 or fp16: got 'fp8'"),
        (["--select-on", "luck"], "--select-on must be validation, test or last: got 'luck'"),
        (["--seed", "-1"], "--seed must be at least 0 .*: got -1"),
        (["--fp16"], "fp16.*CUDA"),
        (["--amp"], "fp16.*CUDA"),
        (["--factors", "2000000000"], r"needs about [0-9.]+ GiB and cpu has [0-9.]+ GiB"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N: got 'tpu'"),
        (["--device", "cuda:99"], "--device cuda:99 is not there"),
        (["--eval-after", "40"], r"--eval-after must be below --epochs \(40\): got 40"),
        (["--select-on", "last", "--patience", "2"], "--target and --patience need"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--wat"], "unrecognized arguments: --wat"),
        (["--epochs"], "expected one argument"),
    ],
)
def test_options_out_of_range(ncf, tiny_data, arguments, message):
    check(ncf("train", "--data", tiny_data, *SMALL, *arguments), 2, message)


def test_no_command(ncf):
    check(ncf(), 2, "arguments are required: COMMAND")


def test_no_dataset(ncf, tmp_path):
    check(ncf("train", "--data", "nowhere"), 2, "nowhere is not a directory.*ncf prepare")
    check(ncf("train"), 2, "--data is missing; see `ncf train --help`")
    check(ncf("train", "--epoch", 3), 2, "unrecognized arguments: --epoch 3")  # the wrong flag, before the missing one
    check(ncf("train", "--epochs", "many"), 2, "--epochs: must be a whole number, at least 1: got 'many'")
    check(ncf("train", "--epochs", 0), 2, "--epochs must be at least 1: got 0")
    check(ncf("recommend", "-k", 0), 2, "--topk must be at least 1: got 0")
    check(ncf("recommend", "--checkpoint-dir", "run"), 2, "one of --user, --users-file, --all is missing")
    check(ncf("prepare"), 2, "SOURCE is missing")
    check(ncf("train", "--data", tmp_path), 2, "not a dataset")


def test_no_run(ncf, tmp_path):
    check(ncf("evaluate", "--checkpoint-dir", "nowhere"), 2, "nowhere does not exist")
    check(ncf("recommend", "--checkpoint-dir", tmp_path, "--user", 1), 2, "holds no run")


def test_a_checkpoint_dir_that_cannot_be(ncf, tiny_data, tmp_path):
    (tmp_path / "file").write_text("")
    check(ncf("train", "--data", tiny_data, "--checkpoint-dir", "file", *SMALL), 2, "--checkpoint-dir file")
    check(ncf("train", "--data", tiny_data, "--checkpoint-dir", "file/run", *SMALL), 2, "--checkpoint-dir file/run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_checkpoint_dir_that_is_not_writable(ncf, tiny_data, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    check(ncf("train", "--data", tiny_data, "--checkpoint-dir", "locked/run", *SMALL), 2, "cannot be used")


def test_an_exploding_run(ncf, tiny_data, tmp_path):
    result = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "--learning-rate", "1e30", *SMALL)
    assert result[1].startswith("Recipe: nvidia")
    check(
        (result[0], "", result[2]),
        1,
        "not finite in epoch 1, step [0-9]+ of [0-9]+: try a lower --learning-rate than 1e\\+30",
    )
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_a_users_file_that_is_not_there(ncf, tiny_run):
    check(ncf("recommend", "--checkpoint-dir", tiny_run, "--users-file", "nowhere"), 2, "--users-file nowhere")


def test_an_output_that_cannot_be_written(ncf, tiny_run):
    check(
        ncf("recommend", "--checkpoint-dir", tiny_run, "--user", 1, "-o", "no/where.csv"),
        1,
        "cannot write no/where.csv",
    )


def test_a_precision_that_is_none(ncf, tiny_run):
    check(ncf("evaluate", "--checkpoint-dir", tiny_run, "--precision", "fp64"), 2, "fp32, bf16 or fp16: got 'fp64'")


def test_an_empty_users_file(ncf, tiny_run, tmp_path):
    (tmp_path / "users.txt").write_text("\n")
    check(ncf("recommend", "--checkpoint-dir", tiny_run, "--users-file", "users.txt"), 2, "names no user")


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("metrics.jsonl", lambda text: text.replace('"loss": 0', '"loss": "0', 1)),
        ("metrics.jsonl", lambda text: text.replace('"loss"', '"los"', 1)),
        ("metrics.jsonl", lambda text: text.split("\n", 1)[1]),
    ],
)
def test_edited_metrics_are_noticed_on_resume(ncf, tiny_data, tiny_run, tmp_path, name, edit):
    shutil.copytree(tiny_run, tmp_path / "run")
    file = tmp_path / "run" / name
    file.write_text(edit(file.read_text()))
    result = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "-e", 3, "--resume", *SMALL)
    check(result, 2, "metrics.jsonl (is damaged|lacks)")


def test_an_edited_result_is_made_again(ncf, tiny_data, tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    file.write_text(file.read_text().replace('"best_epoch"', '"best"'))
    status, out, err = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "-e", 3, "--resume", *SMALL)
    assert (status, err) == (0, "")
    assert "Best HR:" in out


def test_tensorboard_without_the_extra(ncf, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    result = ncf("train", "--data", tiny_data, "--checkpoint-dir", "run", "--tensorboard", *SMALL)
    check(result, 2, "pip install 'ncf\\[tensorboard\\]'")
    assert not (tmp_path / "run").exists()


def test_tensorboard_writes_events(ncf, tiny_data, tmp_path):
    pytest.importorskip("tensorboard")
    command = ["train", "--data", tiny_data, "--checkpoint-dir", "run", "--tensorboard", *SMALL]
    assert ncf(*command, "-e", 1)[0] == 0
    assert ncf(*command, "-e", 2, "--resume")[0] == 0
    assert ncf(*command, "-e", 1, "--overwrite")[0] == 0
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
