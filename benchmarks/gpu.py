"""Training on a GPU: whether it is right, then how fast it is at ml-20m's size. Needs torch (>= 2.11) alone.

    python benchmarks/gpu.py                  # on the GPU, under 6 minutes; without one, a trial on the CPU
    python benchmarks/gpu.py --seconds 600    # more time to measure
    python benchmarks/gpu.py --device cpu     # the trial

A line a check, `ok` or FAILED, with its figure; then a line a measurement. What is timed is whole epochs, shuffling and
negatives included, after a step of warm-up that compiles; a figure is the median of up to three epochs. Compiled bf16
comes first, and what no longer fits --seconds is left out and named. The exit status is 1 where a check failed.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))  # runs where ncf is not installed

from gpu_checks import check_all, failures

from ncf.config import TrainConfig
from ncf.data.interactions import Sequence
from ncf.device import pick_device
from ncf.model.neumf import NeuMF
from ncf.training.autograd import wants_compile
from ncf.training.batches import Batches
from ncf.training.step import Step

BAR = 142.9e6  # samples/s: eight A100 with the best published recipe
USERS, ITEMS, INTERACTIONS = 138_493, 26_744, 20_000_263  # ml-20m's
BATCHES = 1_048_576, 4_194_304, 262_144, 2_097_152, 8_388_608, 65_536  # in order of interest
TRIAL = 500, 200, 10_000  # the same, of a trial on a CPU
TRIAL_BATCHES = 8_192, 2_048
EPOCHS = 3  # timed at most
EPOCHS_SECONDS = 3.0  # after which no further one is timed
PROFILED = 5  # steps


@dataclass(frozen=True)
class Way:
    """One way to train: fp32, tf32, bf16 or fp16, compiled or not, and samples in a step."""

    precision: str
    compiled: bool
    batch: int

    def __str__(self) -> str:
        return f"{self.precision} {'compiled' if self.compiled else 'eager   '} {self.batch:>9,}"


def ways(device: torch.device) -> list[Way]:
    """What to measure, the most interesting first."""
    if device.type == "cpu":
        return [Way(precision, False, batch) for precision in ("bf16", "fp32") for batch in TRIAL_BATCHES]
    first = BATCHES[0]
    compiled = wants_compile(TrainConfig(), device)
    return [
        Way("bf16", compiled, first),
        *(Way(precision, compiled, first) for precision in ("fp16", "tf32", "fp32")),
        *(Way(precision, False, first) for precision in ("bf16", "fp16", "tf32", "fp32") if compiled),
        *(Way("bf16", compiled, batch) for batch in BATCHES[1:]),
        *(Way("fp16", compiled, batch) for batch in BATCHES[1:]),
        *(Way("tf32", compiled, batch) for batch in BATCHES[1:3]),
    ]


class Bench:
    """Random pairs at a real size, resident on the device, and a network to train on them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_users, self.n_items, n = TRIAL if device.type == "cpu" else (USERS, ITEMS, INTERACTIONS)
        generator = torch.Generator(device).manual_seed(0)
        users = torch.randint(self.n_users, (n,), generator=generator, device=device, dtype=torch.int32)
        self.users = users.sort().values
        self.items = torch.randint(self.n_items, (n,), generator=generator, device=device, dtype=torch.int32)
        self.model = NeuMF(self.n_users, self.n_items).to(device).train()

    def batches(self, way: Way) -> Batches:
        """The batches of a way."""
        return Batches(
            Sequence(self.users, self.items), self.n_users, self.n_items, self._config(way), pad=way.compiled
        )

    def steps(self, way: Way, batches: Batches) -> Iterator[int]:
        """Train without end, a step at a time: where in its epoch the step is, from 1."""
        torch.set_float32_matmul_precision("high" if way.precision == "tf32" else "highest")
        step, generator = Step(self.model, self._config(way)), torch.Generator(self.device).manual_seed(1)
        while True:
            for number, batch in enumerate(batches.epoch(generator), 1):
                step(batch, generator)
                yield number

    def measure(self, way: Way) -> tuple[float, str]:
        """Samples/s, and a line of it: the median and range over epochs, the share of sampling, memory."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        batches, begin = self.batches(way), time.perf_counter()
        steps = self.steps(way, batches)
        for _ in range(2):
            next(steps)
        self.wait()
        warm = time.perf_counter() - begin
        while next(steps) != len(batches):  # the epoch's rest, so that whole ones follow
            pass
        samples = len(self.users) * (1 + batches.negative_samples)
        seconds: list[float] = []
        while not seconds or (len(seconds) < EPOCHS and sum(seconds) < EPOCHS_SECONDS):
            self.wait()
            begin = time.perf_counter()
            while next(steps) != len(batches):
                pass
            self.wait()
            seconds.append(time.perf_counter() - begin)
        speed = samples / statistics.median(seconds)
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if on_gpu else "memory not counted"
        spread = f"({samples / max(seconds):,.0f} to {samples / min(seconds):,.0f}, {len(seconds)} epochs)"
        share = self.draw_seconds(batches) / statistics.median(seconds)
        figures = f"{speed:>13,.0f} samples/s {spread}, {speed / BAR:.3f} of the bar"
        return speed, f"{figures}; batches alone {share:.0%}; {memory}; warm-up {warm:.1f} s"

    def draw_seconds(self, batches: Batches) -> float:
        """How long an epoch's batches take without a step."""
        self.wait()
        begin = time.perf_counter()
        for _ in batches.epoch(torch.Generator(self.device).manual_seed(2)):
            pass
        self.wait()
        return time.perf_counter() - begin

    def profile(self, way: Way) -> str:
        """Where the time of some steps goes, by kernel."""
        steps = self.steps(way, self.batches(way))
        for _ in range(2):
            next(steps)
        self.wait()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            for _ in range(PROFILED):
                next(steps)
            self.wait()
        key = "self_cpu_time_total" if self.device.type == "cpu" else "self_device_time_total"
        return profile.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=70)

    def wait(self) -> None:
        """Until the device has done what is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _config(self, way: Way) -> TrainConfig:
        precision = "fp32" if way.precision == "tf32" else way.precision
        return TrainConfig(precision=precision, batch_size=way.batch, compile=way.compiled)


def bandwidth(device: torch.device) -> float:
    """Bytes/s of a large copy on the device, read and written: what bounds the gathers and elementwise work."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**22, device=device).normal_()
    target, seconds = torch.empty_like(source), []
    for _ in range(7):
        begin = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.nbytes / statistics.median(seconds[2:])


