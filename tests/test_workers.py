"""Pieces on threads: each once, results in order, and an error ends the work."""

import threading
import time

import pytest

from ncf import workers


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch) -> int:
    monkeypatch.setattr(workers, "worker_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("count", [0, 1, 2, 3, 200])
def test_every_piece_once_and_results_in_order(threads, count):
    begun: list[int] = []

    def double(piece: int) -> int:
        begun.append(piece)
        time.sleep(0.001 * (piece % 3))  # so that later pieces end before earlier ones
        return 2 * piece

    assert workers.spread(double, range(count)) == [2 * piece for piece in range(count)]
    assert sorted(begun) == list(range(count))


def test_pieces_run_at_the_same_time(monkeypatch):
    monkeypatch.setattr(workers, "worker_count", lambda: 2)
    both = threading.Barrier(2, timeout=10)
    workers.spread(lambda _: both.wait(), range(2))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_is_raised_and_no_piece_is_begun_after_it(threads, error):
    begun = []

    def fail_at_two(piece: int) -> None:
        begun.append(piece)
        if piece == 2:
            raise error("piece 2")
        time.sleep(0.01)

    with pytest.raises(error, match="piece 2"):
        workers.spread(fail_at_two, range(200))
    time.sleep(0.05)
    assert len(begun) <= 2 + 2 * threads
