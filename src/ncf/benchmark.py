"""How fast this machine trains, evaluates, ranks a catalogue and answers one user: `ncf benchmark`.

    ncf benchmark --users 6040 --items 3706 --interactions 1000209

What is timed is what `ncf train`, `evaluate` and `recommend` run. A figure is a median of several runs after a warm-up,
and a GPU has finished its work whenever a clock is read.
"""

import copy
import itertools
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ncf import __version__
from ncf.config import BenchmarkConfig, TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.history import Histories
from ncf.data.interactions import Interactions
from ncf.data.unseen import PAD
from ncf.device import check_fits, configured, device_name, peak_memory, pick_device
from ncf.ingest.synthetic import check_sizes
from ncf.model.neumf import NeuMF, check_widths
from ncf.model.products import DTYPES, has_fast_bf16
from ncf.ranking.eval_set import EvalSet, make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer
from ncf.ranking.topk import top_items
from ncf.runs.run import make_model
from ncf.training.autograd import check_compile, wants_compile
from ncf.training.batches import Batches
from ncf.training.step import Step, check_loss, check_precision
from ncf.training.trainer import needed_bytes

RUNS = 5  # of which the median is reported
RUN_SECONDS = 1.0  # about, of an evaluation
TRAIN_SECONDS, LATENCY_SECONDS = 15.0, 5.0  # for all steps or requests, but for the fewest
FEWEST_STEPS, GPU_STEPS = 3, 20  # besides an epoch's first, and how many a GPU makes between two clocks
NEGATIVES = 99  # so each user has 100 candidates
FEWEST_REQUESTS, MOST_REQUESTS, WARM_REQUESTS = 200, 2_000, 20  # of a single user
REPORTED = ("recipe", "factors", "layers", "dropout", "history", "negative_samples", "shared_negatives", "topk")
COLUMNS = ("precision", "batch size", "train", "x fp32", "evaluate", "whole catalogue", "p50 ms", "p99 ms", "peak MB")


