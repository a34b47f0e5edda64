"""What `ncf benchmark` found, as a table for a person and as one object for a script."""

from collections.abc import Sequence
from typing import Any

COLUMNS = ("precision", "batch size", "train", "x fp32", "evaluate", "whole catalogue", "p50 ms", "p99 ms", "peak MB")


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
        f"factors {about['factors']}, layers {layers}, {about['negative_samples']} negatives per interaction",
        "",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
        "",
        "train: samples/s of whole steps, shuffling and negatives included. evaluate: user-item pairs/s with 100",
        f"candidates per user. whole catalogue: pairs/s. p50, p99: one user's top {about['topk']} on one CPU thread.",
    ]


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` prints: the first result, and all of them under `precisions` where there are several."""
    return dict(results[0]) if len(results) == 1 else {**results[0], "precisions": list(results)}


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
