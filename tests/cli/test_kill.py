import json
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

from ncf.runs.run import RunDirectory

OPTIONS = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "20", "--device", "cpu"]


def records(path):
    kept = []
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kept.append({k: v for k, v in values.items() if k not in ("train_time", "eval_time", "samples_per_s")})
    return kept


def wait_for(path, text, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} never said {text}")


def test_a_killed_run_resumes_to_the_same_figures(spawn, tiny_data, tmp_path):
    command = ["train", "--data", tiny_data, "-e", 30, *OPTIONS]
    whole = spawn(*command, "--checkpoint-dir", "whole")
    for epoch in (3, 12):
        run = spawn(*command, "--checkpoint-dir", "killed", "--resume")
        wait_for(tmp_path / "killed" / "metrics.jsonl", f'"epoch": {epoch},')
        run.kill()
        run.communicate()
    run = spawn(*command, "--checkpoint-dir", "killed", "--resume")
    assert run.communicate()[1] == whole.communicate()[1] == ""
    assert (run.returncode, whole.returncode) == (0, 0)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert len(records(tmp_path / "whole")) == 30


@pytest.mark.slow
def test_ten_kills_at_random_moments_of_a_long_run(spawn, tmp_path):
    sizes = ["--users", 500, "--items", 400, "--interactions", 30_000]
    assert spawn("prepare", "synthetic", "-o", "data", *sizes).wait() == 0
    command = ["train", "--recipe", "nvidia", "--data", "data", "-e", 60, "--device", "cpu"]
    whole = spawn(*command, "--checkpoint-dir", "whole")
    whole.communicate()
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    total = sum(json.loads(line)["train_time"] for line in lines)
    moments = random.Random(0)
    for kill in range(10):
        run = spawn(*command, "--checkpoint-dir", "killed", "--resume")
        time.sleep(moments.uniform(1, 4 + total / 10))
        assert run.poll() is None, f"the run was over before kill {kill + 1}"
        run.kill()
        run.communicate()
    run = spawn(*command, "--checkpoint-dir", "killed", "--resume")
    _, err = run.communicate()
    assert (run.returncode, err) == (0, "")
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    assert len(records(tmp_path / "whole")) == 60


def test_ctrl_c_ends_tidily(spawn, tiny_data, tmp_path):
    run = spawn("train", "--data", tiny_data, "-e", 100000, *OPTIONS, "--checkpoint-dir", "run")
    wait_for(tmp_path / "run" / "metrics.jsonl", '"epoch": 2,')
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err.count("\n") == 1
    assert err.startswith("ncf: interrupted; epochs 1 to ")
    assert "--resume" in err


def test_a_second_trainer_is_kept_out(spawn, tiny_data, tmp_path):
    command = ["train", "--data", tiny_data, *OPTIONS, "--checkpoint-dir", "run"]
    first = spawn(*command, "-e", 100000)
    wait_for(tmp_path / "run" / "metrics.jsonl", '"epoch": 1,')
    second = spawn(*command, "-e", 1, "--overwrite")
    _, err = second.communicate(timeout=60)
    first.kill()
    first.communicate()
    assert second.returncode == 2
    assert err.startswith("ncf: error: run is in use by another `ncf train`")


def test_a_pipe_that_closes_early_is_no_error(spawn, tiny_run):
    run = spawn("recommend", "--checkpoint-dir", tiny_run, "--all", "-k", 50, "--format", "csv")
    run.stdout.readline()
    run.stdout.close()
    assert "Traceback" not in run.stderr.read()
    run.stderr.close()
    run.wait(timeout=60)


@pytest.mark.parametrize("limit", [200, 20_000])
def test_a_full_disk_in_mid_write(tiny_data, tmp_path, limit):
    """RLIMIT_FSIZE stands in for the full disk: no file may grow beyond it."""
    run = subprocess.run(
        [sys.executable, "-m", "ncf", "train", "--data", tiny_data, "--checkpoint-dir", "run", "-e", "2", *OPTIONS],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("ncf: error: cannot write run/")
    assert run.stderr.count("\n") == 1
    left = {file.name for file in (tmp_path / "run").iterdir()}
    assert "last.safetensors" not in left
    assert not {name for name in left if name.endswith(".tmp")}
    if "best.safetensors" in left:
        RunDirectory.open(tmp_path / "run").load("best")
