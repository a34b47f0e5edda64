"""Training by real launchers: `--devices`, torchrun over two hosts, mpirun; kills, Ctrl-C, restarts, resuming."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ncf.cli import main
from ncf.runs.run import RunDirectory

NCF = [sys.executable, "-m", "ncf"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Start = Callable[..., subprocess.Popen[str]]


def epochs(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_epochs(path: Path, count: int, seconds: float = 100) -> None:
    until = time.monotonic() + seconds
    while epochs(path) < count:
        assert time.monotonic() < until, f"{path} has {epochs(path)} epochs"
        time.sleep(0.05)


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Rank -> process id, of the processes that a launcher started."""
    found = {}
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for pid, parent in map(str.split, listing.splitlines()):
        if int(parent) == launcher.pid:
            environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found.update({int(one.removeprefix("RANK=")): int(pid) for one in environ if one.startswith("RANK=")})
    return found


def test_devices_kill_ctrl_c_and_resume_with_another_number(start: Start, train: list[str], tmp_path: Path) -> None:
    path, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    command = [*NCF, *train, "--checkpoint-dir", path, "-e", 100_000, "--resume", "--devices"]
    three = start(*command, 3, folder=tmp_path, TMPDIR=temporary)
    wait_for_epochs(path, 3)
    ranks = ranks_of(three)
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    out, err = three.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert three.returncode == 1
    assert re.search("^ncf: error: rank 1 was killed by SIGKILL .*--resume$", err, re.MULTILINE)
    assert all(line.startswith("ncf: ") for line in err.splitlines())
    assert out.count("New Best Epoch: 01") == 1
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks.values())
    done = RunDirectory.open(path).load("last")[1]["epoch"]
    assert done >= 2

    two = start(*command, 2, folder=tmp_path, TMPDIR=temporary)
    wait_for_epochs(path, done + 3)
    two.send_signal(signal.SIGINT)
    _, err = two.communicate(timeout=60)
    assert two.returncode == 130
    said = re.fullmatch("ncf: rank 0: interrupted; epochs 1 to ([0-9]+) are saved in .*--resume\n", err)
    assert said, err
    assert list(temporary.iterdir()) == []

    done = int(said[1])
    assert main([*train, "--checkpoint-dir", str(path), "-e", str(done + 1), "--resume"]) == 0
    assert epochs(path) == done + 1


def test_torchrun_on_two_hosts_restarts_and_mpirun_gives_the_same_bits(
    start: Start, free_ports: Iterator[int], train: list[str], tmp_path: Path
) -> None:
    """As docs/scaling.md, section 5, says, on loopback, where a rank of the second host is killed; undisturbed, then.

    Both train the model to deploy too.
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    options = [*train, "-e", 20, "-b", 100, "--fit-all", "--checkpoint-dir"]
    address = ["--master-addr", "127.0.0.1", "--master-port", next(free_ports)]
    nodes = [
        start(
            *[*TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", 1, "--max-restarts", 1, *address],
            *["-m", "ncf", *options, "killed"],
            folder=tmp_path,
            TMPDIR=tmp_path,
        )
        for node in range(2)
    ]
    mpirun = ["mpirun", "-np", 2, "--oversubscribe", *NCF, *options, "whole"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    whole = start(*mpirun, folder=tmp_path, TMPDIR=temporary, **root) if shutil.which("mpirun") else None
    wait_for_epochs(tmp_path / "killed", 2)
    os.kill(ranks_of(nodes[1])[1], signal.SIGKILL)
    outputs = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    out = outputs[0][0]
    assert out.count("Epoch: 01,") == out.count("Model: killed") == 1
    assert "Deploy: trained on all 90 interactions" in out
    assert outputs[1][0] == ""
    assert epochs(tmp_path / "killed") == 20

    if whole is None:
        pytest.skip("Open MPI's mpirun is not installed; what torchrun does was checked")
    out, err = whole.communicate(timeout=60)
    assert (whole.returncode, err) == (0, "")
    assert out.count("New Best Epoch: 01") == out.count("Model: whole") == 1
    assert not [file for file in temporary.rglob("*") if file.is_file()]
    for name in ("best", "last", "deploy"):
        ours, theirs = (RunDirectory.open(tmp_path / run).load(name)[0] for run in ("killed", "whole"))
        assert all(tensor.equal(theirs[key]) for key, tensor in ours.items())
