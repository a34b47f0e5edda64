"""Work on the CPU spread over cores: a piece a core, one thread inside each piece.

Torch's own way, all cores inside each operation, waits for the slowest core at the end of every operation; a step has
hundreds of them. Pieces wait for each other once, so they are faster, and far faster where another program has one of
the cores.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def worker_count() -> int:
    """How many pieces run at a time: as many as torch's threads."""
    return torch.get_num_threads()


def spread(function: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """`function` of each piece, in order; without gradients. The first exception of a piece is raised."""
    if len(pieces) <= 1 or worker_count() == 1:
        with torch.no_grad():
            return [function(piece) for piece in pieces]
    results: dict[int, Result] = {}
    # Threads take from one iterator, each `next` of which is whole under Python's lock. A future for every piece would
    # wake the caller at each, and it would take the lock, and a core, from the threads that work.
    waiting = enumerate(pieces)

    @torch.no_grad()
    def work(_: int) -> None:
        try:
            for place, piece in waiting:
                results[place] = function(piece)
        finally:
            _exhaust(waiting)

    try:
        list(_pool(worker_count()).map(work, range(min(worker_count(), len(pieces)))))
    finally:
        _exhaust(waiting)  # interrupted, nobody begins another piece
    return [results[place] for place in range(len(pieces))]


def _exhaust(waiting: Iterator[object]) -> None:
    for _ in waiting:
        pass


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="ncf", initializer=_start_worker)


def _start_worker() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
