"""Who a process is, whom it meets, and what it says where that cannot be; all in this process."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from ncf import launch, meeting
from ncf.cli import main
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError, RunError
from ncf.launch import LOST, Place, place_here
from ncf.meeting import join


@pytest.mark.parametrize("rank", [0, 1])
def test_one_who_does_not_come_is_named(free_port, rank):
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "NCF_JOIN_SECONDS": "0.5"}
    expected = "1 of 2 processes came within 0.5 s: missing rank 1" if rank == 0 else "rank 1: no answer at 127.0.0.1"
    start = time.monotonic()
    with pytest.raises(RunError, match=expected), join(Place(rank, 2), environ=environ):
        pass
    assert time.monotonic() - start < 5


def test_two_processes_of_one_rank_end_soon():
    store = torch.distributed.HashStore()

    def gather(rank: int) -> str:
        try:
            meeting._gather_all(Ranks(rank, 3, joined=True, store=store), 0.5)
        except (InputError, RunError) as error:
            return str(error)
        return "all came"

    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(gather, (0, 1, 1))
    assert time.monotonic() - start < 5
    missing = "2 of 3 processes came within 0.5 s: missing rank 2; start as many as the world size says"
    assert first == missing
    assert sorted(others) == [missing, "two processes are rank 1 of 3: give each its own"]


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


@pytest.mark.parametrize("command", ["prepare log.csv", "recommend --checkpoint-dir run --all", "benchmark", "doctor"])
def test_a_command_of_one_process_among_several(monkeypatch, capsys, command):
    monkeypatch.setattr(meeting, "_current", ALONE)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    said = []
    for rank in "03":
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        assert main(command.split()) == 2
        said.append(capsys.readouterr().err)
    name = command.split()[0]
    line = f"ncf: error: `ncf {name}` is the work of one process, and this is one of 4: start it by itself\n"
    assert said == [line, ""]


def test_any_name_of_a_gpu_takes_nccl(monkeypatch):
    from ncf.device import backend_for

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {backend_for(name) for name in ("auto", "cuda", "cuda:0")} == {"cpu:gloo,cuda:nccl"}
    assert backend_for("cpu") == "gloo"


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