def benchmark(
    log: Dataset | BenchmarkConfig,
    config: TrainConfig,
    *,
    precisions: Sequence[str] = (),
    device: str = "auto",
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure `config`'s network on a dataset, or on a random log of the sizes given; a result per precision.

    `precisions` are by default every one that the device supports. A result holds

    - `train_samples_per_s`: positives and negatives of whole steps, shuffling and drawing included;
    - `evaluate_items_per_s`, `full_ranking_pairs_per_s`: pairs scored and ranked, 100 candidates or all per user;
    - `latency_ms`: `p50` and `p99` of one user's `topk` best unseen items on one CPU thread, whatever the device;
    - `peak_memory_mb` in 10**6 bytes: the process's so far, or on a GPU that of this precision;
    - the sizes (`evaluate_batch_size` in pairs), options, device and versions.

    Raises InputError for options that cannot work together or with this device, and for impossible sizes.
    """
    where = pick_device(device)
    precisions = precisions or supported_precisions(where)
    _check(log, config, precisions, where)
    dataset = log if isinstance(log, Dataset) else random_dataset(log)
    with configured(where), tqdm(total=4 * len(precisions), unit="figure", leave=False, disable=not progress) as bar:
        bench = _Bench(dataset, config, where)
        return [bench.measure(precision, bar) for precision in precisions]


def supported_precisions(device: torch.device) -> list[str]:
    """The precisions that are of use on a device, fp32 first."""
    if device.type == "cuda":
        return ["fp32", "bf16", "fp16"]
    return ["fp32", "bf16"] if has_fast_bf16() else ["fp32"]


def random_dataset(sizes: BenchmarkConfig) -> Dataset:
    """A log without structure: uniform items, repeats possible, and a test item for every user."""
    generator = torch.Generator().manual_seed(0)
    none = torch.full((sizes.users,), PAD, dtype=torch.int32)
    item = torch.randint(sizes.items, (sizes.interactions + sizes.users,), generator=generator, dtype=torch.int32)
    interactions = Interactions(
        sizes.users,
        sizes.items,
        train_users=(torch.arange(sizes.interactions) * sizes.users // sizes.interactions).int(),
        train_items=item[: sizes.interactions],
        validation_items=none,
        test_items=item[sizes.interactions :],
        dropped_users=none[:0],
        dropped_items=none[:0],
    )
    return Dataset("random", np.arange(sizes.users), np.arange(sizes.items), interactions)


def _check(
    log: Dataset | BenchmarkConfig, config: TrainConfig, precisions: Sequence[str], device: torch.device
) -> None:
    """Raise InputError for what cannot be measured, before the time to make a log is spent."""
    check_widths(config.factors, config.layers)
    check_loss(config)
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
    """What all precisions share: the log, its batches and its evaluation set."""

    def __init__(self, dataset: Dataset, config: TrainConfig, device: torch.device) -> None:
        config = config.for_log(dataset.n_users, dataset.n_items, dataset.n_train)
        self.dataset, self.config, self.device = dataset, config, device
        eval_set = make_eval_set(dataset, "test", NEGATIVES, history=config.history)
        self.eval_set, self.seen = eval_set.to(device), eval_set.unseen
        mine, pad = dataset.interactions, wants_compile(config, device)
        sequence = mine.sequence().to(device)
        self.batches = Batches(sequence, mine.n_users, mine.n_items, config, ordered=mine.ordered, pad=pad)

    def measure(self, precision: str, bar: Any) -> dict[str, Any]:
        """The result of a precision; see `benchmark`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        config, device, mine = self.config, self.device, self.dataset.interactions
        listing = "fp32" if precision == "fp16" else precision  # a CPU lists, and has no fp16
        model = make_model(mine, config).to(device)
        whole = replace(self.eval_set, negatives=None, candidates=int(self.eval_set.unseen.counts.max()) + 1)
        sampled, evaluated = self._rank(model, precision, self.eval_set, config.valid_users_per_batch, bar)
        return {
            "train_samples_per_s": self._train(model, precision, bar),
            "evaluate_items_per_s": sampled * self.eval_set.pairs / len(self.eval_set.users),
            "full_ranking_pairs_per_s": self._rank(model, precision, whole, len(whole.users), bar)[0] * mine.n_items,
            "latency_ms": self._latency(model, listing, bar),
            "peak_memory_mb": peak_memory(device) / 1e6,
            "device": device_name(device),
            "precision": precision,
            "threads": torch.get_num_threads(),
            "users": mine.n_users,
            "items": mine.n_items,
            "interactions": mine.n_train,
            "batch_size": self.batches.rows * (1 + config.negative_samples),
            "evaluate_batch_size": min(config.valid_users_per_batch, evaluated) * self.eval_set.candidates,
            "latency_precision": listing,
            **{name: config.to_dict()[name] for name in REPORTED},
            "versions": {"ncf": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _train(self, model: NeuMF, precision: str, bar: Any) -> float:
        """Samples per second of an epoch: its first step, which has the shuffle, and the others at their median."""
        bar.update()
        step = Step(model.train(), self.config.replaced(precision=precision), samples=self.batches.samples)
        generator = torch.Generator(self.device).manual_seed(0)
        on_gpu, length = self.device.type == "cuda", len(self.batches)
        for batch in itertools.islice(self.batches.epoch(generator), 3 if on_gpu else 1):
            step(batch, generator)  # the warm-up
        first, others = [], []
        group = min(GPU_STEPS, length - 1) if on_gpu else 1  # a GPU is not to be waited for after each step
        until = _now(self.device) + TRAIN_SECONDS
        while True:
            start = _now(self.device)
            for at, batch in enumerate(self.batches.epoch(generator)):
                step(batch, generator)
                if at % max(1, group):
                    continue
                seconds = _now(self.device) - start
                first.append(seconds) if at == 0 else others.append(seconds / group)
                if _now(self.device) > until and len(first if length == 1 else others) >= FEWEST_STEPS:
                    samples = self.dataset.n_train * (1 + self.config.negative_samples)
                    return samples / (median(first) + (length - 1) * median(others or [0.0]))
                start = _now(self.device)

    def _rank(
        self, model: NeuMF, precision: str, eval_set: EvalSet, users_per_batch: int, bar: Any
    ) -> tuple[float, int]:
        """Users per second, the median of RUNS runs of about RUN_SECONDS, and how many users that were."""
        bar.update()
        scorer = NeuralScorer(model, DTYPES[precision])

        def seconds(n: int) -> float:
            negatives = None if eval_set.negatives is None else eval_set.negatives[:n]
            first = replace(eval_set, users=eval_set.users[:n], positives=eval_set.positives[:n], evaluated=n)
            first = replace(first, negatives=negatives, history=None if first.history is None else first.history[:n])
            start = _now(self.device)
            evaluate(scorer, first, k=self.config.topk, users_per_batch=users_per_batch)
            return _now(self.device) - start

        most = len(eval_set.users)
        n = min(most, 4)
        while seconds(n) < RUN_SECONDS / 4 and n < most:  # the last of these is the warm-up
            n = min(most, 4 * n)
        return n / median(seconds(n) for _ in range(RUNS)), n

    def _latency(self, model: NeuMF, precision: str, bar: Any) -> dict[str, float]:
        """Milliseconds of one request after another: one user's best unseen items, on one thread of the CPU."""
        bar.update()
        threads, times = torch.get_num_threads(), []
        torch.set_num_threads(1)
        try:
            scorer = NeuralScorer(copy.deepcopy(model).cpu(), DTYPES[precision])
            users = torch.randint(model.n_users, (MOST_REQUESTS,), generator=torch.Generator().manual_seed(0))
            until = time.perf_counter() + LATENCY_SECONDS
            histories = Histories(self.dataset.interactions.sequence(), model.n_users, model.history)
            for user in torch.split(users, 1):
                start = time.perf_counter()
                history = histories.of_users(user) if model.history else None
                top_items(scorer.score_all(scorer.user_rows(user, history)), self.config.topk, self.seen.seen(user))
                times.append(1000 * (time.perf_counter() - start))
                if len(times) >= FEWEST_REQUESTS + WARM_REQUESTS and time.perf_counter() > until:
                    break
        finally:
            torch.set_num_threads(threads)
        return {f"p{share}": float(np.percentile(times[WARM_REQUESTS:], share)) for share in (50, 99)}


def _now(device: torch.device) -> float:
    """The clock in seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def format_benchmark(results: Sequence[dict[str, Any]]) -> list[str]:
    """The results of `benchmark`, on one log and device, as lines: a row per precision."""
    about = results[0]
    fp32 = next((one["train_samples_per_s"] for one in results if one["precision"] == "fp32"), None)
    rows = [COLUMNS, *(_row(one, fp32) for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    layers = " ".join(map(str, about["layers"])) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [
        f"{about['device']}; {about['threads']} threads; {versions}",
        f"{about['users']:,} users, {about['items']:,} items, {about['interactions']:,} interactions",
        f"recipe {about['recipe']}: factors {about['factors']}, layers {layers}, history {about['history']}",
        f"{about['negative_samples']} negatives per interaction, {about['shared_negatives']} shared per step",
        "",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
        "",
        "train: samples/s of whole steps, shuffling and negatives included. evaluate: user-item pairs/s with 100",
        f"candidates per user. whole catalogue: pairs/s. p50, p99: one user's top {about['topk']} on one CPU thread.",
    ]


def _row(one: dict[str, Any], fp32: float | None) -> tuple[str, ...]:
    return (
        one["precision"],
        f"{one['batch_size']:,}",
        f"{one['train_samples_per_s']:,.0f}",
        "-" if fp32 is None else f"{one['train_samples_per_s'] / fp32:.2f}",
        f"{one['evaluate_items_per_s']:,.0f}",
        f"{one['full_ranking_pairs_per_s']:,.0f}",
        *(f"{one['latency_ms'][key]:.2f}" for key in ("p50", "p99")),
        f"{one['peak_memory_mb']:,.0f}",
    )
