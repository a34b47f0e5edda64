import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ncf.cli import main
from ncf.parallel.group import ProcessGroup

SMALL = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "12", "--device", "cpu"]
INHERITED = ("RANK", "WORLD", "LOCAL_", "MASTER_", "OMPI_", "TORCHELASTIC")  # of a launcher that runs the tests
FORKED = Path(__file__).with_name("forked.py")


@pytest.fixture(scope="session")
def free_ports() -> Iterator[int]:
    """Ports of 127.0.0.1 below those that the system gives away, so that nobody else takes them meanwhile."""

    def is_free(port: int) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) != 0

    return filter(is_free, random.sample(range(20_000, 30_000), 1000))


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program in a process group of its own, which does not outlive the tests."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: object, folder: Path, **environ: object) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=kept | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in environ.items()},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="session")
def fork(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., dict[str, Any]]:
    """Run `forked.py`: name -> (environment, arguments) becomes name -> exit status, output and seconds."""

    def run(
        folder: Path, processes: dict[str, tuple[dict[str, object], list[object]]], *modules: str
    ) -> dict[str, Any]:
        wanted = {
            name: {"environ": {key: str(value) for key, value in environ.items()}, "arguments": [*map(str, arguments)]}
            for name, (environ, arguments) in processes.items()
        }
        process = start(sys.executable, FORKED, *modules, folder=folder, TORCH_CPP_LOG_LEVEL="FATAL")
        out, err = process.communicate(json.dumps(wanted), timeout=100)
        assert process.returncode == 0, err
        return dict(json.loads(out))

    return run


@pytest.fixture
def one_rank() -> Iterator[ProcessGroup]:
    """A process group of this process alone, with collectives that send nothing."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield ProcessGroup(connected=True)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """7 users, of whom the first has a third of all interactions; 60 items; titles."""
    rng = np.random.default_rng(0)
    lines = ["user,item,time"]
    for user, count in enumerate([30, 8, 9, 10, 11, 12, 10]):
        lines += [f"{user},{item},{place}" for place, item in enumerate(rng.choice(60, count, replace=False))]
    folder = tmp_path_factory.mktemp("seven")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "names.csv").write_text("item,title\n" + "\n".join(f"{item},Item {item}" for item in range(60)) + "\n")
    command = ["prepare", folder / "log.csv", "-o", folder / "data", "--min-ratings", 1]
    assert main([*map(str, command), "--item-names", str(folder / "names.csv")]) == 0
    return folder / "data"


@pytest.fixture(scope="session")
def train(data: Path) -> list[str]:
    """`train` on `data` with a small network; all but the run's directory."""
    return ["train", "--data", str(data), *SMALL]


@pytest.fixture(scope="session")
def run(train: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on `data` of one process."""
    path = tmp_path_factory.mktemp("runs") / "one"
    assert main([*train, "--checkpoint-dir", str(path), "-e", "2"]) == 0
    return path
