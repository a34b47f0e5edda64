"""`metrics.jsonl`: an object per epoch; and which epoch is the best."""

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
    loss: float  # mean per sample
    train_time: float
    samples_per_s: float
    eval_time: float | None = None
    hr: float | None = None
    ndcg: float | None = None

    def to_line(self, k: int) -> str:
        """One line of metrics.jsonl."""
        values = asdict(self)
        values[f"hr@{k}"], values[f"ndcg@{k}"] = values.pop("hr"), values.pop("ndcg")
        return json.dumps(values) + "\n"

    @classmethod
    def from_line(cls, line: str, k: int) -> "EpochRecord":
        """The reverse of `to_line`. Raises ValueError, KeyError or TypeError where it is no such line."""
        values: dict[str, Any] = json.loads(line)
        values["hr"], values["ndcg"] = values.pop(f"hr@{k}"), values.pop(f"ndcg@{k}")
        return cls(**values)


def best_of(history: Sequence[EpochRecord], select_on: str) -> EpochRecord | None:
    """The epoch to keep: the earliest with the highest HR, NDCG breaking a tie; or the last one."""
    if select_on == "last":
        return history[-1] if history else None
    evaluated = [record for record in history if record.hr is not None]
    return max(evaluated, key=lambda record: (record.hr, record.ndcg), default=None)  # max keeps the first of equals


class MetricsLog:
    """The file; each line is on the disk before the checkpoint that follows it."""

    def __init__(self, path: Path, k: int) -> None:
        self.path, self.k = path, k

    def cut_back(self, epochs: int) -> list[EpochRecord]:
        """Keep the first `epochs` lines and read them. Raises InputError where they are not there, or damaged."""
        lines = self.path.read_text().splitlines()[:epochs] if self.path.exists() else []
        try:
            history = [EpochRecord.from_line(line, self.k) for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self.path} is damaged ({error}): start again with --overwrite") from None
        if [record.epoch for record in history] != list(range(1, epochs + 1)):
            raise InputError(f"{self.path} lacks epochs of 1 to {epochs}: start again with --overwrite")
        with atomic_file(self.path) as temporary:
            temporary.write_text("".join(record.to_line(self.k) for record in history))
        return history

    def append(self, record: EpochRecord) -> None:
        """Add an epoch. Raises RunError where it cannot be written."""
        try:
            with self.path.open("a") as file:
                file.write(record.to_line(self.k))
            sync(self.path)
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from error
