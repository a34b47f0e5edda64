"""The processes (ranks) that train one model: how they meet, and what they tell each other.

Each holds a range of the users; items and the network are on all of them. On one process everything here is the
identity: there is no process group, and nothing is sent.
"""

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ncf.errors import InputError, RunError
from ncf.launch import LOST, Place

JOIN_SECONDS = 60.0  # for all processes to come; NCF_JOIN_SECONDS says otherwise
ANSWER_MINUTES = 30  # for a process that is alive to answer, such as one that writes a large checkpoint
HEARING_SECONDS = 2.0  # for rank 0 to say first what others were about to say too
CHUNK = 8 * 2**20  # bytes of a user table sent at a time


class LostRankError(RunError):
    """Another process is gone, or does not answer."""


class Ranks:
    """One process's view of all. Every method but `first` must be called by all ranks, in the same order."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        joined: bool = False,
        group: Any = None,
        store: Any = None,
        local_rank: int = 0,
        local_world: int = 1,
        ours: bool = False,
        serves: bool = False,
    ) -> None:
        self.rank, self.world, self.joined, self.group, self.store = rank, world, joined, group, store
        self.local_rank, self.local_world, self.ours, self.serves = local_rank, local_world, ours, serves
        self.sent = 0  # bytes that this rank has given to collectives
        self.share = 1  # processes that share this one's cores

    @property
    def first(self) -> bool:
        """Whether this rank is the one that prints, and writes files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add the ranks' tensors of one shape, in place."""
        self._talk(lambda: dist.all_reduce(tensor, group=self.group), tensor)
        return tensor

    def sums(self, *values: int) -> list[int]:
        """The sums over ranks of whole numbers."""
        return list(map(int, self.sum_(torch.tensor(values, dtype=torch.int64)).tolist()))

    def every(self, value: int) -> list[int]:
        """Each rank's whole number, in order of rank."""
        values = torch.zeros(self.world, dtype=torch.int64)
        values[self.rank] = value
        return list(map(int, self.sum_(values).tolist()))

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Rank 0's `make()` on all ranks; it must be something that JSON can hold."""
        if not self.joined:
            return make()
        text = bytearray(json.dumps(make()).encode() if self.first else b"")
        length = torch.tensor([len(text)])
        self._talk(lambda: dist.broadcast(length, 0, self.group), length)
        content = torch.empty(int(length), dtype=torch.uint8)
        if self.first:
            content = torch.frombuffer(text, dtype=torch.uint8)
        self._talk(lambda: dist.broadcast(content, 0, self.group), content)
        return json.loads(bytes(content.tolist()))

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self.sums(0)

    def rows_to_first(self, table: Tensor) -> Iterator[Tensor]:
        """On rank 0: the rows of all ranks' tables [U_r, D], in order, on the CPU, some MB at a time; elsewhere none.

        Never more than one piece of another rank's table is held.
        """
        step = max(1, CHUNK // max(1, table[:1].nbytes))
        lengths = self.every(len(table))
        for piece in torch.split(table.detach(), step):
            if self.first:
                yield piece.cpu()
            else:
                content = piece.cpu().contiguous()
                self._talk(lambda content=content: dist.send(content, 0, self.group), content)  # type: ignore[misc]
        for rank in range(1, self.world if self.first else 0):
            for at in range(0, lengths[rank], step):
                piece = torch.empty((min(step, lengths[rank] - at), *table.shape[1:]), dtype=table.dtype)
                self._talk(lambda piece=piece, rank=rank: dist.recv(piece, rank, self.group))  # type: ignore[misc]
                yield piece

    def _talk(self, call: Callable[[], Any], given: Tensor | None = None) -> None:
        if not self.joined:
            return
        if given is not None:
            self.sent += given.nbytes
        try:
            call()
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            raise LostRankError("another process of the run is gone; go on with --resume") from error

    def spoken(self, message: str, error: BaseException) -> str | None:
        """What this rank should print of its error; None where another rank says it.

        An error that rank 0 meets too is rank 0's to print; that another process is gone is said once, by a process
        that is left, and by none where `--devices` says which one it was.
        """
        if isinstance(error, KeyboardInterrupt):
            return message if self.first else None
        if isinstance(error, LostRankError):
            return None if self.ours or not self._is_first_to_tell() else message
        with suppress(RuntimeError):
            self.store.set(f"error/{self.rank}", message)
            self._is_first_to_tell()
            if not self.first:
                self.store.wait(["error/0"], timedelta(seconds=HEARING_SECONDS))
                if self.store.get("error/0").decode() == message:
                    return None
        if self.serves:
            time.sleep(HEARING_SECONDS)  # the store goes with this process
        return message if self.first else of_rank(self.rank, message)

    def _is_first_to_tell(self) -> bool:
        try:
            return int(self.store.add("told", 1)) == 1
        except RuntimeError:  # the store went with rank 0
            return self.rank == 1


ALONE = Ranks()
_current = ALONE


def of_rank(rank: int, message: str) -> str:
    """`error: what` -> `error: rank 1: what`."""
    start, _, rest = message.partition(": ")
    return f"{start}: rank {rank}: {rest}"


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
        raise LostRankError(f"the processes cannot reach each other: {str(error).splitlines()[0]}") from error


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
    try:
        return TCPStore(host, int(port), None, serves, timeout=seconds, wait_for_workers=False), serves
    except RuntimeError as error:
        if serves:
            raise RunError(f"rank 0 cannot listen at port {port}: it is in use; choose another MASTER_PORT") from error
        raise UnmetRankError(
            place.rank, f"no answer at {host}:{port}, where rank 0 should be: is it running?"
        ) from error


class UnmetRankError(RunError):
    """A process met nobody, so it speaks for itself."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")


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
                raise InputError(f"rank {ranks.rank} is one of {ranks.world} processes and rank {rank} one of {world}")
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
