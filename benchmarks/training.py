"""Training throughput of NeuMF: ncf beside the usual PyTorch way, TensorFlow and RecBole, in one run; and ALS's fit.

    python benchmarks/training.py --setup   # once: an environment for each peer that needs one, by pip
    python benchmarks/training.py           # at ml-20m's size, with the recipe's batch of 1,048,576
    python benchmarks/training.py --users 2000 --items 1000 --interactions 100000 --batch-size 20000  # a trial

Every arm trains the recipe's network on the same samples, of which one in five is positive, with dropout and Adam on.
Each lives in a process of its own. In a round each takes steps for at least 20 s, in turn, while the others wait for
their input; the first step of each is a warm-up and is not counted. What is timed is the step alone: forward, backward
and Adam on a batch in memory. Medians and ranges are over rounds, and so are ratios, each taken within a round.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ncf.device import device_name
from ncf.model.products import has_fast_bf16

USERS, ITEMS, INTERACTIONS, BATCH = 138_493, 26_744, 20_000_263, 1_048_576  # ml-20m's, and the recipe's batch
HERE = Path(__file__).resolve().parent
PRECISIONS = {"usual": ("fp32", "bf16"), "ncf": ("fp32", "bf16"), "tensorflow": ("fp32", "bf16"), "recbole": ("fp32",)}
PEERS = (*PRECISIONS, "als")
OWN = "usual", "ncf"  # run in this environment
BASELINE = "usual fp32"
TURN_SECONDS = 20.0
CANDIDATES = 5  # a positive and four negatives


@dataclass
class Arm:
    """A process that takes a step when told to, and what it answered."""

    peer: str
    precision: str
    process: subprocess.Popen[str]
    log: Path
    version: str = ""
    answers: list[dict[str, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.peer} {self.precision}"

    def read(self) -> dict[str, Any]:
        """The next answer. Ends the run where there is none."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            sys.exit(f"{self.name} ended with status {self.process.wait()}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self) -> dict[str, float]:
        """Take steps until TURN_SECONDS have gone; their mean seconds, the last loss, the peak of memory.

        One long step and several short ones are then as far from the others' turns, after which memory is cold.
        """
        begin, seconds = time.monotonic(), []
        while not seconds or time.monotonic() - begin < TURN_SECONDS:
            answer = self.step()
            seconds.append(answer["seconds"])
        return answer | {"seconds": statistics.mean(seconds)}

    def step(self) -> dict[str, float]:
        """Take a step; its seconds, loss and the process's peak of memory."""
        if self.process.poll() is None and self.process.stdin:
            self.process.stdin.write("step\n")
            self.process.stdin.flush()
        answer = self.read()
        if not math.isfinite(answer["loss"]):
            sys.exit(f"{self.name}: the loss is {answer['loss']}")
        return answer


# the environments


def python_of(peer: str, envs: Path) -> Path:
    """The interpreter of a peer."""
    return Path(sys.executable) if peer in OWN else envs / peer / "bin" / "python"


def set_up(peers: list[str], envs: Path) -> None:
    """Create the environments of `peers` with pip, from the pinned requirements beside them."""
    for peer in peers:
        if peer in OWN:
            continue
        if peer == "recbole" and sys.version_info[:2] != (3, 11):
            print("recbole: left out, as its numpy needs Python 3.11; run --setup with that")
            continue
        print(f"{peer}: {envs / peer}", flush=True)
        venv.create(envs / peer, with_pip=True, clear=True)
        pip = [str(python_of(peer, envs)), "-m", "pip", "install", "--quiet"]
        requirements = HERE / "peers" / f"{peer}.txt"
        subprocess.run([*pip, "-r", str(requirements)], check=True)
        bare = requirements.with_name(f"{peer}-no-deps.txt")
        if bare.exists():
            subprocess.run([*pip, "--no-deps", "-r", str(bare)], check=True)


