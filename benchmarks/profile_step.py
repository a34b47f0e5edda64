"""Where the time of training on a CPU goes: batches, and the step by operation, beside what the cores can do.

    python benchmarks/profile_step.py

Core-nanoseconds a sample (two cores busy for one nanosecond are two) of each operation within itself, over all of the
step's threads; what is left to the wall clock is Python, views and waiting. FLOPs are those of docs/scaling.md. Then,
on one core: products of the step's shape, and a copy of memory that is not in the cache. At last what an epoch of
ml-20m's size spends on its order and its batches (rows, sort, negatives), beside the step.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

from ncf.config import TrainConfig
from ncf.cpu.forward import PAIRS
from ncf.data.interactions import Sequence
from ncf.device import configure_cpu, device_name
from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.threads import thread_count
from ncf.training.batches import Batches
from ncf.training.step import Step

USERS, ITEMS, INTERACTIONS, BATCH, CANDIDATES = 138_493, 26_744, 20_000_263, 1_048_576, 5
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear", "aten::addmv_", "aten::mv"),
    "gathers": ("aten::index_select", "aten::embedding", "aten::unique_consecutive"),
    "scatter-adds": ("aten::index_add_", "aten::scatter_add_"),
    "ReLU and masks": ("aten::threshold_backward", "aten::clamp_min_", "aten::relu_"),
    "random bytes": (
        "aten::bitwise_left_shift",
        "aten::bitwise_right_shift",
        "aten::bitwise_xor_",
        "aten::bitwise_and_",
        "aten::random_",
    ),
    "copies and casts": ("aten::copy_", "aten::fill_", "aten::zero_", "aten::cat", "aten::_foreach_zero_"),
    "elementwise": ("aten::mul", "aten::mul_", "aten::add", "aten::add_", "aten::sub_", "aten::sigmoid"),
    "sums": ("aten::sum",),
    "Adam": ("aten::_fused_adam_", "aten::_foreach_div_"),
}


def best_of(times: int, run: Callable[[], object]) -> float:
    """The least seconds of `run`."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def machine() -> tuple[float, float]:
    """GFLOP/s of a product of the second hidden layer's shape, and GB/s read plus written by a copy, of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x, weight, out = torch.randn(PAIRS, 256), torch.randn(256, 128), torch.empty(PAIRS, 128)
    product = best_of(300, lambda: torch.mm(x, weight, out=out))
    source = torch.randn(2**26)
    target = torch.empty_like(source)
    copy = best_of(5, lambda: target.copy_(source))
    torch.set_num_threads(threads)
    return 2 * PAIRS * 256 * 128 / product / 1e9, 2 * source.nbytes / copy / 1e9


def batches(config: TrainConfig) -> tuple[float, float, int]:
    """Seconds to shuffle an epoch's order, seconds of a batch, and how many an epoch has."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(USERS, (INTERACTIONS,), generator=generator, dtype=torch.int32).sort().values
    items = torch.randint(ITEMS, (INTERACTIONS,), generator=generator, dtype=torch.int32)
    source = Batches(Sequence(users, items), USERS, ITEMS, config)
    epoch, taken = source.epoch(generator), []
    for _ in range(8):
        begin = time.perf_counter()
        next(epoch)
        taken.append(time.perf_counter() - begin)
    each = statistics.median(taken[1:])
    return taken[0] - each, each, len(source)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=BATCH, help=f"samples (default: {BATCH:,})")
    parser.add_argument("--rounds", type=int, default=3, help="profiles, of which the quickest counts (default: 3)")
    arguments = parser.parse_args()
    configure_cpu()
    step, generator = Step(NeuMF(USERS, ITEMS).train(), TrainConfig()), torch.Generator().manual_seed(0)
    rows = arguments.batch_size // CANDIDATES
    users = torch.randint(USERS, (rows,), generator=generator).sort().values
    candidates = torch.randint(ITEMS, (rows, CANDIDATES), generator=generator)
    samples, cores = candidates.numel(), thread_count()
    batch = Batch(users, candidates, None, samples)

    def run() -> None:
        step(batch, generator)

    run()
    wall = best_of(arguments.rounds, run)
    quickest: dict[str, float] = {}
    profiled = math.inf
    for _ in range(arguments.rounds):
        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as record:
            profiled = min(profiled, best_of(1, run))
        found = {event.key: 1000 * event.self_cpu_time_total / samples for event in record.key_averages()}
        if not quickest or sum(found.values()) < sum(quickest.values()):
            quickest = found
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"batch {samples:,}, micro-batches of {PAIRS:,}, fp32, dropout 0.5")
    print(
        f"step: {wall:.2f} s, {samples / wall:,.0f} samples/s, {1e9 * wall * cores / samples:,.0f} core-ns a sample\n"
    )
    for kind, names in KINDS.items():
        print(f"{kind:<18} {sum(quickest.pop(name, 0.0) for name in names):>7,.0f} core-ns a sample")
    print(f"{'other operations':<18} {sum(quickest.values()):>7,.0f} core-ns a sample")
    print(f"a step under the profiler takes {1e9 * profiled * cores / samples:,.0f} core-ns a sample\n")
    flops, bandwidth = machine()
    print(f"one core: {flops:.0f} GFLOP/s in products of the step's shape, {bandwidth:.1f} GB/s copying from memory")
    shuffle, each, count = batches(TrainConfig(batch_size=arguments.batch_size))
    share = (shuffle / count + each) / (shuffle / count + each + wall)
    print(f"order of an epoch {shuffle:.2f} s, a batch {each:.3f} s, {count} in an epoch: {share:.1%} of its time")


if __name__ == "__main__":
    main()
