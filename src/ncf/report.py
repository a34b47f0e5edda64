"""What a run says: the recipe's lines, and TensorBoard.

The lines are those of NVIDIA's NCF for TensorFlow, names and layout, so that scripts which read them still work.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ncf.config import TrainConfig
from ncf.errors import InputError
from ncf.runs.metrics_log import EpochRecord, best_of

NVIDIA = "; --recipe nvidia for NVIDIA's"


def recipe_line(config: TrainConfig) -> str:
    """What runs: the recipe's name, and the options of the network and its training that are not NVIDIA's."""
    neutral, changed = TrainConfig(), []
    for item in fields(config):
        value = getattr(config, item.name)
        if item.metadata["group"] in ("model", "optimisation") and value != getattr(neutral, item.name):
            spelled = (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else value
            changed += [] if item.name == "recipe" else [f"{item.name.replace('_', ' ')} {spelled}"]
    text = f" ({', '.join(changed)})" if changed else ""
    return f"Recipe: {config.recipe}{text}{'' if config.recipe == 'nvidia' else NVIDIA}"


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
    the same eval_set. A throughput is in samples a second; `-` stands where there is no value.
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


def import_summary_writer() -> Any:
    """TensorBoard's writer. Raises InputError where the extra is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError:
        raise InputError("--tensorboard needs an extra: pip install 'ncf[tensorboard]'") from None
    return SummaryWriter


def write_events(writer: Any, record: EpochRecord, k: int) -> None:
    """Write an epoch's figures as TensorBoard events."""
    values = {"loss": record.loss, "train/time": record.train_time, "train/samples_per_s": record.samples_per_s}
    values |= {} if record.hr is None or record.ndcg is None else {f"hr@{k}": record.hr, f"ndcg@{k}": record.ndcg}
    for name, value in values.items():
        writer.add_scalar(name, value, record.epoch)
    writer.flush()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
