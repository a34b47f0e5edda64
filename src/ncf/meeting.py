"""How the processes of a run find each other, and who of them says what went wrong."""

import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ncf.distributed import ALONE, LostRankError, Ranks, first_line
from ncf.errors import InputError, RunError
from ncf.launch import LOST, Place

JOIN_SECONDS = 60.0  # for all processes to come; NCF_JOIN_SECONDS says otherwise
ANSWER_MINUTES = 30  # for a process that is alive to answer, such as one that writes a large checkpoint

_current = ALONE


def spoken(place: Place, message: str, error: BaseException) -> str | None:
    """What the process at `place` should print of its error, joined with the others or not."""
    if _current.store is not None:
        return _current.spoken(message, error)
    return message if place.rank == 0 or isinstance(error, UnmetRankError) else None


def status_of(status: int, error: BaseException) -> int:
    """The exit status, which tells the launcher of `--devices` where this process only lost another one."""
    return LOST if isinstance(error, LostRankError) and _current.ours else status


@contextmanager
def join(place: Place, backend: str = "gloo", environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Meet the other processes, and part at the end; alone, there is nobody to meet.

    `backend` is `gloo`, or for CUDA `cpu:gloo,cuda:nccl`. Raises InputError where the processes do not fit together,
    RunError where one does not come.
    """
    global _current  # noqa: PLW0603 - as torch's own process group is: one a process
    if place.world == 1:
        yield ALONE
        return
    store, serves = _open_store(place, environ)
    ranks = Ranks(
        place.rank,
        place.world,
        joined=True,
        store=PrefixStore(f"ncf/{place.restarts}", store),
        local_rank=place.local_rank,
        local_world=place.local_world,
        ours=place.ours,
        serves=serves,
    )
    _current = ranks
    _gather_all(ranks, _seconds(environ))
    connect(ranks, backend)
    ranks.share = _sharing(ranks)
    yield ranks
    ranks.wait()
    dist.destroy_process_group()
    _current = ALONE


def connect(ranks: Ranks, backend: str) -> None:
    """Make torch's process group, over the ranks' store."""
    minutes = timedelta(minutes=ANSWER_MINUTES)
    store = PrefixStore("group", ranks.store)
    try:
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=minutes)
    except RuntimeError as error:
        raise LostRankError(f"the processes cannot reach each other: {first_line(error)}") from error


def _seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("NCF_JOIN_SECONDS", str(JOIN_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise InputError(f"the environment's NCF_JOIN_SECONDS must be a number of seconds: got {text!r}") from None


def _open_store(place: Place, environ: Mapping[str, str]) -> tuple[Any, bool]:
    """Where the processes find each other, and whether this one serves it.

    It is torchrun's store, one at MASTER_ADDR, or, under mpirun on one host, a file.
    """
    if place.mpi and "MASTER_ADDR" not in environ:
        if place.local_world != place.world:
            raise InputError(
                "mpirun over several hosts needs the address of rank 0's host and a free port there: "
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
            )
        return FileStore(str(_meeting_file(environ)), place.world), False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise InputError(f"{place.world} processes need {' and '.join(missing)} in the environment, as torchrun sets")
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal():
        raise InputError(f"the environment's MASTER_PORT must be a port: got {port!r}")
    serves = place.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    seconds = timedelta(seconds=_seconds(environ))
    if not serves and not _answers(host, int(port), _seconds(environ)):
        raise UnmetRankError(place.rank, f"no answer at {host}:{port}, where rank 0 should be: is it running?")
    try:
        return TCPStore(host, int(port), None, serves, timeout=seconds, wait_for_workers=False), serves
    except RuntimeError as error:
        if serves:
            raise RunError(f"rank 0 cannot listen at port {port}: it is in use; choose another MASTER_PORT") from error
        raise UnmetRankError(place.rank, f"what answers at {host}:{port} is not rank 0 of this run") from error


class UnmetRankError(RunError):
    """A process met nobody, so it speaks for itself."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")


def _answers(host: str, port: int, seconds: float) -> bool:
    """Whether something listens there, at once or within `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())):
                return True
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.2)


def _meeting_file(environ: Mapping[str, str]) -> Path:
    """A file that the processes of this mpirun share, and of no other: in its own folder, which goes when it ends."""
    key = " ".join(environ.get(name, "") for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI4"))
    name = f"ncf-{os.getuid()}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return Path(environ.get("PMIX_SERVER_TMPDIR", tempfile.gettempdir())) / name


def _gather_all(ranks: Ranks, seconds: float) -> None:
    """Wait until all have come. Raises RunError, with those that are missing, where they do not."""
    store, until = ranks.store, time.monotonic() + seconds
    try:
        if store.add(f"taken/{ranks.rank}", 1) > 1:
            raise InputError(f"two processes are rank {ranks.rank} of {ranks.world}: give each its own")
        store.set(f"here/{ranks.rank}", str(ranks.world))
        for rank in range(ranks.world):
            store.wait([f"here/{rank}"], timedelta(seconds=max(0.01, until - time.monotonic())))
            if (world := int(store.get(f"here/{rank}"))) != ranks.world:
                (one, of), (other, others) = sorted([(ranks.rank, ranks.world), (rank, world)])
                raise InputError(f"rank {one} is one of {of} processes and rank {other} one of {others}")
    except RuntimeError as error:
        raise _missing(ranks, seconds) from error


def _missing(ranks: Ranks, seconds: float) -> RunError:
    """The error that says who did not come."""
    try:
        missing = [rank for rank in range(ranks.world) if not ranks.store.check([f"here/{rank}"])]
    except RuntimeError:  # the store went with rank 0
        return LostRankError("rank 0 is gone before all processes came")
    return RunError(
        f"{ranks.world - len(missing)} of {ranks.world} processes came within {seconds:g} s: missing rank "
        f"{', '.join(map(str, missing))}; start as many as the world size says"
    )


def _sharing(ranks: Ranks) -> int:
    """How many processes may run on the very cores that this one may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    digest = hashlib.sha256(f"{socket.gethostname()} {cores}".encode()).digest()
    mine = int.from_bytes(digest[:7], "little")
    return ranks.every(mine).count(mine)
