"""Work on the CPU, spread over cores: each thread computes pieces of its own with one torch thread.

Torch's own way, all cores inside each operation, waits for the slowest core at the end of every operation; a step has
hundreds of them. Pieces wait for each other once, so they are faster, and far faster where another program has one of
the cores.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def thread_count() -> int:
    """How many pieces run at a time: as many as torch's threads."""
    return torch.get_num_threads()


def parallel_map(function: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    """`function` of each piece, in order; without gradients. The first exception of a piece is raised."""
    if len(pieces) <= 1 or thread_count() == 1:
        with torch.no_grad():
            return [function(piece) for piece in pieces]
    results: dict[int, Result] = {}
    # Threads take from one iterator, each `next` of which is whole under Python's lock. A future for every piece would
    # wake the caller at each, and it would take the lock, and a core, from the threads that work.
    waiting = enumerate(pieces)

    @torch.no_grad()
    def work() -> None:
        try:
            for place, piece in waiting:
                results[place] = function(piece)
        finally:
            deque(waiting, maxlen=0)

    working = [_pool(thread_count()).submit(work) for _ in range(min(thread_count(), len(pieces)))]
    try:
        wait(working)
    finally:  # after Ctrl-C too, nobody begins another piece, and nobody writes once this has returned
        deque(waiting, maxlen=0)
        wait(working)
    for one in working:
        one.result()
    return [results[place] for place in range(len(pieces))]


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    threads, ready = torch.get_num_threads(), Barrier(count)
    pool = ThreadPoolExecutor(count, thread_name_prefix="ncf", initializer=_start_thread)
    wait([pool.submit(ready.wait) for _ in range(count)])
    torch.set_num_threads(threads)  # what a thread sets for itself, torch takes for the default of threads to come
    return pool


def _start_thread() -> None:
    torch.get_num_threads()  # or torch would set the default once more, later
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