def wanted(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Peers and precisions to run; says what is left out and why."""
    for peer in arguments.peers:
        if not python_of(peer, arguments.envs).exists():
            print(f"{peer}: left out, as {arguments.envs / peer} is not there; run with --setup")
            continue
        for precision in PRECISIONS.get(peer, ("fp32",)):
            if precision == "bf16" and not has_fast_bf16():
                print(f"{peer} bf16: left out, as this CPU has no bf16 products")
            elif precision in arguments.precision:
                yield peer, precision


# the run


@contextmanager
def running(peer: str, precision: str, arguments: argparse.Namespace, folder: Path) -> Iterator[Arm]:
    """An arm that is ready for its first step."""
    job = {name: getattr(arguments, name) for name in ("users", "items", "interactions", "batch_size")}
    job["precision"] = precision
    command = [python_of(peer, arguments.envs), HERE / "peers" / f"run_{peer}.py", json.dumps(job)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "THP_MEM_ALLOC_ENABLE": arguments.huge_pages}
    log = folder / f"{peer}-{precision}.log"
    if peer not in OWN:
        environment.pop("PYTHONPATH", None)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=None if peer in OWN else folder,  # RecBole writes logs where it runs
        )
    arm = Arm(peer, precision, process, log)
    try:
        arm.version = arm.read()["version"]
        yield arm
    finally:
        process.kill()
        process.wait()


def compare(arms: list[Arm], samples: int, rounds: int) -> dict[str, list[float]]:
    """Warm up, run the rounds, print the tables; samples/s of each arm, one a round."""
    for arm in arms:
        answer = arm.step()
        print(f"warm-up: {arm.name:<16} {answer['seconds']:8.2f} s  {arm.version}", flush=True)
    for number in range(1, rounds + 1):
        for arm in arms:
            arm.answers.append(arm.turn())
            seconds = arm.answers[-1]["seconds"]
            print(f"round {number}: {arm.name:<16} {seconds:8.2f} s  {samples / seconds:>11,.0f} samples/s", flush=True)
    speeds = {arm.name: [samples / answer["seconds"] for answer in arm.answers] for arm in arms}
    rows = []
    for arm in arms:
        ratio = spread_of(ratios(speeds[arm.name], speeds[BASELINE]), ".2f") if BASELINE in speeds else ""
        loss, peak = f"{arm.answers[-1]['loss']:.4f}", f"{arm.answers[-1]['peak']:.1f}"
        rows.append([arm.name, spread_of(speeds[arm.name], ",.0f"), ratio, loss, peak])
    print()
    print_table(["", "samples/s", f"against {BASELINE}", "last loss", "peak GiB"], rows)
    print_best(speeds)
    return speeds


def fit_als(arguments: argparse.Namespace, folder: Path, speeds: dict[str, list[float]]) -> None:
    """Fit ALS once, when no other arm is there, and print its seconds beside an epoch of ncf's."""
    with running("als", "fp32", arguments, folder) as als:
        seconds = als.step()["seconds"]
        what = f"{arguments.interactions:,} random pairs"
        print(f"\n{als.version}: ALS, 64 factors, 15 iterations, fits {what} in {seconds:.1f} s")
    for name in (name for name in speeds if name.startswith("ncf")):
        epoch = arguments.interactions * CANDIDATES / statistics.median(speeds[name])
        print(f"{name}: the steps of one epoch of as many interactions, {CANDIDATES} samples each, take {epoch:.1f} s")


def print_best(speeds: dict[str, list[float]]) -> None:
    """ncf, in its faster precision, against the fastest peer."""
    ours = [name for name in speeds if name.startswith("ncf")]
    peers = [name for name in speeds if name not in ours]
    if not ours or not peers:
        return
    own, peer = (max(group, key=lambda name: statistics.median(speeds[name])) for group in (ours, peers))
    print(f"\n{own} against the fastest peer, {peer}: {spread_of(ratios(speeds[own], speeds[peer]), '.2f')}")


def ratios(values: list[float], others: list[float]) -> list[float]:
    """One ratio a round."""
    return [a / b for a, b in zip(values, others, strict=True)]


def spread_of(values: list[float], form: str) -> str:
    """`median [lowest, highest]`."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """A table, in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


def parse() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"users": USERS, "items": ITEMS, "interactions": INTERACTIONS, "batch-size": BATCH}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}, as ml-20m or the recipe")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each arm (default: 5)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="whom to run (default: all)")
    both = "fp32", "bf16"
    parser.add_argument("--precision", nargs="+", choices=both, default=both, help="default: both, where the CPU can")
    pages = "whether torch takes huge pages, in all arms that run on it (default: 0, as torch comes)"
    parser.add_argument("--huge-pages", choices=("0", "1"), default="0", help=pages)
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="where the peers' environments are")
    parser.add_argument("--setup", action="store_true", help="create the environments of --peers, and end")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.batch_size < 5 or min(arguments.users, arguments.items) < 1:
        parser.error("--rounds, --users and --items must be at least 1, --batch-size at least 5")
    arguments.envs = arguments.envs.absolute()
    return arguments


def main() -> None:
    """Set up, or run and print."""
    arguments = parse()
    if arguments.setup:
        set_up(arguments.peers, arguments.envs)
        return
    samples = arguments.batch_size // CANDIDATES * CANDIDATES  # whole interactions
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, load before {os.getloadavg()[0]:.1f}")
    print(
        f"{arguments.users:,} users, {arguments.items:,} items, {samples:,} samples a step, rounds: {arguments.rounds}"
    )
    arms = list(wanted(arguments))
    networks = [arm for arm in arms if arm[0] != "als"]
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ExitStack() as stack:
            if networks:
                started = [stack.enter_context(running(*arm, arguments, folder)) for arm in networks]
                speeds = compare(started, samples, arguments.rounds)
        if ("als", "fp32") in arms:
            fit_als(arguments, folder, speeds)
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
