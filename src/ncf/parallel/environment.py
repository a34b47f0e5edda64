"""Which of several processes this is, as torchrun, Open MPI or a person wrote it into the environment.

    torchrun --nproc-per-node 4 -m ncf train --data data/ml-20m
    mpirun -np 4 ncf train --data data/ml-20m
    ncf train --data data/ml-20m --devices 4

Nothing here imports torch, so that a command can fail before that takes a second.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ncf.errors import InputError

LAUNCHED = "ncf-"  # how the run ids of processes that `--devices` started begin
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class ProcessEnv:
    """The rank of this process and the number of processes, over all hosts and on its own."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    mpi: bool = False
    restarts: int = 0  # how often torchrun has started the processes anew after a failure
    launched: bool = False  # by `--devices`
    join_seconds: int = 60  # for all processes to start


def process_env(environ: Mapping[str, str] = os.environ) -> ProcessEnv:
    """Read the environment; a single process where it says nothing. Raises InputError for impossible numbers."""
    names = TORCHRUN if {"RANK", "WORLD_SIZE"} <= set(environ) else OPEN_MPI
    if names[0] not in environ:
        return ProcessEnv()
    rank, world = (_number(environ, name) for name in names[:2])
    local_rank, local_world = _number(environ, names[2], rank), _number(environ, names[3], world)
    if not (rank < world and local_rank < local_world <= world):
        shown = ", ".join(f"{name}={environ.get(name, '-')}" for name in names)
        raise InputError(f"a rank must be below the number of processes: got {shown}")
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    launched = environ.get("TORCHELASTIC_RUN_ID", "").startswith(LAUNCHED)
    join_seconds = _number(environ, "NCF_JOIN_SECONDS", ProcessEnv.join_seconds)
    return ProcessEnv(rank, world, local_rank, local_world, names is OPEN_MPI, restarts, launched, join_seconds)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise InputError(f"the environment's {name} must be a whole number, at least 0: got {text!r}")
    return int(text)
