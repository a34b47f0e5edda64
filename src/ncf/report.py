"""What a run says: the recipe's lines, `metrics.jsonl`, TensorBoard.

The lines are those of NVIDIA's NCF for TensorFlow, names and layout, so that scripts which read them still work.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ncf.errors import InputError, RunError
from ncf.files import atomic_file, sync


@dataclass(frozen=True)
class EpochRecord:
    """What is known of an epoch once it is over; times in seconds, None where it was not evaluated."""

    epoch: int  # from 1
    loss: float  # mean binary cross-entropy of a sample
    train_time: float
    samples_per_s: float
    eval_time: float | None = None
    hr: float | None = None
    ndcg: float | None = None

    def to_line(self, k: int, run: str) -> str:
        """One line of metrics.jsonl, with the run's fingerprint."""
        values = asdict(self)
        values[f"hr@{k}"], values[f"ndcg@{k}"] = values.pop("hr"), values.pop("ndcg")
        return json.dumps({**values, "run": run}) + "\n"

    @classmethod
    def from_line(cls, line: str, k: int, run: str) -> "EpochRecord":
        """The reverse of `to_line`. Raises ValueError, KeyError or TypeError where it is no such line of this run."""
        values: dict[str, Any] = json.loads(line)
        if values.pop("run") != run:
            raise ValueError("a line of another run")
        values["hr"], values["ndcg"] = values.pop(f"hr@{k}"), values.pop(f"ndcg@{k}")
        if any(type(value) not in (int, float, type(None)) for value in values.values()):
            raise TypeError("a value is not a number")
        return cls(**values)

    @property
    def score(self) -> tuple[float, float]:
        """What epochs are compared by: HR, then NDCG; an epoch that was not evaluated is below all others."""
        return (-1.0, -1.0) if self.hr is None or self.ndcg is None else (self.hr, self.ndcg)


def best_of(history: Sequence[EpochRecord], select_on: str) -> EpochRecord | None:
    """The epoch to keep: the earliest with the highest HR, NDCG breaking a tie; or the last one."""
    if select_on == "last":
        return history[-1] if history else None
    evaluated = [record for record in history if record.hr is not None]
    return max(evaluated, key=lambda record: record.score, default=None)  # max keeps the first of equals


def epoch_line(record: EpochRecord, *, new_best: bool = False) -> str:
    """The recipe's line of an epoch; the loss takes the metrics' place where the epoch was not evaluated."""
    start = f"{'New Best ' if new_best else ''}Epoch: {record.epoch:02d}, Train Time: {record.train_time:.4f}"
    if record.hr is None:
        return f"{start}, Loss: {record.loss:.4f}"
    return f"{start}, Eval Time: {record.eval_time:.4f}, HR: {record.hr:.4f}, NDCG: {record.ndcg:.4f}"


def closing_block(
    history: Sequence[EpochRecord],
    *,
    select_on: str,
    target: float | None,
    eval_pairs: int,
    popularity: tuple[float, float] | None,
) -> list[str]:
    """The recipe's closing block, then what it did not say: split, popularity's score, the loss.

    `eval_pairs` are the pairs scored in an evaluation, `popularity` the HR and NDCG of the most popular items in
    the same exam. A throughput is in samples a second; `-` stands where there is no value.
    """
    train = [record.train_time for record in history]
    speed = [record.samples_per_s for record in history]
    evals = [record.eval_time for record in history if record.eval_time is not None]
    best = best_of(history, select_on)
    hits = [r.epoch for r in history if target is not None and r.hr is not None and r.hr >= target]
    until = [r for r in history if not hits or r.epoch <= hits[0]]
    eval_speed = _mean([eval_pairs / max(seconds, 1e-9) for seconds in evals])
    rows: list[tuple[str, str]] = [
        ("Minimum Train Time per Epoch:", _number(min(train, default=None))),
        ("Average Train Time per Epoch:", _number(_mean(train))),
        ("Average Train Throughput:", _number(_mean(speed))),
        ("Minimum Eval Time per Epoch:", _number(min(evals, default=None))),
        ("Average Eval Time per Epoch:", _number(_mean(evals))),
        ("Average Eval Throughput:", _number(eval_speed)),
        ("First Epoch to hit:", str(hits[0]) if hits else "-"),
        ("Time to Train:", _number(sum(r.train_time + (r.eval_time or 0) for r in until))),
        ("Best HR:", _number(best.hr if best else None)),
        ("Best Epoch:", str(best.epoch) if best else "-"),
        ("Best NDCG:", _number(best.ndcg if best else None)),
        ("Epoch selected on:", "nothing, the last is kept" if select_on == "last" else f"the {select_on} split"),
    ]
    if popularity:
        rows.append(("Popularity HR, NDCG:", f"{popularity[0]:.4f}, {popularity[1]:.4f}"))
    if history:
        rows.append(("Loss, first to last epoch:", f"{history[0].loss:.4f} to {history[-1].loss:.4f}"))
    return [f"{name:<29} {value}" for name, value in rows]


def test_line(seconds: float, k: int, hr: float, ndcg: float) -> str:
    """The recipe's line of a single evaluation."""
    return f"Eval Time = {seconds:.4f}, HR@{k} = {hr:.4f}, NDCG@{k} = {ndcg:.4f}"


class MetricsLog:
    """`metrics.jsonl`, an object an epoch; each line is on the disk before the checkpoint that says so."""

    def __init__(self, path: Path, k: int, run: str) -> None:
        self.path, self.k, self.run = path, k, run

    def digest(self) -> str:
        """A hash of the file, which the checkpoint keeps so that an edited line is noticed."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    def cut_back(self, epochs: int, digest: str | None = None) -> list[EpochRecord]:
        """Keep the first `epochs` lines and read them.

        Raises InputError where they are not there, damaged, or others than `digest` was of.
        """
        lines = self.path.read_text().splitlines()[:epochs] if self.path.exists() else []
        try:
            history = [EpochRecord.from_line(line, self.k, self.run) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged ({error}): start again with --overwrite") from None
        if [record.epoch for record in history] != list(range(1, epochs + 1)):
            raise InputError(f"{self.path} lacks epochs of 1 to {epochs}: start again with --overwrite")
        with atomic_file(self.path) as temporary:
            temporary.write_text("".join(record.to_line(self.k, self.run) for record in history))
        if digest not in (None, self.digest()):
            raise InputError(f"{self.path} was changed since training: start again with --overwrite")
        return history

    def append(self, record: EpochRecord) -> None:
        """Add an epoch. Raises RunError where it cannot be written."""
        try:
            with self.path.open("a") as file:
                file.write(record.to_line(self.k, self.run))
            sync(self.path)
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error


def import_summary_writer() -> Any:
    """TensorBoard's writer. Raises InputError where the extra is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError:
        raise InputError("--tensorboard needs an extra: pip install 'ncf[tensorboard]'") from None
    return SummaryWriter


class TensorBoard:
    """TensorBoard events beside the run's files; needs the `tensorboard` extra."""

    def __init__(self, directory: Path, first_epoch: int, k: int) -> None:
        self.k = k
        self.writer = import_summary_writer()(str(directory), purge_step=first_epoch)

    def add(self, record: EpochRecord) -> None:
        """Write an epoch's figures."""
        values = {"loss": record.loss, "train/time": record.train_time, "train/samples_per_s": record.samples_per_s}
        if record.hr is not None and record.ndcg is not None:
            values |= {f"hr@{self.k}": record.hr, f"ndcg@{self.k}": record.ndcg}
        for name, value in values.items():
            self.writer.add_scalar(name, value, record.epoch)
        self.writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
