"""Preparing a CSV of distinct (user, item) pairs: ncf beside a straightforward pandas version of the same rules.

    python benchmarks/prepare.py                 # 20,000,263 rows, as many as ml-20m has
    python benchmarks/prepare.py --rows 1000000  # a trial

Each side runs in its own process, one after the other, and reads the CSV, applies the rules (the earliest of a repeated
pair, 20 distinct items a user, dense ids, the last two interactions held out by time) and writes Parquet. Both datasets
are compared. Importing the library is timed as well.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np

ROWS, USERS, ITEMS = 20_000_263, 138_493, 26_744
MIN_RATINGS = 20


def write_log(path: Path, rows: int, seed: int = 0) -> None:
    """A CSV of `rows` distinct pairs, in the form and at the scale of ml-20m, by user as MovieLens's files are."""
    rng = np.random.default_rng(seed)
    users, items = max(2, USERS * rows // ROWS), ITEMS
    weights = rng.lognormal(0, 1.1, users)
    degrees = np.clip((weights / weights.sum() * rows).astype(np.int64), MIN_RATINGS, items // 3)
    while missing := rows - int(degrees.sum()):
        moved = rng.integers(0, users, min(abs(missing), users))
        np.add.at(degrees, moved, np.sign(missing))
        degrees = np.clip(degrees, MIN_RATINGS, items // 3)
    owner = np.repeat(np.arange(users), degrees)
    within = np.arange(rows) - np.repeat(np.cumsum(degrees) - degrees, degrees)
    coprime = np.array([step for step in range(1, items) if np.gcd(step, items) == 1])
    steps, starts = rng.choice(coprime, users), rng.integers(0, items, users)
    columns = {
        "userId": owner + 1,
        "movieId": (starts[owner] + within * steps[owner]) % items * 5 + 1,  # a stride coprime to I repeats no item
        "rating": rng.integers(1, 11, rows) / 2,
        "timestamp": rng.integers(789_652_009, 1_427_784_002, rows),
    }
    connection = duckdb.connect()
    connection.register("log", columns)
    connection.execute(f"COPY log TO '{path}' (HEADER)")


def prepare_with_pandas(log: Path, output: Path) -> None:
    """The same rules, as one would write them in pandas."""
    import pandas as pd  # noqa: PLC0415 -- its import is part of its time

    frame = pd.read_csv(log)
    frame = frame.sort_values(["userId", "timestamp"], kind="stable")
    frame = frame.drop_duplicates(["userId", "movieId"])
    frame = frame[frame.groupby("userId")["movieId"].transform("size") >= MIN_RATINGS]
    user_ids, item_ids = np.sort(frame["userId"].unique()), np.sort(frame["movieId"].unique())
    frame["user"] = frame["userId"].map(pd.Series(np.arange(len(user_ids), dtype=np.int32), index=user_ids))
    frame["item"] = frame["movieId"].map(pd.Series(np.arange(len(item_ids), dtype=np.int32), index=item_ids))
    from_last = frame.groupby("user").cumcount(ascending=False)
    output.mkdir()
    frame.loc[from_last >= 2, ["user", "item"]].to_parquet(output / "train.parquet", index=False)
    held = frame.loc[from_last < 2, ["user", "item"]].assign(split=from_last.map({0: "test", 1: "validation"}))
    held.to_parquet(output / "heldout.parquet", index=False)
    pd.DataFrame({"id": user_ids}).to_parquet(output / "users.parquet", index=False)
    pd.DataFrame({"id": item_ids}).to_parquet(output / "items.parquet", index=False)


def prepare_with_ncf(log: Path, output: Path) -> None:
    """`ncf prepare`."""
    from ncf.ingest.prepare import prepare  # noqa: PLC0415 -- its import is part of its time

    prepare(log, output, min_ratings=MIN_RATINGS)


SIDES = {"pandas": prepare_with_pandas, "ncf": prepare_with_ncf}


def measure(side: str, log: Path, output: Path) -> tuple[float, float]:
    """Seconds and peak GB of one side in a process of its own."""
    begin = time.perf_counter()
    code = [sys.executable, __file__, "--side", side, "--log", str(log), "--output", str(output)]
    text = subprocess.run(code, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - begin, float(text)


def same(left: Path, right: Path) -> bool:
    """Whether both sides have written the same dataset."""
    for table, order in (("train", "ALL"), ("heldout", "ALL"), ("users", "ALL"), ("items", "ALL")):
        sides = [f"(SELECT * FROM '{folder}/{table}.parquet')" for folder in (left, right)]
        for one, other in (sides, reversed(sides)):
            query = f"SELECT count(*) FROM ({one} EXCEPT {order} {other})"
            if duckdb.sql(query).fetchall()[0][0]:
                return False
    return True


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the log (default: {ROWS})")
    parser.add_argument("--repeat", type=int, default=1, help="times that each side runs, in turn (default: 1)")
    for hidden in ("--side", "--log", "--output"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        SIDES[arguments.side](Path(arguments.log), Path(arguments.output))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log.csv"
        write_log(log, arguments.rows)
        size, cores = log.stat().st_size / 1e6, len(os.sched_getaffinity(0))
        print(f"{arguments.rows:,} rows, {size:.0f} MB of CSV, {cores} cores, load {os.getloadavg()[0]:.1f}")
        for turn in range(arguments.repeat):
            seconds = {}
            for side in SIDES:
                seconds[side], peak = measure(side, log, folder / f"{side}-{turn}")
                print(f"{side:<8} {seconds[side]:7.1f} s  {peak:5.2f} GB at its peak")
            print(f"ncf takes 1/{seconds['pandas'] / seconds['ncf']:.2f} of pandas's time")
        print("same datasets:", same(folder / "pandas-0", folder / "ncf-0"))


if __name__ == "__main__":
    main()
