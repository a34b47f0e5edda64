"""What every arm of `training.py` shares: the batches it trains on and the talk with the process that started it.

Needs numpy alone, as each peer has an environment of its own. An arm answers a line for every line that it reads:
seconds and loss of one more step. While it waits for the next it blocks on its input and computes nothing.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

FACTORS, LAYERS, DROPOUT = 64, (256, 256, 128, 64), 0.5
LEARNING_RATE, BETAS, EPS = 0.0045, (0.25, 0.5), 1e-8
CANDIDATES = 5  # a positive and four negatives


@dataclass(frozen=True)
class Job:
    """What an arm is asked for."""

    users: int
    items: int
    interactions: int  # of ALS's matrix
    batch_size: int  # samples
    precision: str

    @property
    def samples(self) -> int:
        """Samples in a step: the most that are whole interactions."""
        return self.batch_size // CANDIDATES * CANDIDATES


Arm = tuple[Callable[[int], Any], Callable[[Any], float]]  # a batch of that number, made ready; one step's mean loss


@cache
def shares(users: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Cumulated shares of the interactions, of users [U] and of items [I], as skewed as in a log like MovieLens 20M.

    A user has 20 interactions and a log-normal number more, in the mean 144; an item's popularity falls as Zipf's law.
    """
    rng = np.random.default_rng(0)
    more = np.exp(1.15 * rng.standard_normal(users))
    activity = 20 + 124 * more / more.mean()
    popularity = rng.permutation(1 / (20 + np.arange(items)))
    return np.cumsum(activity) / activity.sum(), np.cumsum(popularity) / popularity.sum()


def draw(job: Job, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The batch of that number: users [B] ascending, candidates [B, 5] with the positive in column 0; int32."""
    rng = np.random.default_rng((job.batch_size, number))
    rows = job.batch_size // CANDIDATES
    user_shares, item_shares = shares(job.users, job.items)
    users = np.searchsorted(user_shares, np.sort(rng.random(rows)), side="right").clip(max=job.users - 1)
    candidates = rng.integers(0, job.items, (rows, CANDIDATES), dtype=np.int32)
    candidates[:, 0] = np.searchsorted(item_shares, rng.random(rows), side="right").clip(max=job.items - 1)
    return users.astype(np.int32), candidates


def draw_pairs(job: Job, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same samples in a random order, for a network on pairs: users and items int64 [R], labels float32 [R]."""
    users, candidates = draw(job, number)
    order = np.random.default_rng(number).permutation(candidates.size)
    labels = np.zeros(candidates.shape, np.float32)
    labels[:, 0] = 1
    users = np.repeat(users, CANDIDATES)[order].astype(np.int64)
    return users, candidates.reshape(-1)[order].astype(np.int64), labels.reshape(-1)[order]


def on_pairs(job: Job, convert: Callable[[np.ndarray], Any], step: Callable[..., Any]) -> Arm:
    """An arm whose `step` takes users, items and labels, which `convert` makes the framework's, and gives the loss."""

    def load(number: int) -> list[Any]:
        return [convert(x) for x in draw_pairs(job, number)]

    def take(batch: Any) -> float:
        return float(step(*batch))

    return load, take


def serve(build: Callable[[Job], Arm], version: Callable[[], str]) -> None:
    """Build the arm that the command line describes and take a step for every line of the input."""
    job = Job(**json.loads(sys.argv.pop(1)))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not an answer
    load, step = build(job)
    answers.write(json.dumps({"version": version()}) + "\n")
    for number, _ in enumerate(sys.stdin):
        batch = load(number)
        begin = time.perf_counter()
        loss = step(batch)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        answers.write(json.dumps({"seconds": seconds, "loss": loss, "peak": peak}) + "\n")
