"""The preparation beside a slow and obvious version of its rules; and every way through the code beside another."""

import csv
import random
import re

import duckdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncf.data.dataset import Dataset
from ncf.data.unseen import PAD
from ncf.errors import InputError
from ncf.ingest.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore:.*users have no test item:ncf.errors.NcfWarning")


def write(path, rows, header="userId,movieId,rating,timestamp", delimiter=","):
    lines = [header.replace(",", delimiter)] if header else []
    path.write_text("\n".join([*lines, *(delimiter.join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def raw_pairs(dataset, users, items):
    return [(str(dataset.user_ids[u]), str(dataset.item_ids[i])) for u, i in zip(users, items, strict=True)]


def train_pairs(dataset):
    return raw_pairs(dataset, dataset.interactions.train_users.tolist(), dataset.interactions.train_items.tolist())


def held(dataset, split):
    return {
        str(user): str(dataset.item_ids[item])
        for user, item in zip(dataset.user_ids, dataset.interactions.heldout(split).tolist(), strict=True)
        if item != PAD
    }


def is_canonical(text):
    return bool(re.fullmatch(r"0|-?[1-9]\d*", text)) and -(2**63) <= int(text) < 2**63


def in_order(ids):
    ids = set(ids)
    return sorted(ids, key=int) if all(map(is_canonical, ids)) else sorted(ids)


def drawn(seed, user, item):
    """The number that orders simultaneous rows, of SplitMix64, in plain integers."""
    word = (1 << 64) - 1
    step = 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    per_user = mix((mix((seed + step) & word) + (user + 1) * step) & word)
    return mix((per_user + (item + 1) * step) & word) & (1 << 63) - 1


def reference(rows, min_ratings=20, min_value=None, validation=True, timed=True, ties="draw", seed=0):
    """The rules, one row at a time; rows are (user, item, value, time) with ids as text."""
    user_order, item_order = in_order(r[0] for r in rows), in_order(r[1] for r in rows)
    kept = [r for r in rows if min_value is None or r[2] >= min_value]
    low = {(r[0], r[1]) for r in rows if min_value is not None and r[2] < min_value}

    def place(numbered):
        number, (user, item, _, time) = numbered
        tie = number if ties == "file" else drawn(seed, user_order.index(user), item_order.index(item))
        return (time if timed else 0, tie)

    histories = {}
    for number, (user, item, _, time) in sorted(enumerate(kept), key=place):
        history = histories.setdefault(user, {})
        history.setdefault(item, number if ties == "file" else time if timed else 0)
    histories = {u: h for u, h in histories.items() if len(h) >= min_ratings}
    users = [u for u in user_order if u in histories]
    items = [i for i in item_order if any(i in h for h in histories.values())]
    train, valid, test, earlier = [], {}, {}, {}
    for user in users:
        history = list(histories[user])
        moments = list(histories[user].values())
        for item, moment in histories[user].items():
            before = history.index(item) if ties == "file" else moments.index(moment)
            earlier[user, item] = before
        if len(history) >= 2:
            test[user] = history.pop()
            if validation and len(history) >= 2:
                valid[user] = history.pop()
        train += [(user, item) for item in history]
    kept_pairs = {(u, i) for u, h in histories.items() for i in h}
    dropped = {(u, i) for u, i in low if u in histories and i in items} - kept_pairs
    return users, items, train, valid, test, dropped, earlier if timed or ties == "file" else None


def earlier_of(dataset):
    """How many interactions of its user are earlier, of each (user, item); None where the log has no order."""
    if not dataset.interactions.ordered:
        assert dataset.interactions.earlier is None
        return None
    users, items, counts = dataset.interactions.sequence("validation", "test")
    pairs = raw_pairs(dataset, users.tolist(), items.tolist())
    if counts is None:
        return {pair: [one for one, _ in pairs[:place]].count(pair[0]) for place, pair in enumerate(pairs)}
    return dict(zip(pairs, counts.tolist(), strict=True))


def check(dataset, expected):
    users, items, train, valid, test, dropped, earlier = expected
    assert list(map(str, dataset.user_ids)) == users
    assert list(map(str, dataset.item_ids)) == items
    assert train_pairs(dataset) == train
    assert held(dataset, "validation") == valid
    assert held(dataset, "test") == test
    found = raw_pairs(dataset, dataset.interactions.dropped_users.tolist(), dataset.interactions.dropped_items.tolist())
    assert set(found) == dropped
    assert len(found) == len(dropped)
    assert earlier_of(dataset) == earlier


ids = st.one_of(
    st.integers(0, 9).map(str),
    st.sampled_from(["007", "7", "-3", "a b", "é", "Z", "9148955329465708066123", "9148955329465708066", "+1", "1e2"]),
)
numbers = st.integers(-5, 12).map(str)


@st.composite
def logs(draw):
    """A few users and items, so that pairs repeat, with ties in time and values on both sides of 2.5 and on it."""
    kind = draw(st.sampled_from([ids, numbers]))
    users, items = (draw(st.lists(kind, min_size=size, max_size=6, unique=True)) for size in (1, 2))
    values, times = st.sampled_from([1, 2.5, 4.0]), st.integers(0, 4)
    row = st.tuples(st.sampled_from(users), st.sampled_from(items), values, times)
    return draw(st.lists(row, min_size=6, max_size=40))


def write_rows(path, rows, *, timed):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "rating", *["time"] * timed])
        writer.writerows(row if timed else row[:3] for row in rows)
    return path


@settings(max_examples=80, deadline=None)
@given(
    rows=logs(),
    min_ratings=st.integers(1, 4),
    min_value=st.sampled_from([None, 2.5]),
    validation=st.booleans(),
    timed=st.booleans(),
    ties=st.sampled_from(["draw", "file"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_prepare_agrees_with_the_reference(
    tmp_path_factory, rows, min_ratings, min_value, validation, timed, ties, seed
):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    write_rows(path, rows, timed=timed)
    options = {"min_ratings": min_ratings, "min_value": min_value, "validation": validation}
    options |= {"ties": ties, "seed": seed}
    expected = reference(rows, timed=timed, **options)
    if len(expected[0]) < 1 or len(expected[1]) < 2:
        with pytest.raises(InputError):
            prepare(path, **options)
        return
    dataset = prepare(path, **options)
    check(dataset, expected)
    facts = dataset.summary
    kept = len(rows) - facts["rows_below_min_value"] - facts["repeated_pairs"] - facts["rows_of_dropped_users"]
    assert facts["rows_read"] == len(rows)
    assert facts["interactions"] == kept == len(expected[2]) + len(expected[3]) + len(expected[4])
    assert facts["users_dropped"] == len({r[0] for r in rows}) - len(expected[0])
    assert facts["items_dropped"] == len({r[1] for r in rows}) - len(expected[1])
    dataset.save(path.parent / "saved")
    assert Dataset.load(path.parent / "saved").fingerprint == dataset.fingerprint
    if ties == "draw":  # then the order of the file's rows does not matter
        assert prepare(write_rows(path, sorted(rows), timed=timed), **options).fingerprint == dataset.fingerprint


def test_a_large_shuffled_log_agrees_with_the_reference(tmp_path):
    rng = random.Random(0)
    rows = [(str(rng.randrange(80)), str(rng.randrange(2000) * 5), 1, rng.randrange(400)) for _ in range(40_000)]
    path = write(tmp_path / "log.csv", rows)
    check(prepare(path), reference(rows))


def test_many_text_ids_give_what_integers_give(tmp_path):
    """Two ways through the code: integers are coded in arrays, text by joins, which keep no order."""
    rng = np.random.default_rng(2)
    users, items = rng.integers(0, 30_000, 600_000), rng.integers(0, 300_000, 600_000)
    datasets = []
    for spelling in ("%d,%d", "user-%09d,item-%09d"):
        np.savetxt(tmp_path / "log.csv", np.stack((users, items), 1), spelling, header="user,item", comments="")
        datasets.append(prepare(tmp_path / "log.csv"))
    integers, texts = datasets
    assert [f"user-{user:09}" for user in integers.user_ids] == texts.user_ids.tolist()
    for name in ("train_users", "train_items", "validation_items", "test_items"):
        assert torch.equal(getattr(integers.interactions, name), getattr(texts.interactions, name))


def test_thread_count_changes_nothing(tmp_path, monkeypatch):
    rng = random.Random(1)
    rows = [(f"u{rng.randrange(50)}", f"i{rng.randrange(90)}", 1, rng.randrange(99)) for _ in range(40_000)]
    path = write(tmp_path / "log.csv", rows)
    fingerprints = set()
    for cores in ({0}, {0, 1, 2, 3, 4, 5, 6, 7}):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        fingerprints.add(prepare(path).fingerprint)
    assert len(fingerprints) == 1


def test_a_join_that_spills_gives_the_same(tmp_path, monkeypatch):
    rng = random.Random(2)
    rows = [(f"user-{rng.randrange(9000):09}", f"item-{rng.randrange(900):09}", 1, k) for k in range(120_000)]
    path = write(tmp_path / "log.csv", rows)
    expected = prepare(path, min_ratings=1).fingerprint
    monkeypatch.setattr("ncf.data.duckdb_session.MEMORY_LIMIT", 60 * 1024**2)
    assert prepare(path, min_ratings=1).fingerprint == expected


def test_duckdb_is_what_we_think():
    """`TRY_CAST` takes spellings that are not an integer's plain one, which is why ids are cast there and back."""
    assert duckdb.sql("SELECT TRY_CAST('1e2' AS BIGINT), TRY_CAST('007' AS BIGINT)").fetchall() == [(100, 7)]
