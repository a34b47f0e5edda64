"""How fast this machine trains, evaluates, ranks a catalogue and answers one user: `ncf benchmark`.

    ncf benchmark --users 6040 --items 3706 --interactions 1000209

What is timed is what `ncf train`, `evaluate` and `recommend` run. A figure is a median of several runs after a warm-up,
and a GPU has finished its work whenever a clock is read.
"""

import copy
import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ncf import __version__
from ncf.config import BenchmarkConfig, TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.negatives import NONE, Untouched
from ncf.data.synthetic import check_sizes
from ncf.device import check_fits, device_name, peak_memory, pick_device
from ncf.model.neumf import NeuMF, check_widths, has_fast_bf16
from ncf.ranking.evaluate import evaluate
from ncf.ranking.exam import Exam, make_exam
from ncf.ranking.scoring import NeuralScorer
from ncf.ranking.topk import top_items
from ncf.training.batches import Batches
from ncf.training.step import DTYPES, Step, check_compile, check_precision, wants_compile
from ncf.training.trainer import needed_bytes

RUNS = 5  # of which the median is reported
FEWEST_RUNS = 3  # where they take longer than planned
STEPS, GPU_STEPS = 100, 20  # the most training steps that are timed, and how many a GPU makes between two clocks
TRAIN_SECONDS, EVALUATE_SECONDS, RANK_SECONDS, LATENCY_SECONDS = 15.0, 5.0, 5.0, 5.0  # for all runs of a figure
NEGATIVES = 99  # so each user has 100 candidates
EXAM_USERS = 32_768  # the most in the exam, drawn at random: more would only take longer to draw
REQUESTS, WARM_REQUESTS = (200, 2_000), 20  # of a single user: fewest, most where they fit the time; and before


