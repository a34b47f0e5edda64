"""The processes that train one model, and what they exchange.

Each holds a range of the users; items and the network are on all of them. On one process everything here is the
identity: there is no process group, and nothing is sent.
"""

import atexit
import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ncf.errors import InputError, RunError
from ncf.parallel.environment import ProcessEnv
from ncf.version import VERSION

ANSWER = timedelta(minutes=30)  # for a process that is alive to answer, such as one that writes a large checkpoint
CHUNK = 8 * 2**20  # bytes of a user table sent at a time


class ProcessGroup:
    """The group as this process sees it; all ranks make the same calls in the same order."""

    def __init__(self, env: ProcessEnv | None = None, *, connected: bool = False, group: Any = None) -> None:
        env = env or ProcessEnv()
        self.rank, self.world, self.local_rank, self.local_world = env.rank, env.world, env.local_rank, env.local_world
        self.connected, self.group = connected, group
        self.sent = 0  # bytes that this rank has given to collectives
        self.share = 1  # processes that share this one's cores

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints, and writes files."""
        return self.rank == 0

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Add the ranks' tensors of one shape, in place."""
        self._call(dist.all_reduce, tensor)
        return tensor

    def all_sum(self, *values: int) -> list[int]:
        """The sums over ranks of whole numbers."""
        return list(map(int, self.all_reduce_(torch.tensor(values, dtype=torch.int64)).tolist()))

    def all_gather(self, value: int) -> list[int]:
        """Each rank's whole number, in order of rank."""
        values = torch.zeros(self.world, dtype=torch.int64)
        values[self.rank] = value
        return list(map(int, self.all_reduce_(values).tolist()))

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Rank 0's `make()` on all ranks; it must be something that JSON can hold."""
        if not self.connected:
            return make()
        text = bytearray(json.dumps(make()).encode() if self.is_main else b"")
        length = torch.tensor([len(text)])
        self._call(dist.broadcast, length, 0)
        content = torch.frombuffer(text, dtype=torch.uint8) if self.is_main else torch.empty(int(length)).byte()
        self._call(dist.broadcast, content, 0)
        return json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.all_sum(0)

    def check_same(self, things: Mapping[str, Any]) -> None:
        """Raise InputError, on all ranks, where one has other `things` (for JSON) or versions than rank 0."""
        for name, thing in {**things, "version of ncf or torch": [VERSION, str(torch.__version__)]}.items():
            found = self.all_gather(_hash(json.dumps(thing, sort_keys=True)))
            odd = [rank for rank, one in enumerate(found) if one != found[0]]
            if odd:
                raise InputError(f"rank {odd[0]} has another {name} than rank 0: start all processes with the same")

    def gather_rows(self, table: Tensor) -> Iterator[Tensor]:
        """On rank 0: the rows of all ranks' tables [U_r, D], in order, on the CPU, some MB at a time; else none."""
        step = rows_per_chunk(table)
        lengths = self.all_gather(len(table))
        for start in range(0, len(table), step):  # no piece where there are no rows: nobody would receive it
            piece = table.detach()[start : start + step].cpu().contiguous()
            if self.is_main:
                yield piece
            else:
                self._call(dist.send, piece, 0)
        for rank in range(1, self.world if self.is_main else 0):
            for at in range(0, lengths[rank], step):
                piece = torch.empty((min(step, lengths[rank] - at), *table.shape[1:]), dtype=table.dtype)
                self._call(dist.recv, piece, rank)
                yield piece

    def _call(self, collective: Callable[..., Any], tensor: Tensor, *peer: int) -> None:
        if not self.connected:
            return
        self.sent += 0 if collective is dist.recv else tensor.nbytes
        try:
            collective(tensor, *peer, group=self.group)
        except RuntimeError as error:
            if "out of memory" in str(error) or "CUDA error" in str(error):  # this process's own
                raise
            reason = re.sub(r"^\[\S+\] |[:.] .*", "", first_line(error))  # without gloo's place and advice
            raise RunError(f"another process of the run is gone; go on with --resume ({reason})") from error


SINGLE = ProcessGroup()


