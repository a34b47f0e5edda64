"""Training on two processes, each pinned to a core, against one pinned to one core; and how evenly users are cut.

    python benchmarks/scaling.py                                # at ml-20m's size
    python benchmarks/scaling.py --data data/ml-1m --rounds 0   # the cut alone, of a prepared dataset
    python benchmarks/scaling.py --users 2000 --items 1000 --interactions 100000 --batch-size 20000  # a trial

In a round each side runs once, after one another and in processes of its own. They load, take a step to warm up, in
which the bytes given to collectives are counted where torch dispatches them, and are timed over the next ones:
negatives, gradient, all-reduce, Adam. Strong scaling shares --batch-size among the processes, weak scaling gives it to
each. Medians and ranges are over rounds, and so are ratios, each taken within a round.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.interactions import Sequence
from ncf.data.shard import shard_borders
from ncf.device import configure_cpu
from ncf.ingest.synthetic import generate
from ncf.model.neumf import NeuMF
from ncf.parallel.environment import process_env
from ncf.parallel.group import join
from ncf.training.trainer import Trainer

USERS, ITEMS, INTERACTIONS, BATCH = 138_493, 26_744, 20_000_263, 1_048_576  # ml-20m's, and the recipe's batch
BAR = 1.6  # of one process's throughput, by two that share the batch
WORLDS = 2, 3, 4, 8, 64


@dataclass(frozen=True)
class Side:
    """What is measured: so many processes, the batch shared among them or one for each."""

    name: str
    processes: int
    batches: int  # of --batch-size, in a step of all processes


SIDES = Side("one process", 1, 1), Side("strong", 2, 1), Side("weak", 2, 2)


# the data


def training_pairs(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Users and items [N] to train on, in order of user, and how many users and items there are."""
    if arguments.data:
        dataset = Dataset.load(arguments.data)
        mine = dataset.interactions
        return mine.train_users.numpy(), mine.train_items.numpy(), mine.n_users, mine.n_items
    sizes = {"users": arguments.users, "items": arguments.items, "interactions": arguments.interactions}
    users, items, _ = generate(**sizes, seed=0, progress=sys.stderr.isatty())
    users, items = (users - 1).astype(np.int32), (items - 1).astype(np.int32)
    ends = np.bincount(users, minlength=arguments.users).cumsum()
    kept = np.arange(len(users)) < (ends - 2)[users]  # the last two of a user are held out
    return users[kept], items[kept], arguments.users, arguments.items


def borders_of(users: np.ndarray, n_users: int, world: int) -> list[int]:
    """Where users are cut: 0, ..., U."""
    return shard_borders(users, n_users, world)


def print_imbalance(users: np.ndarray, n_users: int) -> None:
    """The largest rank's interactions and users, over the mean."""
    rows: dict[str, list[str]] = {"interactions": [], "users": []}
    for world in WORLDS:
        borders = borders_of(users, n_users, world)
        starts = np.searchsorted(users, borders)
        for name, sizes, total in (("interactions", np.diff(starts), len(users)), ("users", np.diff(borders), n_users)):
            rows[name].append(f"{sizes.max() / (total / world):.4f}")
    print(f"\n{n_users:,} users, {len(users):,} training interactions; the largest rank over the mean:\n")
    print_table(["W", *map(str, WORLDS)], [[name, *values] for name, values in rows.items()])


# one process


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that this process enters and the bytes that it gives them, as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation pass; count it if it is a collective."""
        if function.namespace == "c10d":
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.calls += 1
            self.bytes += sum(tensor.nbytes for tensor in given if isinstance(tensor, torch.Tensor))
        return function(*args, **(kwargs or {}))


def work(folder: Path, arguments: argparse.Namespace) -> None:
    """One process of a side: load, train some steps, and, as rank 0, print what was found as JSON."""
    with join(process_env()) as group:
        configure_cpu(group)
        users, items = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("users", "items"))
        borders = borders_of(users, arguments.users, group.world)
        first, end = list(pairwise(borders))[group.rank]
        rows = slice(*np.searchsorted(users, [first, end]))
        config = TrainConfig(batch_size=arguments.batch_size, precision=arguments.precision)
        model = NeuMF(end - first, arguments.items, user_offset=first)
        own = torch.from_numpy(users[rows] - np.int32(first)), torch.from_numpy(np.array(items[rows]))
        trainer = Trainer(model, Sequence(*own), config, torch.device("cpu"), "train", group)
        steps = take_steps(trainer)
        with CountCollectives() as count:
            next(steps)
        group.barrier()
        begin, samples = time.perf_counter(), 0
        for _ in range(arguments.steps):
            samples += next(steps)
        group.barrier()
        seconds = time.perf_counter() - begin
        found = {"samples_per_s": group.all_sum(samples)[0] / seconds, "calls": count.calls, "bytes": count.bytes}
        if group.is_main:
            print(json.dumps(found))


def take_steps(trainer: Trainer) -> Iterator[int]:
    """Train step after step, epoch after epoch; this rank's samples of each."""
    generator = torch.Generator().manual_seed(trainer.group.rank)
    trainer.model.train()
    while True:
        for batch in trainer.batches.epoch(generator):
            trainer.step(batch, generator)
            yield int(batch.samples)