def benchmark(
    log: Dataset | BenchmarkConfig,
    config: TrainConfig,
    *,
    precisions: Sequence[str] = (),
    device: str = "auto",
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure `config`'s network on a dataset, or on a random log of the sizes given; a result a precision.

    `precisions` are by default every one that the device supports: fp32; bf16 on a GPU, or on a CPU that has its
    products; fp16 on a GPU. A result holds

    - `train_samples_per_s`: positives and negatives of whole steps, shuffling and drawing included;
    - `evaluate_items_per_s`: user-item pairs scored and ranked in the sampled exam, 100 candidates a user;
    - `full_ranking_pairs_per_s`: the same against the whole catalogue, for as many users as fit the time;
    - `latency_ms`: `p50` and `p99` of one user's `topk` best unseen items, on one thread of the CPU whatever the
      device, in `latency_precision` (fp32 for fp16);
    - `peak_memory_mb` in 10**6 bytes: the process's so far, or on a GPU that of this precision;
    - `interactions`, those an epoch visits, the other sizes, `evaluate_batch_size` in pairs, and what it ran on.

    Raises InputError for options that cannot work together or with this device, and for a log that cannot be.
    """
    where = pick_device(device)
    precisions = precisions or supported_precisions(where)
    _check(log, config, precisions, where)
    dataset = log if isinstance(log, Dataset) else random_dataset(log)
    bench = _Bench(dataset, config, where)
    with tqdm(total=4 * len(precisions), unit="figure", leave=False, disable=not progress) as bar:
        return [bench.measure(precision, bar) for precision in precisions]


def supported_precisions(device: torch.device) -> list[str]:
    """The precisions that are of use on a device, fp32 first."""
    if device.type == "cuda":
        return ["fp32", "bf16", "fp16"]
    return ["fp32", "bf16"] if has_fast_bf16() else ["fp32"]


def random_dataset(sizes: BenchmarkConfig) -> Dataset:
    """A log without structure: as many interactions for every user (or one more), uniform items, repeats possible.

    Each user has a test item besides.
    """
    generator = torch.Generator().manual_seed(0)
    none = torch.full((sizes.users,), NONE, dtype=torch.int32)
    item = torch.randint(sizes.items, (sizes.interactions + sizes.users,), generator=generator, dtype=torch.int32)
    return Dataset(
        name="random",
        user_ids=np.arange(sizes.users),
        item_ids=np.arange(sizes.items),
        train_users=(torch.arange(sizes.interactions) * sizes.users // sizes.interactions).int(),
        train_items=item[: sizes.interactions],
        validation_items=none,
        test_items=item[sizes.interactions :],
        dropped_users=none[:0],
        dropped_items=none[:0],
    )


def _check(
    log: Dataset | BenchmarkConfig, config: TrainConfig, precisions: Sequence[str], device: torch.device
) -> None:
    """Raise InputError for what cannot be measured, before the time to make a log is spent."""
    check_widths(config.factors, config.layers)
    check_compile(config, device)
    if isinstance(log, Dataset):
        sizes = (log.n_users, log.n_items, log.n_train)
    else:
        check_sizes(log.users, log.items, log.interactions)
        sizes = (log.users, log.items, log.interactions)
    for precision in precisions:
        check_precision(precision, device)
        needed = needed_bytes(*sizes, config.replaced(precision=precision), device)
        check_fits(device, needed, f"training on {sizes[2]} interactions")


class _Bench:
    """What all precisions share: the log, its batches and the exam."""

    def __init__(self, dataset: Dataset, config: TrainConfig, device: torch.device) -> None:
        self.dataset, self.config, self.device = dataset, config, device
        exam = make_exam(_with_fewer_users(dataset), "test", NEGATIVES)
        self.exam, self.seen = exam.to(device), exam.untouched
        self.batches = Batches(
            dataset.train_users.to(device),
            dataset.train_items.to(device),
            dataset.n_users,
            dataset.n_items,
            config,
            pad=wants_compile(config, device),
        )
        self.evaluated = 0  # users of a timed evaluation
        self.requests = torch.randint(dataset.n_users, (REQUESTS[1],), generator=torch.Generator().manual_seed(0))

    def measure(self, precision: str, bar: Any) -> dict[str, Any]:
        """The result of a precision; see `benchmark`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        config, found = self.config, {}
        listing = "fp32" if precision == "fp16" else precision  # a CPU lists, and has no fp16
        size = self.dataset.n_users, self.dataset.n_items
        model = NeuMF(*size, factors=config.factors, layers=config.layers, dropout=config.dropout).to(self.device)
        figures: dict[str, Callable[[], Any]] = {
            "train_samples_per_s": lambda: self._train(model, precision),
            "evaluate_items_per_s": lambda: self._evaluate(model, precision),
            "full_ranking_pairs_per_s": lambda: self._rank(model, precision),
            "latency_ms": lambda: _latency(
                copy.deepcopy(model).cpu() if self.device.type == "cuda" else model,
                DTYPES[listing],
                self.requests,
                config.topk,
                self.seen,
            ),
        }
        for name, figure in figures.items():
            bar.set_description(f"{precision} {name}")
            found[name] = figure()
            bar.update()
        return found | {
            "peak_memory_mb": peak_memory(self.device) / 1e6,
            "device": device_name(self.device),
            "precision": precision,
            "threads": torch.get_num_threads(),
            "users": self.dataset.n_users,
            "items": self.dataset.n_items,
            "interactions": self.dataset.n_train,
            "batch_size": self.batches.rows * (1 + config.negative_samples),
            "evaluate_batch_size": min(config.valid_users_per_batch, self.evaluated) * self.exam.candidates,
            "latency_precision": listing,
            **{name: config.to_dict()[name] for name in ("factors", "layers", "dropout", "negative_samples", "topk")},
            "versions": {"ncf": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _train(self, model: NeuMF, precision: str) -> float:
        """Samples a second of an epoch: its first step, which has the shuffle, and the others at their median."""
        step = Step(model.train(), self.config.replaced(precision=precision), samples=self.batches.samples)
        generator = torch.Generator(self.device).manual_seed(0)
        on_gpu, length = self.device.type == "cuda", len(self.batches)
        for users, candidates, weights, count in itertools.islice(self.batches.epoch(generator), 3 if on_gpu else 1):
            step(users, candidates, weights, count, generator)  # the warm-up
        timed: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # of first steps, and of others
        begin = _now(self.device)
        for first, seconds, samples in self._steps(step, generator, min(GPU_STEPS, length - 1) if on_gpu else 1):
            timed[first].append((seconds, samples))
            done = len(timed[length == 1])
            if done >= STEPS or (done >= FEWEST_RUNS and _now(self.device) - begin > TRAIN_SECONDS):
                break
        parts = [(1 if first else length - 1, runs) for first, runs in timed.items() if runs]
        seconds, samples = (sum(n * median(run[at] for run in runs) for n, runs in parts) for at in (0, 1))
        return samples / seconds

    def _steps(self, step: Step, generator: torch.Generator, group: int) -> Iterator[tuple[bool, float, float]]:
        """Whether it is an epoch's first step, seconds, and samples of a step, on and on.

        All but an epoch's first are means over `group` steps, as a GPU is not to be waited for after each.
        """
        while True:
            counts, start = [], _now(self.device)
            for at, (users, candidates, weights, count) in enumerate(self.batches.epoch(generator)):
                step(users, candidates, weights, count, generator)
                counts.append(count)
                if at % max(1, group) == 0:
                    seconds = _now(self.device) - start
                    yield at == 0, seconds / len(counts), sum(map(int, counts)) / len(counts)
                    counts, start = [], _now(self.device)

    def _evaluate(self, model: NeuMF, precision: str) -> float:
        exam, batch = self.exam, self.config.valid_users_per_batch
        scorer = NeuralScorer(model, DTYPES[precision])

        def work(n: int) -> None:
            evaluate(scorer, _first_users(exam, n), k=self.config.topk, users_per_batch=batch)

        users_per_s, self.evaluated = _rate(work, len(exam.users), 256, EVALUATE_SECONDS, self.device)
        return users_per_s * exam.pairs / len(exam.users)

    def _rank(self, model: NeuMF, precision: str) -> float:
        most = int(self.exam.untouched.counts[self.exam.users].max())
        exam = replace(self.exam, negatives=None, candidates=most + 1)
        scorer = NeuralScorer(model, DTYPES[precision])

        def work(n: int) -> None:
            evaluate(scorer, _first_users(exam, n), k=self.config.topk, users_per_batch=len(exam.users))

        return _rate(work, len(exam.users), 16, RANK_SECONDS, self.device)[0] * self.dataset.n_items


def _with_fewer_users(dataset: Dataset) -> Dataset:
    """The dataset with a test item for EXAM_USERS users alone, drawn at random."""
    held = torch.nonzero(dataset.test_items != NONE).flatten()
    if len(held) <= EXAM_USERS:
        return dataset
    chosen = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))[:EXAM_USERS]]
    test = torch.full_like(dataset.test_items, NONE)
    test[chosen] = dataset.test_items[chosen]
    return replace(dataset, test_items=test)


