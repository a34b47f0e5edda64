"""What the preparation did, for a person: what was read, what each rule dropped, what is left."""

from typing import Any

from ncf.data.dataset import Dataset
from ncf.ingest.text import describe


def format_summary(dataset: Dataset) -> list[str]:
    """The lines that `ncf prepare` prints about a dataset it made."""
    facts, rules = dataset.summary, dataset.summary["rules"]
    low = "off" if rules["min_value"] is None else f"{rules['min_value']:g}"
    drops = {
        "bad_rows": "bad rows skipped",
        "rows_below_min_value": f"rows under --min-value {low}",
        "repeated_pairs": "repeated pairs dropped",
        "users_dropped": f"users under {rules['min_ratings']} items",
        "items_dropped": "items left without a user",
    }
    lines = [("source", facts["source"]), *_form(facts), ("rows read", f"{facts['rows_read']:,}")]
    for key, label in drops.items():
        rows = f" (with {facts['rows_of_dropped_users']:,} rows)" if key == "users_dropped" and key in facts else ""
        lines += [(label, f"{facts[key]:,}{rows}")] if key in facts else []
    held = ", ".join(f"{facts[f'users_without_{split}']:,} users without {split}" for split in ("validation", "test"))
    lines += [
        ("users", f"{facts['users']:,}"),
        ("items", f"{facts['items']:,}"),
        ("interactions", f"{facts['interactions']:,} (density {facts['density']:.4%})"),
        ("time", f"{facts['first_time']} to {facts['last_time']}" if "first_time" in facts else "none"),
        ("order", _order(dataset)),
        ("split", f"{facts['train']:,} train, {facts['validation']:,} validation, {facts['test']:,} test ({held})"),
    ]
    if facts["titles"]:
        lines.append(("titles", f"{facts['titled_items']:,} of {facts['items']:,} items, from {facts['titles']}"))
    lines.append(("written to", facts["written_to"] or "nowhere (in memory)"))
    return [f"{label + ':':<28} {text}" for label, text in lines]


def _form(facts: dict[str, Any]) -> list[tuple[str, str]]:
    unused = " (not used)" if facts["rules"]["min_value"] is None else ""
    columns = ", ".join(
        f"{role} = {name}{unused if role == 'value' else ''}" for role, name in facts["columns"].items() if name
    )
    form = facts["format"]
    if facts["delimiter"]:
        header = "a header" if facts["header"] else "no header"
        form += f", separated by {describe(facts['delimiter'])}, {header}"
    return [("format", form), ("columns", columns)]


def _order(dataset: Dataset) -> str:
    """How a user's rows are ordered."""
    facts, timed = dataset.summary, "first_time" in dataset.summary or "given_split" in dataset.summary["rules"]
    if facts["rules"]["ties"] == "file":
        return "by time, then as in the file" if timed else "as in the file"
    if not dataset.interactions.ordered:
        return "none: held-out items are drawn (--ties file takes the file's order)"
    return f"by time; {facts['tied_rows'] / facts['interactions']:.0%} of the rows tie with another: drawn among them"