@contextmanager
def join(env: ProcessEnv, backend: str = "gloo", environ: Mapping[str, str] = os.environ) -> Iterator[ProcessGroup]:
    """Connect to the other processes, and part at the end; SINGLE where there are none.

    `backend` is `gloo`, or for CUDA `cpu:gloo,cuda:nccl`. Raises InputError where the processes do not fit together,
    RunError where one does not start within NCF_JOIN_SECONDS, or cannot be reached.
    """
    if env.world == 1:
        yield SINGLE
        return
    try:
        _within(env.join_seconds + 1, lambda: _connect(env, backend, environ))
    except (RuntimeError, TimeoutError) as error:
        host, port = (environ.get(name, "-") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RunError(
            f"the {env.world} processes did not connect within {env.join_seconds} s ({first_line(error)}): start as "
            f"many as the world size says, with rank 0 at MASTER_ADDR={host} and a free MASTER_PORT={port}"
        ) from error
    group = ProcessGroup(env, connected=True)
    group.share = _processes_on_my_cores(group)
    yield group
    group.barrier()
    dist.destroy_process_group()


def _within(seconds: float, call: Callable[[], None]) -> None:
    """Call it. Raises TimeoutError where it takes longer: torch itself waits for ever for a foreign server's answer."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised again by the waiting thread
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        done.result(seconds)
    except (TimeoutError, KeyboardInterrupt) as error:
        # A thread that returns from torch while Python exits would abort the process.
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        atexit.register(lambda: os._exit(status) if thread.is_alive() else None)
        raise


def _connect(env: ProcessEnv, backend: str, environ: Mapping[str, str]) -> None:
    """Make torch's process group, once all processes are there."""
    store = PrefixStore(f"ncf/{env.restarts}", _open_store(env, environ))
    _check_all_started(store, env)
    dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world, timeout=ANSWER)


def _open_store(env: ProcessEnv, environ: Mapping[str, str]) -> Any:
    """Where processes find each other: torchrun's store, one at MASTER_ADDR or, under mpirun on one host, a file."""
    if env.mpi and "MASTER_ADDR" not in environ:
        if env.local_world != env.world:
            raise InputError(
                "mpirun over several hosts needs the address of rank 0's host and a free port there: "
                "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
            )
        key = " ".join(
            environ.get(name, "") for name in ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI4")
        )
        folder = environ.get("PMIX_SERVER_TMPDIR", tempfile.gettempdir())  # this job's own, which goes with it
        return FileStore(str(Path(folder) / f"ncf-{os.getuid()}-{_hash(key)}"), env.world)
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not (host and port.isdecimal() and int(port) < 2**16):
        raise InputError(
            f"{env.world} processes need MASTER_ADDR and MASTER_PORT in the environment, as torchrun sets them: got "
            f"{host!r} and {port!r}"
        )
    serves = env.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=env.join_seconds)
    return TCPStore(host, int(port), None, serves, timeout=timeout, wait_for_workers=False)


def _check_all_started(store: Any, env: ProcessEnv) -> None:
    """Wait until all processes are there. Raises InputError where they do not agree on who they are."""
    until = time.monotonic() + env.join_seconds
    if store.add(f"taken/{env.rank}", 1) > 1:
        raise InputError(f"two processes have rank {env.rank} of {env.world}: give each its own")
    store.set(f"world/{env.rank}", str(env.world))
    for rank in range(env.world):
        try:
            store.wait([f"world/{rank}"], timedelta(seconds=max(0.01, until - time.monotonic())))
        except RuntimeError as error:
            raise RuntimeError(f"rank {rank} is missing: {first_line(error)}") from error
        if (world := int(store.get(f"world/{rank}"))) != env.world:
            raise InputError(
                f"rank {env.rank} has world size {env.world} and rank {rank} has {world}: give all the same"
            )


def _processes_on_my_cores(group: ProcessGroup) -> int:
    """How many processes may run on the very cores that this one may run on."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = _hash(f"{socket.gethostname()} {cores}")
    return group.all_gather(mine).count(mine)


def _hash(text: str) -> int:
    """56 bits of SHA-256, which an int64 holds."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def rows_per_chunk(table: Tensor) -> int:
    """How many rows of a table [R, ...] are some MB; the same for every R, so also where a rank has none."""
    return max(1, CHUNK // max(1, table.element_size() * table.shape[1:].numel()))


def first_line(error: BaseException) -> str:
    """The first line of what an error says; torch adds a stack of C++ calls."""
    return (str(error).splitlines() or [type(error).__name__])[0]
