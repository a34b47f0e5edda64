import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ncf.cli import main

SMALL = ["--factors", "8", "--layers", "16", "8", "--valid-negative", "12", "--device", "cpu"]
OURS = ("RANK", "WORLD", "LOCAL_", "MASTER_", "OMPI_", "TORCHELASTIC")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a Python program in a group of its own, which does not outlive the test."""
    started: list[subprocess.Popen] = []

    def begin(*arguments: object, program: tuple[str, ...] = (sys.executable,), **environ: object) -> subprocess.Popen:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        process = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
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
def data(tmp_path_factory) -> Path:
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
def run(data, tmp_path_factory) -> Path:
    """A run on `data` of one process."""
    path = tmp_path_factory.mktemp("runs") / "one"
    assert main(["train", "--data", str(data), "--checkpoint-dir", str(path), "-e", "2", *SMALL]) == 0
    return path