def _first_users(exam: Exam, n: int) -> Exam:
    negatives = None if exam.negatives is None else exam.negatives[:n]
    return replace(exam, users=exam.users[:n], positives=exam.positives[:n], negatives=negatives, evaluated=n)


def _rate(work: Callable[[int], None], most: int, least: int, budget: float, device: torch.device) -> tuple[float, int]:
    """Units a second of `work(n)`, which does n of them, and n: the median of RUNS runs, of what fits `budget` seconds.

    `most` is how many units there are, `least` how many to begin with.
    """
    share, n = budget / RUNS, min(most, least)
    _seconds(work, n, device)  # the warm-up
    while True:
        fits = int(n * share / _seconds(work, n, device))
        if n == most or fits < 2 * n:
            break
        n = min(most, fits, 8 * n)  # by steps, as a small piece tells little of a large one
    n = max(1, min(n, fits))
    begin = _now(device)
    times: list[float] = []
    while len(times) < FEWEST_RUNS or (len(times) < RUNS and _now(device) - begin < budget):
        times.append(_seconds(work, n, device))
    return n / median(times), n


def _seconds(work: Callable[[int], None], n: int, device: torch.device) -> float:
    start = _now(device)
    work(n)
    return max(_now(device) - start, 1e-9)


def _latency(model: NeuMF, dtype: torch.dtype, users: torch.Tensor, k: int, seen: Untouched) -> dict[str, float]:
    """Milliseconds of one request after another, each the `k` best unseen items of one of `users`, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        scorer = NeuralScorer(model, dtype)
        for user in users[:WARM_REQUESTS]:
            top_items(scorer, user.view(1), k, seen)
        begin, times = time.perf_counter(), []
        for user in users:
            start = time.perf_counter()
            top_items(scorer, user.view(1), k, seen)
            end = time.perf_counter()
            times.append(1000 * (end - start))
            if len(times) >= REQUESTS[0] and end - begin > LATENCY_SECONDS:
                break
    finally:
        torch.set_num_threads(threads)
    times.sort()
    return {f"p{share}": times[math.ceil(share / 100 * len(times)) - 1] for share in (50, 99)}


def _now(device: torch.device) -> float:
    """The clock in seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
