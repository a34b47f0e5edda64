"""Processes that a person starts by hand, and what each says where they cannot work together.

All scenarios run at once, and each test looks at one of them.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ncf.cli import main

SECONDS = 3  # NCF_JOIN_SECONDS

DIES_EARLY = """
import os, runpy, torch.distributed
torch.distributed.init_process_group = lambda *_, **__: os._exit(9)
runpy.run_module("ncf", run_name="__main__")
"""

Ended = dict[str, list[dict[str, Any]]]  # scenario -> how each process ended


@pytest.fixture(scope="module")
def ended(
    fork: Callable[..., dict[str, Any]],
    free_ports: Iterator[int],
    train: list[str],
    run: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Ended:
    folder = tmp_path_factory.mktemp("scenarios")
    (folder / "dies_early.py").write_text(DIES_EARLY)
    trains, evaluates = ["ncf", *train], ["ncf", "evaluate", "--checkpoint-dir", run, "--json"]
    scenarios: dict[str, list[tuple[int, int, list[Any]]]] = {  # rank, world size and command of each process
        "rank 1 never starts": [(0, 2, trains)],
        "rank 0 never starts": [(1, 2, trains)],
        "port in use": [(0, 2, trains), (1, 2, trains)],
        "two world sizes": [(0, 2, trains), (1, 3, trains)],
        "rank 1 twice": [(0, 3, trains), (1, 3, trains), (1, 3, trains)],
        "rank 1 cannot load": [(0, 2, trains), (1, 2, [*trains, "--data", "nowhere"])],
        "rank 1 dies early": [(0, 2, trains), (1, 2, ["dies_early.py", *train])],
        "evaluation": [(0, 2, evaluates), (1, 2, evaluates)],
    }
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", next(free_ports)))
        silent.listen()
        processes = {}
        for name, ranks in scenarios.items():
            port = silent.getsockname()[1] if name == "port in use" else next(free_ports)
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCF_JOIN_SECONDS": SECONDS}
            for place, (rank, world, command) in enumerate(ranks):
                processes[f"{name} {place}"] = common | {"RANK": rank, "WORLD_SIZE": world}, command
        found = fork(folder, processes, "ncf.recommender")
    return {name: [found[f"{name} {place}"] for place in range(len(ranks))] for name, ranks in scenarios.items()}


@pytest.mark.parametrize(
    ("scenario", "highest", "words"),  # the highest exit status, and what some process says
    [
        ("rank 1 never starts", 1, ["rank 0: error: .*did not connect within 3 s.*rank 1 is missing"]),
        ("rank 0 never starts", 1, ["rank 1: error: .*did not connect within 3 s.*MASTER_PORT=[0-9]"]),
        ("port in use", 1, ["rank 0: error: .*address already in use", "rank 1: error: .*did not connect"]),
        ("two world sizes", 2, ["world size 2 and rank 1 has 3|world size 3 and rank 0 has 2"]),
        ("rank 1 twice", 2, ["rank 1: error: two processes have rank 1", "rank 0: error: .*rank 2 is missing"]),
        ("rank 1 cannot load", 2, ["rank 0: error: another process .*gone", "rank 1: error: nowhere is not"]),
        ("rank 1 dies early", 9, ["rank 0: error: .*did not connect"]),
    ],
)
def test_each_process_ends_soon_with_one_line(ended: Ended, scenario: str, highest: int, words: list[str]) -> None:
    processes = ended[scenario]
    assert max(process["status"] for process in processes) == highest
    for process in processes:
        assert process["status"] in (1, 2, 9)
        assert process["out"] == ""
        assert re.fullmatch("ncf: rank [0-9]: error: .*\n", process["err"]) or process["status"] == 9
        assert process["seconds"] < 5 * SECONDS
    for one in words:
        assert any(re.search(one, process["err"]) for process in processes)


def test_two_processes_evaluate_as_one_does(ended: Ended, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--checkpoint-dir", str(run), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    first, second = ended["evaluation"]
    assert (json.loads(first["out"]), first["err"], first["status"]) == (expected, "", 0)
    assert (second["out"], second["err"], second["status"]) == ("", "", 0)
