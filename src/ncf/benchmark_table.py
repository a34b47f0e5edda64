"""What `ncf benchmark` found, in the form of the recipe's performance tables."""

from collections.abc import Sequence
from typing import Any

COLUMNS = ("precision", "batch size", "items/s", "speed-up over fp32")


def format_benchmark(results: Sequence[dict[str, Any]]) -> list[str]:
    """The results of `benchmark`, on one log and device, as lines: a table a figure, a row a precision."""
    about = results[0]
    layers = " ".join(map(str, about["layers"])) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    negatives = f"{about['negative_samples']} negatives an interaction"
    full = about["items"]
    return [
        f"{about['device']}; {about['threads']} threads; {versions}",
        f"{about['users']:,} users, {about['items']:,} items, {about['interactions']:,} interactions",
        f"factors {about['factors']}, layers {layers}, dropout {about['dropout']:g}, {negatives}",
        "",
        "Training: whole steps, shuffling and negatives included",
        *_table(results, "train_samples_per_s", [f"{one['batch_size']:,}" for one in results]),
        "",
        "Inference: evaluation with 100 candidates a user",
        *_table(results, "evaluate_items_per_s", [f"{one['evaluate_batch_size']:,}" for one in results]),
        "",
        f"Inference: evaluation with the whole catalogue of {full:,} items",
        *_table(results, "full_ranking_pairs_per_s", ["-"] * len(results)),
        *(
            f"{one['precision']}: all {one['users']:,} users would take "
            f"{one['users'] * full / one['full_ranking_pairs_per_s']:,.1f} s"
            for one in results
        ),
        "",
        f"Inference: one user's top {about['topk']} unseen items, one CPU thread",
        *_align(
            [("precision", "p50, ms", "p99, ms")]
            + [
                (one["latency_precision"], *(f"{one['latency_ms'][key]:.2f}" for key in ("p50", "p99")))
                for one in results
                if one["latency_precision"] == one["precision"] or len(results) == 1
            ]
        ),
        "",
        f"Peak memory: {max(one['peak_memory_mb'] for one in results):,.0f} MB",
    ]


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `--json` prints: the first result, and all of them under `precisions` where there are several."""
    return dict(results[0]) if len(results) == 1 else {**results[0], "precisions": list(results)}


def _table(results: Sequence[dict[str, Any]], name: str, batches: Sequence[str]) -> list[str]:
    base = next((one[name] for one in results if one["precision"] == "fp32"), None)
    rows = [
        (one["precision"], batch, f"{one[name]:,.0f}", "-" if base is None else f"{one[name] / base:.2f}")
        for one, batch in zip(results, batches, strict=True)
    ]
    return _align([COLUMNS, *rows])


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of one width each, the first to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}" for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
