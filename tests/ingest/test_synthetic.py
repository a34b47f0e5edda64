import resource
import time
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncf.errors import InputError
from ncf.ingest.synthetic import _Catalogue, generate, item_groups, write_log


@st.composite
def sizes(draw):
    users = draw(st.integers(1, 60))
    items = draw(st.integers(2, 80))
    pairs = users * items
    near = st.integers(max(users, pairs - 5), pairs) | st.integers(users, min(users + 5, pairs))
    interactions = draw(st.integers(users, pairs) | near)
    return {"users": users, "items": items, "interactions": interactions, "seed": draw(st.integers(0, 2**63 - 1))}


@settings(deadline=None, max_examples=150)
@given(sizes())
def test_a_log_has_the_size_asked_for(size):
    users, items, times = generate(**size)
    U, I, N = size["users"], size["items"], size["interactions"]  # noqa: E741
    assert users.dtype == items.dtype == times.dtype == np.int64
    assert N - 5 <= len(users) == len(items) == len(times) <= N
    assert len(set(zip(users.tolist(), items.tolist(), strict=True))) == len(users)
    assert set(users) == set(range(1, U + 1))
    assert items.min() >= 1
    assert items.max() <= I
    assert len(set(items)) == min(I, len(items))
    assert np.bincount(users)[1:].min() >= min(20, I, N // U)
    assert (np.diff(users) >= 0).all()
    assert (np.diff(times)[np.diff(users) == 0] > 0).all()
    again, other = generate(**size), generate(**size | {"seed": size["seed"] ^ 1})
    assert all(np.array_equal(one, same) for one, same in zip((users, items, times), again, strict=True))
    assert not np.array_equal(times, other[2])


def test_times_are_spread_over_years():
    users, _, times = generate(users=300, items=100, interactions=9000, seed=0)
    first = times[np.flatnonzero(np.diff(users, prepend=0))]
    years = 1970 + np.array([first.min(), np.median(first), first.max(), times.max()]) / (365.25 * 86_400)
    assert years == pytest.approx([1995, 2005, 2015, 2015], abs=1)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((0, 10, 10), "0 users and 10 items"),
        ((10, 1, 10), "10 users and 1 items"),
        ((20, 10, 19), "19 interactions cannot give each of 20 users one"),
        ((20, 10, 201), "200 distinct pairs, fewer than the 201"),
    ],
)
def test_impossible_sizes(size, words, tmp_path):
    users, items, interactions = size
    with pytest.raises(InputError, match=words) as caught:
        write_log(tmp_path / "a", tmp_path / "b", users=users, items=items, interactions=interactions, seed=0)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_both_ways_to_choose_take_items_by_taste_and_popularity():
    """A choice of one item follows the plain formula; of many, draws agree with the race of all items."""
    rng, nothing, n = np.random.default_rng(0), np.zeros(0, np.int64), 20_000
    catalogue, taste = _Catalogue.draw(rng, 60), np.array([0.6, 0.05, 0.05, 0.1, 0.15, 0.05])
    popularity = np.empty(60)
    popularity[catalogue.items] = catalogue.popularity
    expected = np.empty(60)
    for group, share in enumerate(taste, 1):
        members = np.flatnonzero(item_groups(60) == group)
        expected[members] = share * popularity[members] / popularity[members].sum()
    for choose in (catalogue.choose, catalogue._race):
        counts = np.bincount([choose(rng, taste, nothing, 1)[0] for _ in range(n)], minlength=60)
        assert (abs(counts - n * expected) < 5 * np.sqrt(n * expected) + 5).all()
    chosen = [
        np.concatenate([choose(rng, taste, nothing, 5) for _ in range(n)])
        for choose in (catalogue.choose, catalogue._race)
    ]
    drawn, raced = (np.bincount(items, minlength=60) for items in chosen)
    assert abs(drawn - raced).max() < 0.03 * n


ML_1M = {  # measured on its ratings.dat
    "median user": 96,
    "mean user": 1_000_209 / 6040,
    "least user": 20,
    "most items of a user": 2314 / 3706,
    "top tenth": 0.444,
    "top half": 0.924,
}