# the sides


def distinct_cores() -> list[int]:
    """One logical core of each physical core that this process may use."""
    cores: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        cores.setdefault(file.read_text() if file.exists() else str(core), core)
    return list(cores.values())


def measure(side: Side, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """What the processes of a side found."""
    usable, cores = os.sched_getaffinity(0), distinct_cores()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    sizes = {"users": arguments.users, "items": arguments.items, "batch-size": arguments.batch_size * side.batches}
    command = [sys.executable, __file__, "--work", str(folder), "--precision", arguments.precision]
    command += [f"--{name}={value}" for name, value in (sizes | {"steps": arguments.steps}).items()]
    processes = []
    try:
        for rank in range(side.processes):
            place = {"RANK": str(rank), "WORLD_SIZE": str(side.processes)} if side.processes > 1 else {}
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            os.sched_setaffinity(0, {cores[rank]})  # a process inherits it
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | address | place)
            )
    finally:
        os.sched_setaffinity(0, usable)
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{side.name}: a process failed, and has said why above")
    found: dict[str, float] = json.loads(outputs[0])
    return found


def compare(folder: Path, arguments: argparse.Namespace) -> None:
    """Run the rounds, and print the tables."""
    speeds: dict[str, list[float]] = {side.name: [] for side in SIDES}
    for number in range(1, arguments.rounds + 1):
        for side in SIDES:
            found = measure(side, folder, arguments)
            speeds[side.name].append(found["samples_per_s"])
            print(
                f"round {number}: {side.name:<11} {side.processes} x 1 core  {found['samples_per_s']:>11,.0f} samples/s"
                f"  {found['calls']} collectives, {found['bytes']:,} bytes a step",
                flush=True,
            )
    one = speeds[SIDES[0].name]
    ratios = {name: [a / b for a, b in zip(values, one, strict=True)] for name, values in speeds.items()}
    rows = [
        [side.name, str(side.processes), spread_of(speeds[side.name], ",.0f"), spread_of(ratios[side.name], ".2f")]
        for side in SIDES
    ]
    print()
    print_table(["", "processes", "samples/s, median (lowest to highest)", "against one process"], rows)
    reached = statistics.median(ratios["strong"])
    verdict = "met" if reached >= BAR else "missed"
    print(f"\nTwo processes that share a batch: {reached:.2f} of one; the bar, {BAR}, is {verdict}")


def spread_of(values: list[float], form: str) -> str:
    """`median (lowest to highest)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """A table, in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def parse() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a prepared dataset (default: a synthetic log of the sizes below)")
    sizes = {"users": USERS, "items": ITEMS, "interactions": INTERACTIONS, "batch-size": BATCH}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}, as ml-20m or the recipe")
    parser.add_argument("--precision", default="fp32", help="fp32 or bf16 (default: fp32)")
    parser.add_argument("--steps", type=int, default=2, help="steps that are timed in a run (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; 0: the cut alone (default: 3)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Cut, run, print."""
    arguments = parse()
    if arguments.work:
        work(arguments.work, arguments)
        return
    cores = distinct_cores()
    print(
        f"{len(cores)} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {arguments.precision}", end=""
    )
    print(f", batch {arguments.batch_size:,}, {arguments.steps} steps timed in a run")
    if arguments.rounds and len(cores) < 2:
        sys.exit("two processes need two cores of their own: run with --rounds 0, or elsewhere")
    users, items, arguments.users, arguments.items = training_pairs(arguments)
    print_imbalance(users, arguments.users)
    if not arguments.rounds:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "users.npy", users)
        np.save(folder / "items.npy", items)
        del users, items
        print()
        compare(folder, arguments)


if __name__ == "__main__":
    main()
