"""Several processes for one run: which of them this is, and how `--devices N` starts them.

    torchrun --nproc-per-node 4 -m ncf train --data data/ml-20m
    mpirun -np 4 ncf train --data data/ml-20m
    ncf train --data data/ml-20m --devices 4

Nothing here imports torch before it is needed: a process reads its place from the environment first.
"""

import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ncf.errors import InputError, RunError

OURS = "ncf-"  # how the run ids of processes that `--devices` started begin
LOST = 75  # exit status of a process that says nothing, as it only lost another one; the launcher knows which
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """Which process this is, among how many, over all hosts and on its own."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    mpi: bool = False
    restarts: int = 0  # how often torchrun has started the processes anew after a failure
    ours: bool = False  # started by `--devices`


def place_here(environ: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, as torchrun, Open MPI or a person wrote it into the environment; alone otherwise.

    Raises InputError for numbers that cannot be.
    """
    names = TORCHRUN if {"RANK", "WORLD_SIZE"} <= set(environ) else OPEN_MPI
    if names[0] not in environ:
        return Place()
    rank, world = (_number(environ, name) for name in names[:2])
    local_rank, local_world = (
        _number(environ, name, alone) for name, alone in zip(names[2:], (rank, world), strict=True)
    )
    if not (rank < world and local_rank < local_world <= world):
        shown = ", ".join(f"{name}={environ.get(name, '-')}" for name in names)
        raise InputError(f"a process's number must be below how many there are: got {shown}")
    return Place(
        rank,
        world,
        local_rank,
        local_world,
        mpi=names is OPEN_MPI,
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        ours=environ.get("TORCHELASTIC_RUN_ID", "").startswith(OURS),
    )


def launch(devices: int, arguments: Sequence[str]) -> int:
    """Run `ncf` with `arguments` in `devices` processes on this machine; the exit status of the first that failed.

    Torch's elastic launcher starts them, and ends all where one ends badly. A process says itself what went wrong;
    for one that cannot, as it was killed, RunError says so.
    """
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415 - seconds, which only this takes
        DefaultLogsSpecs,
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    logging.disable(logging.CRITICAL)  # this process does nothing else, and the launcher's noise would hide our line
    with tempfile.TemporaryDirectory(prefix="ncf-launch-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=OURS + secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=10,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "ncf", *arguments)
        except ChildFailedError as error:
            return _status(error.failures)
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                return 130  # rank 0 has said what is saved
            raise RunError(f"ended by {error.sigval.name}; go on from the last saved epoch with --resume") from None
    return 0


def _status(failures: Mapping[int, Any]) -> int:
    """The exit status of processes that failed, by rank. Raises RunError where none of them could say why."""
    own = {rank: one.exitcode for rank, one in failures.items() if one.exitcode > 0 and one.exitcode != LOST}
    if own:
        first = min(own, key=lambda rank: (failures[rank].timestamp, rank))
        return int(own[first])
    # The launcher ends the others with SIGTERM, and they are reported too.
    killed = {rank: -one.exitcode for rank, one in failures.items() if one.exitcode < 0}
    rank = min(killed, key=lambda rank: (killed[rank] == signal.SIGTERM, failures[rank].timestamp, rank), default=None)
    if rank is None:
        raise RunError("the processes lost each other; go on with --resume")
    name = signal.Signals(killed[rank]).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    raise RunError(f"rank {rank} was killed by {name}{hint}, and the run ended with it; go on with --resume")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise InputError(f"the environment's {name} must be a whole number, at least 0: got {text!r}")
    return int(text)