def test_skew_is_like_ml_1m():
    users, items, _ = generate(users=6040, items=3706, interactions=1_000_209, seed=0)
    activity = np.bincount(users)[1:]
    popularity = np.sort(np.bincount(items, minlength=3707)[1:])[::-1]
    skew = {
        "median user": np.median(activity),
        "mean user": activity.mean(),
        "least user": activity.min(),
        "most items of a user": activity.max() / 3706,
        "top tenth": popularity[:370].sum() / len(items),
        "top half": popularity[:1853].sum() / len(items),
    }
    assert skew == pytest.approx(ML_1M, rel=0.2)


def hit_rate(scores, candidates, k=10):
    """Share of rows [U] whose first candidate is among the k best; ties count against it."""
    picked = np.take_along_axis(scores, candidates, 1)
    return ((picked[:, 1:] >= picked[:, :1]).sum(1) < k).mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_knowing_groups_beats_popularity(seed):
    U, I, N = 2000, 1000, 120_000  # noqa: E741
    users, items, _ = generate(users=U, items=I, interactions=N, seed=seed)
    seen = np.zeros((U, I), bool)
    seen[users - 1, items - 1] = True
    last = np.flatnonzero(np.diff(users, append=0))
    train = seen.copy()
    train[users[last] - 1, items[last] - 1] = False
    # Leave-last-out with 99 distinct unseen items.
    noise = np.random.default_rng(seed).random((U, I)) + seen
    candidates = np.column_stack([items[last] - 1, np.argsort(noise, axis=1)[:, :99]])
    popularity = train.sum(0).astype(float)
    of_group = np.eye(item_groups(I).max())[item_groups(I) - 1]  # [I, G]
    share = train @ of_group / train.sum(1, keepdims=True)  # [U, G]
    within = popularity / (of_group @ (popularity @ of_group))
    by_popularity = hit_rate(np.broadcast_to(popularity, (U, I)), candidates)
    by_group = hit_rate((share @ of_group.T) * within, candidates)
    assert 0.35 < by_popularity < 0.52
    assert by_group > 0.8


def test_the_last_interaction_is_as_popular_as_any():
    users, items, _ = generate(users=2000, items=1000, interactions=120_000, seed=0)
    popularity = np.bincount(items)[items].astype(float)
    ends = np.flatnonzero(np.diff(users, append=0))
    begins = np.append(0, ends[:-1] + 1)
    mean = np.add.reduceat(popularity, begins) / (ends - begins + 1)
    difference = popularity[ends] - mean
    assert abs(difference.mean()) < 5 * difference.std() / np.sqrt(len(ends))


def test_files(tmp_path, capsys):
    size: dict[str, Any] = {"users": 50, "items": 30, "interactions": 1200, "seed": 3}
    write_log(tmp_path / "log.parquet", tmp_path / "titles.parquet", **size, progress=True)
    assert "50/50" in capsys.readouterr().err
    with duckdb.connect() as connection:
        table = connection.from_parquet(str(tmp_path / "log.parquet"))
        assert table.columns == ["user_id", "item_id", "timestamp"]
        assert set(map(str, table.types)) == {"BIGINT"}
        read = table.fetchnumpy()
        named = connection.from_parquet(str(tmp_path / "titles.parquet")).fetchall()
    for column, expected in zip(read.values(), generate(**size), strict=True):
        assert (np.asarray(column) == expected).all()
    assert named[16] == (17, "Item 17 (group 2)")
    assert len(named) == 30


@pytest.mark.slow
def test_ml_20m_size_in_two_minutes(tmp_path):
    begin = time.monotonic()
    write_log(tmp_path / "log", tmp_path / "titles", users=138_493, items=26_744, interactions=20_000_263, seed=0)
    assert time.monotonic() - begin < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1.5 * 1024**2  # KiB
    with duckdb.connect() as connection:
        counts = "count(*), count(DISTINCT (user_id, item_id)), count(DISTINCT user_id), count(DISTINCT item_id)"
        (found,) = connection.from_parquet(str(tmp_path / "log")).aggregate(counts).fetchall()
    assert found[0] == found[1] == pytest.approx(20_000_263, rel=1e-3)
    assert found[2:] == (138_493, 26_744)
