"""Pieces on threads: each once, results in order, and an error ends the work."""

import subprocess
import sys
import threading
import time

import pytest

from ncf import threads


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch) -> int:
    monkeypatch.setattr(threads, "thread_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("count", [0, 1, 2, 3, 200])
def test_every_piece_once_and_results_in_order(cores, count):
    begun: list[int] = []

    def double(piece: int) -> int:
        begun.append(piece)
        time.sleep(0.001 * (piece % 3))  # so that later pieces end before earlier ones
        return 2 * piece

    assert threads.parallel_map(double, range(count)) == [2 * piece for piece in range(count)]
    assert sorted(begun) == list(range(count))


def test_pieces_run_at_the_same_time(monkeypatch):
    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    both = threading.Barrier(2, timeout=10)
    threads.parallel_map(lambda _: both.wait(), range(2))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_is_raised_and_no_piece_is_begun_after_it(cores, error):
    begun = []

    def fail_at_two(piece: int) -> None:
        begun.append(piece)
        if piece == 2:
            raise error("piece 2")
        time.sleep(0.01)

    with pytest.raises(error, match="piece 2"):
        threads.parallel_map(fail_at_two, range(200))
    time.sleep(0.05)
    assert len(begun) <= 2 + 2 * cores


def test_who_asked_goes_on_only_when_nobody_works_any_more(monkeypatch):
    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    ended, both = [], threading.Barrier(2, timeout=10)

    def work(piece: int) -> None:
        both.wait()
        if piece == 0:
            raise ValueError("at once")
        time.sleep(0.2)
        ended.append(piece)

    with pytest.raises(ValueError, match="at once"):
        threads.parallel_map(work, range(2))
    assert ended == [1]


def test_the_workers_one_thread_is_nobody_elses_default():
    script = """
import threading, torch
from ncf import threads
torch.set_num_threads(2)
assert threads.parallel_map(lambda _: torch.get_num_threads(), range(2)) == [1, 1]
other = []
thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
thread.start()
thread.join()
assert (torch.get_num_threads(), other) == (2, [2])
"""
    subprocess.run([sys.executable, "-c", script], check=True)
