import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ncf import launch, meeting
from ncf.cli import main
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError, RunError
from ncf.launch import LOST, Place, place_here
from ncf.meeting import join
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


def test_two_hosts_on_loopback(start, data, free_port, tmp_path):
    nodes = [
        start(
            *["--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1],
            *["--master-addr", "127.0.0.1", "--master-port", free_port, "-m", "ncf"],
            *[*TRAIN, "--data", data, "-e", 2, "--checkpoint-dir", "run"],
            program=TORCHRUN,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=80) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0].count("Model: run") == 1
    assert outputs[1][0] == ""


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


@pytest.mark.parametrize("rank", [0, 1])
def test_one_who_does_not_come_is_named(free_port, rank):
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "NCF_JOIN_SECONDS": "0.5"}
    expected = "1 of 2 processes came within 0.5 s: missing rank 1" if rank == 0 else "rank 1: no answer at 127.0.0.1"
    start = time.monotonic()
    with pytest.raises(RunError, match=expected), join(Place(rank, 2), environ=environ):
        pass
    assert time.monotonic() - start < 5


def test_a_port_in_use_is_named(free_port):
    with socket.socket() as other:
        other.bind(("0.0.0.0", free_port))
        other.listen()
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "NCF_JOIN_SECONDS": "1"}
        with pytest.raises(RunError, match=f"port {free_port}: it is in use"), join(Place(0, 2), environ=environ):
            pass


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "2 processes need MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "no"}, "MASTER_PORT must be a port: got 'no'"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "NCF_JOIN_SECONDS": "soon"}, "number of seconds: got 'soon'"),
    ],
)
def test_an_environment_that_cannot_be(environ, message):
    with pytest.raises(InputError, match=message), join(Place(0, 2), environ=environ):
        pass


def test_mpirun_over_several_hosts_needs_an_address():
    with pytest.raises(InputError, match="mpirun -x MASTER_ADDR"), join(Place(0, 4, 0, 2, mpi=True), environ={}):
        pass


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place()),
        ({"RANK": "1", "WORLD_SIZE": "3"}, Place(1, 3, 1, 3)),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(5, 6, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}, Place(0, 2, 0, 2, restarts=3)),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "ncf-1"}, Place(0, 2, 0, 2, ours=True)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Place(3, 4, 1, 2, mpi=True),
        ),
    ],
)
def test_a_process_knows_its_place(environ, place):
    assert place_here(environ) == place


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "below how many there are: got RANK=2, WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, at least 0: got 'x'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE must be"),
    ],
)
def test_a_place_that_cannot_be(environ, message):
    with pytest.raises(InputError, match=message):
        place_here(environ)


def test_devices_inside_a_launcher(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "_current", ALONE)  # of an earlier test that did not meet
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    assert main(["train", "--data", "nowhere", "--devices", "2"]) == 2
    assert "--devices 2 starts processes, and this is one of 2 already" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "--data", "nowhere", "--devices", "2"]) == 2
    assert capsys.readouterr().err == ""


def failed(exitcode: int, timestamp: float = 0) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp)


def test_the_launchers_status_is_that_of_the_first_rank_that_spoke():
    assert launch._status({0: failed(LOST, 1), 1: failed(2, 3), 2: failed(-signal.SIGTERM, 2)}) == 2
    assert launch._status({0: failed(1, 4), 1: failed(2, 3)}) == 2
    with pytest.raises(RunError, match="rank 2 was killed by SIGKILL"):
        launch._status({0: failed(LOST, 1), 1: failed(-signal.SIGTERM, 0), 2: failed(-signal.SIGKILL, 2)})
    with pytest.raises(RunError, match="lost each other"):
        launch._status({0: failed(LOST)})


def test_processes_on_one_machine_share_its_cores(monkeypatch):
    import torch

    from ncf import device

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "physical_cores", lambda: 8)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    ranks = Ranks(1, 4, local_rank=1, local_world=4)
    for share in (1, 3, 16):
        ranks.share = share
        device.pick_device("cpu", ranks)
    device.pick_device("cpu", ALONE)
    assert threads == [8, 2, 1, 8]
