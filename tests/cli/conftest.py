import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ncf.cli import main

SMALL = ["--recipe", "nvidia", "--factors", "8", "--layers", "16", "8", "--valid-negative", "20", "--device", "cpu"]


@pytest.fixture
def ncf(capsys, monkeypatch, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process, in a folder of its own: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def spawn(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command in a process of its own, which does not outlive the test."""
    started: list[subprocess.Popen] = []

    def start(*arguments: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "ncf", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()


@pytest.fixture(scope="session")
def tiny_log(tmp_path_factory) -> Path:
    """TINY as a CSV: 40 users (ids 1 to 40) with 8 random items of 60 each, distinct timestamps."""
    rng = np.random.default_rng(0)
    rows = [(user + 1, int(item)) for user in range(40) for item in rng.choice(60, 8, replace=False)]
    path = tmp_path_factory.mktemp("logs") / "tiny.csv"
    lines = [f"{user},{item},{1000 + place}" for place, (user, item) in enumerate(rows)]
    path.write_text("userId,movieId,timestamp\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_data(tiny_log, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tiny"
    assert main(["prepare", str(tiny_log), "-o", str(path), "--min-ratings", "1"]) == 0
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", "--data", str(tiny_data), "--checkpoint-dir", str(path), "-e", "3", *SMALL]) == 0
    return path
