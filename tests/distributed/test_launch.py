import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncf.cli import main
from ncf.model.checkpoint import Run

TRAIN = ["train", "--factors", "8", "--layers", "16", "8", "--valid-negative", "12", "--device", "cpu"]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PYTHON = (sys.executable, "-m", "ncf")


def wait_for(path, text, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} never said {text}")


def ranks_of(parent: int) -> dict[int, int]:
    """Rank -> process id, of the processes that a launcher started."""
    found = {}
    for line in subprocess.run(
        ["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        pid, ppid = line.split()
        if ppid == str(parent):
            content = Path(f"/proc/{pid}/environ").read_text()
            names = dict(one.split("=", 1) for one in content.split("\0") if "=" in one)
            found[int(names["RANK"])] = int(pid)
    return found


OUT_OF_MEMORY = """
import os, sys
from ncf.cli import main
from ncf.training.trainer import Trainer

def fail(self, number, *, epoch=Trainer.epoch, **options):
    if number == 2 and os.environ["RANK"] == "1":
        raise MemoryError
    return epoch(self, number, **options)

Trainer.epoch = fail
sys.exit(main(sys.argv[1:]))
"""


def epochs(path) -> int:
    return len((path / "metrics.jsonl").read_text().splitlines())


def test_train_on_three_kill_one_resume_on_one_evaluate_on_two(start, data, tmp_path, capsys):
    path = tmp_path / "run"
    train = start(*TRAIN, "--data", data, "--checkpoint-dir", path, "--devices", 3, "-e", 100_000, program=PYTHON)
    wait_for(path / "metrics.jsonl", '"epoch": 3,')
    os.kill(ranks_of(train.pid)[1], signal.SIGKILL)
    killed = time.monotonic()
    out, err = train.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert train.returncode == 1
    assert (
        err
        == "ncf: error: rank 1 was killed by SIGKILL (out of memory?), and the run ended with it; go on with --resume\n"
    )
    assert out.count("New Best Epoch: 01") == 1
    done = Run.open(path).load("last")[1]["epoch"]
    assert done >= 2

    command = [*TRAIN, "--data", str(data), "--checkpoint-dir", str(path), "-e", str(done + 2), "--resume"]
    assert main(command) == 0
    assert epochs(path) == done + 2
    capsys.readouterr()
    assert main(["evaluate", "--checkpoint-dir", str(path), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    evaluation = start("evaluate", "--checkpoint-dir", path, "--json", "--devices", 2, program=PYTHON)
    out, err = evaluation.communicate(timeout=60)
    assert (json.loads(out), err) == (expected, "")


def test_torchrun_starts_again_and_mpirun_gives_the_same_bits(start, data, tmp_path):
    """A rank is killed under torchrun, which resumes; a run under mpirun is never disturbed. Both with --fit-all."""
    options = [*TRAIN, "--data", data, "-e", 8, "-b", 100, "--fit-all", "--overwrite", "--checkpoint-dir"]
    path = tmp_path / "killed"
    command = ["--nproc-per-node", 2, "--max-restarts", 1, "-m", "ncf", *options, path]
    run = start(*command, program=TORCHRUN)
    wait_for(path / "metrics.jsonl", '"epoch": 2,')
    os.kill(ranks_of(run.pid)[0], signal.SIGKILL)
    out, err = run.communicate(timeout=80)
    assert run.returncode == 0, err
    assert out.count("Epoch: 01,") == 1
    assert "Deploy: trained on all 90 interactions" in out
    assert epochs(path) == 8
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI's mpirun is not installed; what torchrun does was checked")
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    whole = start("-np", 2, "--oversubscribe", *PYTHON, *options, "whole", program=("mpirun",), **allow)
    out, err = whole.communicate(timeout=60)
    assert (whole.returncode, err) == (0, "")
    assert out.count("Model: whole") == out.count("New Best Epoch: 01") == 1
    for name in ("best", "last", "deploy"):
        ours, theirs = (Run.open(one).load(name)[0] for one in (path, tmp_path / "whole"))
        assert all(tensor.equal(theirs[key]) for key, tensor in ours.items())


def test_two_hosts_on_loopback_start_again(start, data, free_port, tmp_path):
    """As docs/scaling.md, section 5, says; a rank of the second host is killed."""
    nodes = [
        start(
            *["--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1, "--max-restarts", 1],
            *["--master-addr", "127.0.0.1", "--master-port", free_port, "-m", "ncf"],
            *[*TRAIN, "--data", data, "-e", 10, "-b", 100, "--checkpoint-dir", "run"],
            program=TORCHRUN,
        )
        for node in range(2)
    ]
    wait_for(tmp_path / "run" / "metrics.jsonl", '"epoch": 2,')
    os.kill(ranks_of(nodes[1].pid)[1], signal.SIGKILL)
    outputs = [node.communicate(timeout=80) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0].count("Model: run") == outputs[0][0].count("New Best Epoch: 01") == 1
    assert "exitcode: -9" in outputs[1][1]
    assert outputs[1][0] == ""
    assert epochs(tmp_path / "run") == 10


def test_a_rank_that_fails_to_load_says_so_and_ends_the_others(start, data, free_port):
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    ranks = [
        start(*TRAIN, "--data", where, program=PYTHON, RANK=rank, **common) for rank, where in enumerate((data, "no"))
    ]
    (_, first), (_, second) = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 2]
    assert first == ""
    assert second.startswith("ncf: error: rank 1: no is not a directory that exists")
    assert second.count("\n") == 1


def test_what_all_ranks_meet_rank_0_says_once(start, data, free_port):
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    ranks = [start(*TRAIN, "--data", data, "--layers", 15, 8, program=PYTHON, RANK=rank, **common) for rank in range(2)]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert re.fullmatch("ncf: error: --layers must be none, or .*\n", outputs[0][1])
    assert outputs[1] == ("", "")


def test_a_rank_out_of_memory_ends_all_with_one_line(start, data, free_port):
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
    common |= {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # as `ncf` sets it, but before this program imports torch
    command = [*TRAIN, "--data", data, "-e", 3]
    ranks = [start("-c", OUT_OF_MEMORY, *command, RANK=rank, **common) for rank in range(2)]
    (out, first), (_, second) = (rank.communicate(timeout=60) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert out.count("New Best Epoch: 01") == 1
    assert first == ""
    assert re.fullmatch("ncf: error: rank 1: out of memory: use a larger device.*\n", second)


def test_processes_of_two_world_sizes_end_soon(start, data, free_port):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port, "NCF_JOIN_SECONDS": 10}
    unequal = [
        start(*TRAIN, "--data", data, program=PYTHON, RANK=rank, WORLD_SIZE=2 + rank, **common) for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=40) for rank in unequal]
    assert [rank.returncode for rank in unequal] == [2, 2]
    assert outputs == [("", "ncf: error: rank 0 is one of 2 processes and rank 1 one of 3\n"), ("", "")]


def test_mpirun_of_a_command_of_one_process_says_one_line(start):
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI's mpirun is not installed")
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    run = start("-np", 4, "--oversubscribe", *PYTHON, "doctor", program=("mpirun",), **allow)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 2
    assert out == ""
    assert err.count("ncf: error: `ncf doctor` is the work of one process") == err.count("ncf: ") == 1
