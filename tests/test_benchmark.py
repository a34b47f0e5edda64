import math
import time

import pytest
import torch
from tqdm import tqdm

from ncf import benchmark as module
from ncf.benchmark import benchmark, format_benchmark, random_dataset, supported_precisions
from ncf.config import BenchmarkConfig, TrainConfig
from ncf.errors import InputError
from ncf.model.neumf import NeuMF

SIZES = BenchmarkConfig(users=150, items=130, interactions=1500)
SMALL = TrainConfig(factors=4, layers=(8, 4), batch_size=500)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("RUN_SECONDS", "TRAIN_SECONDS", "LATENCY_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)


def test_a_random_log_has_the_sizes_asked_for():
    dataset = random_dataset(SIZES)
    assert (dataset.n_users, dataset.n_items, dataset.n_train) == (150, 130, 1500)
    assert torch.bincount(dataset.interactions.train_users).tolist() == [10] * 150
    assert (dataset.interactions.train_users.diff() >= 0).all()
    for items in (dataset.interactions.train_items, dataset.interactions.test_items):
        assert items.dtype == torch.int32
        assert 0 <= items.min() <= items.max() < 130
    assert len(dataset.interactions.train_items.unique()) > 120


def test_a_result_says_what_was_measured():
    threads = torch.get_num_threads()
    (found,) = benchmark(SIZES, SMALL, precisions=["fp32"], device="cpu")
    for name in ("train_samples_per_s", "evaluate_items_per_s", "full_ranking_pairs_per_s", "peak_memory_mb"):
        assert 0 < found[name] < math.inf
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"]
    assert set(found["latency_ms"]) == {"p50", "p99"}
    sizes = [found[name] for name in ("users", "items", "interactions", "batch_size")]
    assert sizes == [150, 130, 1500, 500]
    assert found["evaluate_batch_size"] in range(100, 150 * 100 + 1, 100)  # as many users as were timed together
    assert (found["precision"], found["threads"], found["layers"]) == ("fp32", threads, [8, 4])
    assert "core" in found["device"]
    assert torch.get_num_threads() == threads


def test_a_dataset_is_measured_at_its_own_size(planted):
    with pytest.warns(match="fewer than 99 unseen items"):
        (found,) = benchmark(planted, SMALL, precisions=["fp32"], device="cpu")
    assert (found["users"], found["items"], found["interactions"]) == (160, 80, planted.n_train)
    assert found["evaluate_batch_size"] % (80 - 16 + 1) == 0


def test_every_precision_the_device_supports_is_measured(monkeypatch):
    monkeypatch.setattr(module, "has_fast_bf16", lambda: True)
    assert supported_precisions(CPU) == ["fp32", "bf16"]
    monkeypatch.setattr(module, "check_precision", lambda *_: None)  # it would warn where bf16 is slow
    found = benchmark(SIZES, SMALL, device="cpu")
    assert [one["precision"] for one in found] == ["fp32", "bf16"]
    monkeypatch.setattr(module, "has_fast_bf16", lambda: False)
    assert supported_precisions(CPU) == ["fp32"]
    assert supported_precisions(torch.device("cuda")) == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize("batch_size", [500, 10_000])
def test_training_counts_an_epochs_samples_and_its_shuffle_once(monkeypatch, batch_size):
    """Shuffling takes .2 s and a step 10 ms: an epoch of 15 steps takes .35 s, one of a single step .21 s."""

    class Step:
        def __init__(self, *_args, **_kwargs):
            pass

        def __call__(self, *_batch):
            time.sleep(0.01)

    def shuffle(*args, **kwargs):
        time.sleep(0.2)
        return randperm(*args, **kwargs)

    randperm = torch.randperm
    bench = module._Bench(random_dataset(SIZES), SMALL.replaced(batch_size=batch_size), CPU)
    monkeypatch.setattr(module, "Step", Step)
    monkeypatch.setattr(torch, "randperm", shuffle)
    steps = len(bench.batches)
    assert steps == (15 if batch_size == 500 else 1)
    found = bench._train(NeuMF(150, 130, factors=4, layers=(8, 4)), "fp32", tqdm(disable=True))
    assert found == pytest.approx(1500 * 5 / (0.2 + 0.01 * steps), rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "options", "precisions", "message"),
    [
        ((10, 50, 5), {}, ["fp32"], "5 interactions cannot give each of 10 users one"),
        ((10, 5, 500), {}, ["fp32"], "50 distinct pairs, fewer than the 500"),
        ((150, 130, 1500), {"batch_size": 4}, ["fp32"], "--batch-size must hold .* at least 5: got 4"),
        ((150, 130, 1500), {"layers": (15, 8)}, ["fp32"], "--layers must be none, or .* even"),
        ((150, 130, 1500), {}, ["fp16"], "fp16.*CUDA"),
        ((150, 130, 1500), {"factors": 10**10}, ["fp32"], "needs about [0-9.]+ GiB and cpu has"),
        ((10**7, 10**7, 10**13), {}, ["fp32"], "needs about [0-9.]+ GiB and cpu has"),
    ],
)
def test_what_cannot_be_measured(sizes, options, precisions, message):
    with pytest.raises(InputError, match=message):
        benchmark(BenchmarkConfig(*sizes), TrainConfig(**options), precisions=precisions, device="cpu")


def test_the_table_has_a_row_per_precision_and_the_speed_up_over_fp32():
    (one,) = benchmark(SIZES, SMALL, precisions=["fp32"], device="cpu")
    fp32 = one | {"train_samples_per_s": 1000.0, "evaluate_items_per_s": 4000.0, "full_ranking_pairs_per_s": 19500.0}
    bf16 = fp32 | {"precision": "bf16", "train_samples_per_s": 2500.0}
    rows = [line.split() for line in format_benchmark([fp32, bf16])]
    assert ["fp32", "500", "1,000", "1.00", "4,000", "19,500"] in [row[:6] for row in rows]
    assert ["bf16", "500", "2,500", "2.50"] in [row[:4] for row in rows]
    assert ["bf16", "500", "2,500", "-"] in [line.split()[:4] for line in format_benchmark([bf16])]
