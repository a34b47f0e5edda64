import math

import pytest
import torch

from ncf import benchmark as module
from ncf.benchmark import benchmark, random_dataset, supported_precisions
from ncf.benchmark_table import format_benchmark, merged
from ncf.config import BenchmarkConfig, TrainConfig
from ncf.errors import InputError
from ncf.model.neumf import NeuMF

SIZES = BenchmarkConfig(users=150, items=130, interactions=1500)
SMALL = TrainConfig(factors=4, layers=(8, 4), batch_size=500)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("TRAIN_SECONDS", "EVALUATE_SECONDS", "RANK_SECONDS", "LATENCY_SECONDS"):
        monkeypatch.setattr(module, name, 0.02)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_random_log_has_the_sizes_asked_for():
    dataset = random_dataset(SIZES)
    assert (dataset.n_users, dataset.n_items, dataset.n_train) == (150, 130, 1500)
    assert torch.bincount(dataset.train_users).tolist() == [10] * 150
    assert (dataset.train_users.diff() >= 0).all()
    for items in (dataset.train_items, dataset.test_items):
        assert items.dtype == torch.int32
        assert 0 <= items.min() <= items.max() < 130
    assert len(dataset.train_items.unique()) > 120


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
    with pytest.warns(match="fewer than 99 untouched items"):
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
def test_training_counts_an_epochs_samples_and_its_shuffle_once(monkeypatch, clock, batch_size):
    """Shuffling takes 7 s and a step 2 s: an epoch of 15 steps takes 37 s, one of a single step 9 s."""

    class Step:
        def __init__(self, *_args, **_kwargs):
            pass

        def __call__(self, *_batch):
            clock[0] += 2

    def shuffle(*args, **kwargs):
        clock[0] += 7
        return randperm(*args, **kwargs)

    randperm = torch.randperm
    bench = module._Bench(random_dataset(SIZES), SMALL.replaced(batch_size=batch_size), CPU)
    monkeypatch.setattr(module, "Step", Step)
    monkeypatch.setattr(torch, "randperm", shuffle)
    monkeypatch.setattr(module, "TRAIN_SECONDS", 100.0)
    steps = len(bench.batches)
    assert steps == (15 if batch_size == 500 else 1)
    found = bench._train(NeuMF(150, 130, factors=4, layers=(8, 4)), "fp32")
    assert found == pytest.approx(1500 * 5 / (7 + 2 * steps))


@pytest.mark.parametrize(("most", "budget"), [(1000, 5.0), (3, 5.0), (10**6, 0.001)])
def test_a_rate_is_units_over_seconds_and_leaves_the_warm_up_out(clock, most, budget):
    """The first call takes a minute more, each unit 10 ms."""
    done = []

    def work(n):
        clock[0] += 0.01 * n + (0 if done else 60)
        done.append(n)

    assert module._rate(work, most, 16, budget, CPU)[0] == pytest.approx(100)
    assert max(done) <= most
    assert sum(done[-module.RUNS :]) * 0.01 <= budget or done[-1] == 1 or done[-1] == most


def test_a_rate_is_a_median(clock):
    seconds = iter([1, 1, 9, 2, 3, 1, 4])  # the warm-up, the pilot, then five runs

    def work(_n):
        clock[0] += next(seconds)

    assert module._rate(work, 6, 6, 60.0, CPU) == (pytest.approx(6 / 3), 6)


def test_latency_is_in_milliseconds_of_single_requests(monkeypatch, clock):
    """Requests take 1, 2, ..., 200 ms; those of the warm-up before them a second."""
    asked = []

    def top_items(_scorer, users, k, _seen):
        assert (len(users), k, torch.get_num_threads()) == (1, 7, 1)
        asked.append(int(users))
        late = len(asked) - module.WARM_REQUESTS
        clock[0] += late / 1000 if late > 0 else 1

    monkeypatch.setattr(module, "top_items", top_items)
    users = torch.arange(500) % 150
    found = module._latency(NeuMF(150, 130, factors=4, layers=(8, 4)), torch.float32, users, 7, None)
    assert len(asked) == 200 + module.WARM_REQUESTS
    assert found == {"p50": pytest.approx(100), "p99": pytest.approx(198)}


def test_the_exam_is_of_no_more_users_than_it_takes(monkeypatch):
    monkeypatch.setattr(module, "EXAM_USERS", 40)
    bench = module._Bench(random_dataset(SIZES), SMALL, CPU)
    assert len(bench.exam.users) == 40
    assert (bench.exam.positives == bench.dataset.test_items[bench.exam.users]).all()


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


def test_tables_have_a_row_a_precision_and_the_speed_up_over_fp32():
    (one,) = benchmark(SIZES, SMALL, precisions=["fp32"], device="cpu")
    fp32 = one | {"train_samples_per_s": 1000.0, "evaluate_items_per_s": 4000.0, "full_ranking_pairs_per_s": 19500.0}
    bf16 = fp32 | {"precision": "bf16", "train_samples_per_s": 2500.0}
    lines = format_benchmark([fp32, bf16])
    rows = [line.split() for line in lines]
    at = lines.index("Training: whole steps, shuffling and negatives included")
    assert lines[at + 1].split("  ")[0] == "precision"
    assert rows[at + 2 : at + 4] == [["fp32", "500", "1,000", "1.00"], ["bf16", "500", "2,500", "2.50"]]
    assert "fp32: all 150 users would take 1.0 s" in lines
    assert ["bf16", "500", "2,500", "-"] in [line.split() for line in format_benchmark([bf16])]
    assert merged([fp32]) == fp32
    assert merged([fp32, bf16]) == fp32 | {"precisions": [fp32, bf16]}