def measure_all(device: torch.device, until: float) -> None:
    """Measure way after way while there is time, then profile the fastest."""
    try:
        print(f"\na copy moves {bandwidth(device) / 1e12:.3f} TB/s, read and written", flush=True)
        bench = Bench(device)
    except Exception as error:  # noqa: BLE001 - told, and what was found before stands
        failures.append(f"data: {first_line(error)}")
        return
    print(f"{bench.n_users:,} users, {bench.n_items:,} items, {len(bench.users):,} pairs; the bar is {BAR:,.0f}\n")
    speeds: dict[Way, float] = {}
    longest = 0.0
    for way in ways(device):
        begin = time.perf_counter()
        if begin + longest > until:
            print(f"{way}  left out: no time", flush=True)
            continue
        try:
            speeds[way], line = bench.measure(way)
        except Exception as error:  # noqa: BLE001 - such as out of memory; the next may fit
            line = f"not measured: {first_line(error)}"
        print(f"{way}  {line}", flush=True)
        longest = max(longest, time.perf_counter() - begin)
    if not speeds:
        failures.append("nothing could be measured")
        return
    best = max(speeds, key=speeds.__getitem__)
    print(f"\nfastest: {best}  {speeds[best]:,.0f} samples/s, {speeds[best] / BAR:.3f} of the bar; its operations:\n")
    try:
        print(bench.profile(best))
    except Exception as error:  # noqa: BLE001 - told
        print(f"not profiled: {first_line(error)}")


def first_line(error: Exception) -> str:
    """What went wrong, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> None:
    """Check, measure, and say whether all is right."""
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--seconds", type=float, default=300, help="after which nothing new is begun (default: 300)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="TensorFloat32")  # fp32 is meant to be fp32
    torch._dynamo.config.recompile_limit = 64  # as many shapes and precisions as are compared
    device = pick_device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, compiled: {wants_compile(TrainConfig(), device)}\n", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is small is slower on several, where they are not free
    check_all(device, ("fp32", "bf16", "fp16"))
    torch.set_num_threads(threads)
    measure_all(device, begin + arguments.seconds)
    print(f"\n{time.perf_counter() - begin:.0f} s; {'FAILED: ' + ', '.join(failures) if failures else 'all checks ok'}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
