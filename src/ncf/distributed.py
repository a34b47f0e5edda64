"""The processes (ranks) that train one model, and what they tell each other.

Each holds a range of the users; items and the network are on all of them. On one process everything here is the
identity: there is no process group, and nothing is sent.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ncf.errors import InputError, RunError
from ncf.version import VERSION

HEARING_SECONDS = 2.0  # for rank 0 to say first what others were about to say too
CHUNK = 8 * 2**20  # bytes of a user table sent at a time


class LostRankError(RunError):
    """Another process is gone, or does not answer."""


class Ranks:
    """One process's view of all. Its methods must be called by all ranks, in the same order; `spoken` by who failed."""

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

    def check_same(self, things: Mapping[str, Any]) -> None:
        """Raise InputError, on all ranks, where one has another of `things` (which JSON can hold) than rank 0.

        The versions of ncf and torch are compared too. Ranks that differ would train something else together, or wait
        for each other for ever.
        """
        for name, thing in {**things, "version of ncf or torch": [VERSION, str(torch.__version__)]}.items():
            digest = hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).digest()
            found = self.every(int.from_bytes(digest[:7], "little"))
            odd = [rank for rank, one in enumerate(found) if one != found[0]]
            if odd:
                raise InputError(f"rank {odd[0]} has another {name} than rank 0: start all processes with the same")

    def wait(self) -> None:
        """Return when all ranks have come here."""
        self.sums(0)

    def rows_to_first(self, table: Tensor) -> Iterator[Tensor]:
        """On rank 0: the rows of all ranks' tables [U_r, D], in order, on the CPU, some MB at a time; elsewhere none.

        Never more than one piece of another rank's table is held.
        """
        step = rows_of_chunk(table)
        lengths = self.every(len(table))
        for start in range(0, len(table), step):  # no piece where there are no rows: nobody would receive it
            piece = table.detach()[start : start + step]
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
            if "out of memory" in str(error) or "CUDA error" in str(error):  # this process's own
                raise
            raise LostRankError(
                f"another process of the run is gone; go on with --resume ({first_line(error)})"
            ) from error

    def spoken(self, message: str, error: BaseException) -> str | None:
        """What this rank should print of its error; None where another rank says it.

        An error that rank 0 meets too is rank 0's to print; one that others meet is said by the first of them. That
        another process is gone is said once, by a process that is left, and by none where `--devices` says which one
        it was, or where rank 0 ended as it was told to: by Ctrl-C, or as nobody reads its output any more.
        """
        if isinstance(error, (KeyboardInterrupt, BrokenPipeError)):
            if not self.first:
                return None
            self._is_first_to_tell()
            return message
        if isinstance(error, LostRankError):
            return None if self.ours or not self._is_first_to_tell() else message
        with suppress(RuntimeError):
            self.store.set(f"error/{self.rank}", message)
            self._is_first_to_tell()
            if not self.first and self._is_told_elsewhere(message):
                return None
        if self.serves:
            time.sleep(HEARING_SECONDS)  # the store goes with this process
        return message if self.first else of_rank(self.rank, message)

    def _is_told_elsewhere(self, message: str) -> bool:
        """Whether rank 0 meets the same error, or another of the other ranks has told one already."""
        another = int(self.store.add("failed", 1)) > 1
        # Who is silent waits longer: a launcher ends all processes when one ends, and another one has yet to print.
        seconds = HEARING_SECONDS * (1.5 if another else 1)
        with suppress(RuntimeError):
            self.store.wait(["error/0"], timedelta(seconds=seconds))
            if self.store.get("error/0").decode() == message:
                return True
        return another

    def _is_first_to_tell(self) -> bool:
        try:
            return int(self.store.add("told", 1)) == 1
        except RuntimeError:  # the store went with rank 0
            return self.rank == 1


ALONE = Ranks()


def rows_of_chunk(table: Tensor) -> int:
    """How many rows of a table [R, ...] are some MB; the same for every R, so also where a rank has none."""
    return max(1, CHUNK // max(1, table.element_size() * table.shape[1:].numel()))


def first_line(error: BaseException) -> str:
    """The first line of what an error says; torch adds a stack of C++ calls."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def of_rank(rank: int, message: str) -> str:
    """`error: what` -> `error: rank 1: what`."""
    start, _, rest = message.partition(": ")
    return f"{start}: rank {rank}: {rest}"
