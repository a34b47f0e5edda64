"""Which of several processes this is, and what a command says where it cannot be one of them."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ncf import device
from ncf.cli import main
from ncf.errors import InputError, RunError
from ncf.parallel import launch
from ncf.parallel.environment import ProcessEnv, process_env
from ncf.parallel.group import SINGLE, ProcessGroup, join

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ProcessEnv()),
        ({"RANK": "1", "WORLD_SIZE": "3"}, ProcessEnv(1, 3, 1, 3)),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, ProcessEnv(5, 6, 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}, ProcessEnv(0, 2, 0, 2, restarts=3)),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "ncf-1"}, ProcessEnv(0, 2, 0, 2, launched=True)),
        ({"RANK": "0", "WORLD_SIZE": "2", "NCF_JOIN_SECONDS": "5"}, ProcessEnv(0, 2, 0, 2, join_seconds=5)),
        (OPEN_MPI, ProcessEnv(3, 4, 1, 2, mpi=True)),
    ],
)
def test_a_process_reads_its_rank(environ: dict[str, str], expected: ProcessEnv) -> None:
    assert process_env(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be .* got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "NCF_JOIN_SECONDS": "soon"}, "NCF_JOIN_SECONDS must be .* got 'soon'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE must be"),
    ],
)
def test_numbers_that_cannot_be(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        process_env(environ)


@pytest.mark.parametrize(
    ("env", "environ", "message"),
    [
        (ProcessEnv(0, 2), {}, "MASTER_ADDR and MASTER_PORT"),
        (ProcessEnv(0, 2), {"MASTER_ADDR": "localhost", "MASTER_PORT": "no"}, "MASTER_PORT .* 'no'"),
        (ProcessEnv(1, 2), {"MASTER_ADDR": "localhost", "MASTER_PORT": "65536"}, "MASTER_PORT .* '65536'"),
        (ProcessEnv(0, 4, 0, 2, mpi=True), {}, "mpirun -x MASTER_ADDR"),
    ],
)
def test_an_address_that_is_missing(env: ProcessEnv, environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message), join(env, environ=environ):
        pass


@pytest.mark.parametrize(
    "command",
    [["prepare", "log.csv"], ["recommend", "--checkpoint-dir", "run", "--all"], ["benchmark"], ["doctor"]],
    ids=lambda command: command[0],
)
def test_a_command_of_one_process_among_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")  # main would set it for good
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 2
    assert f"`ncf {command[0]}` runs in one process, and 4 were started" in capsys.readouterr().err


def test_devices_inside_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--data", str(data), "--devices", "2"]) == 2
    assert "--devices 2 starts processes, and this is one of 2 already" in capsys.readouterr().err


def failed(exitcode: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode)


def test_the_launchers_status_is_that_of_the_process_that_failed_first() -> None:
    """The launcher ends the others with SIGTERM, or they end with 1 as they lost that process."""
    assert launch._status({0: failed(1), 1: failed(2), 2: failed(-signal.SIGTERM)}) == 2
    assert launch._status({0: failed(-signal.SIGTERM), 1: failed(1)}) == 1
    for statuses in ([1, -signal.SIGTERM, -signal.SIGSEGV], [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGSEGV]):
        with pytest.raises(RunError, match="rank 2 was killed by SIGSEGV"):
            launch._status(dict(enumerate(map(failed, statuses))))
    with pytest.raises(RunError, match="rank 1 was killed by SIGTERM"):
        launch._status({1: failed(-signal.SIGTERM), 0: failed(-signal.SIGTERM)})


def test_any_name_of_a_gpu_takes_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {device.backend_for(name) for name in ("auto", "cuda", "cuda:0")} == {"cpu:gloo,cuda:nccl"}
    assert device.backend_for("cpu") == "gloo"


def test_processes_on_the_same_cores_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "physical_cores", lambda: 8)
    group = ProcessGroup(ProcessEnv(1, 4, 1, 4))
    before = torch.get_num_threads()
    for share, threads in ((1, 8), (3, 2), (16, 1)):
        group.share = share
        with device.configured(torch.device("cpu"), group):
            assert torch.get_num_threads() == threads
    with device.configured(torch.device("cpu"), SINGLE):
        assert torch.get_num_threads() == 8
    assert torch.get_num_threads() == before
