import gzip
import resource
import time
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncf.data import synthetic
from ncf.data.synthetic import generate, item_groups, write_log
from ncf.errors import InputError, RunError

SHARED = Path(__file__).parents[3] / "shared" / "data"


@st.composite
def sizes(draw):
    users = draw(st.integers(1, 60))
    items = draw(st.integers(2, 80))
    pairs = users * items
    interactions = draw(
        st.one_of(
            st.integers(users, pairs),
            st.integers(max(users, pairs - 5), pairs),
            st.integers(users, min(users + 5, pairs)),
        )
    )
    return {"users": users, "items": items, "interactions": interactions, "seed": draw(st.integers(0, 2**63 - 1))}


@settings(deadline=None, max_examples=200)
@given(sizes())
def test_log_has_exactly_the_size_asked_for(size):
    users, items, times = generate(**size)
    U, I, N = size["users"], size["items"], size["interactions"]  # noqa: E741
    assert users.dtype == items.dtype == times.dtype == np.int64
    assert len(users) == len(items) == len(times) == N
    assert len(set(zip(users.tolist(), items.tolist(), strict=True))) == N
    assert set(users) == set(range(1, U + 1))
    assert items.min() >= 1
    assert items.max() <= I
    assert len(set(items)) == min(I, N)
    degrees = np.bincount(users, minlength=U + 1)[1:]
    assert degrees.min() >= min(20, I, N // U)
    assert degrees.max() < I or N > U * (I - 1)
    assert (np.diff(users) >= 0).all()
    assert (np.diff(times)[np.diff(users) == 0] > 0).all()


@settings(deadline=None, max_examples=30)
@given(sizes())
def test_same_seed_same_log_another_seed_another(size):
    first, second = generate(**size), generate(**size)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    other = generate(**size | {"seed": size["seed"] ^ 1})
    assert not (first[2] == other[2]).all()


@settings(deadline=None, max_examples=20)
@given(sizes())
def test_chunks_of_users_change_no_property(size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "CHUNK", 7)
        users, items, _ = generate(**size)
    assert len(set(zip(users.tolist(), items.tolist(), strict=True))) == size["interactions"]
    assert len(set(users)) == size["users"]


@pytest.mark.parametrize("users", [1, 3, 300])
def test_every_pair(users):
    ids, items, _ = generate(users=users, items=40, interactions=users * 40, seed=0)
    assert (np.sort(items.reshape(users, 40)) == np.arange(1, 41)).all()
    assert (ids == np.repeat(np.arange(1, users + 1), 40)).all()


def test_equally_active_users_still_add_up(monkeypatch):
    monkeypatch.setattr(synthetic, "ACTIVITY_SIGMA", 0)  # then a common scale alone moves in steps of all users
    degrees = np.bincount(generate(users=50, items=100, interactions=1517, seed=0)[0])[1:]
    assert degrees.sum() == 1517
    assert degrees.min() >= 30


def test_times_are_spread_over_years():
    users, _, times = generate(users=300, items=100, interactions=9000, seed=0)
    first = times[np.flatnonzero(np.diff(users, prepend=0))]
    years = 1970 + np.array([first.min(), np.median(first), first.max(), times.max()]) / (365.25 * 86_400)
    assert years == pytest.approx([1995, 2005, 2015, 2015], abs=1)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((0, 10, 10), "at least 1 user and 2 items: got 0 users and 10 items"),
        ((10, 1, 10), "at least 1 user and 2 items: got 10 users and 1 items"),
        ((20, 10, 19), "19 interactions cannot give each of 20 users one: ask for at least 20"),
        ((20, 10, 201), "20 users and 10 items make 200 distinct pairs, fewer than the 201"),
    ],
)
def test_impossible_sizes(size, words, tmp_path):
    users, items, interactions = size
    with pytest.raises(InputError, match=words) as caught:
        write_log(tmp_path / "a", tmp_path / "b", users=users, items=items, interactions=interactions, seed=0)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_draws_follow_the_stated_weights():
    """The inverse-CDF draws against the plain formula of one user's probabilities."""
    rng = np.random.default_rng(0)
    taste = synthetic._Taste.draw(rng, 3, 37)
    n = 200_000
    for user in range(3):
        weights = taste.weights(user)
        favourites = taste.favourites[user]
        slow = np.zeros(37)
        for share, group in zip([0.55, 0.25, 0.15, 0.05], [*favourites[:3], None], strict=True):
            members = np.arange(37) if group is None else np.flatnonzero(item_groups(37) - 1 == group)
            slow[members] += share * taste.popularity[members] / taste.popularity[members].sum()
        np.testing.assert_allclose(weights, slow, rtol=1e-9)
        counts = np.bincount(taste.draws(rng, np.full(n, user)), minlength=37)
        assert (abs(counts - n * slow) < 5 * np.sqrt(n * slow) + 5).all()


def test_both_samplers_take_the_same_items(monkeypatch):
    """Drawing without repeats and weighing all items agree in how often each item of one user's occurs."""
    counts, n = {}, 20_000
    for dense in (2, 10**9):  # by rounds of draws; by weighing
        monkeypatch.setattr(synthetic, "DENSE", dense)
        rng = np.random.default_rng(0)
        taste = synthetic._Taste.draw(rng, 1, 60)
        taste = synthetic._Taste(**{**vars(taste), "favourites": np.repeat(taste.favourites, n, axis=0)})
        items = synthetic._items_of(rng, taste, np.full(n, 12), 0)
        counts[dense] = np.bincount(items, minlength=60)
    drawn, weighed = counts.values()
    assert abs(drawn - weighed).max() < 0.03 * n
    assert np.corrcoef(drawn, weighed)[0, 1] > 0.99


def skew(users, items, catalogue):
    activity = np.bincount(users)
    activity = activity[activity > 0]
    popularity = np.sort(np.bincount(items, minlength=catalogue + 1)[1:])[::-1]
    return {
        "median user": float(np.median(activity)),
        "mean user": activity.mean(),
        "least user": activity.min(),
        "most items of a user": activity.max() / catalogue,
        "top tenth": popularity[: catalogue // 10].sum() / len(items),
        "top half": popularity[: catalogue // 2].sum() / len(items),
    }


ML_1M = {  # measured on ratings.dat; `test_constants_of_ml_1m` measures again
    "median user": 96,
    "mean user": 1_000_209 / 6040,
    "least user": 20,
    "most items of a user": 2314 / 3706,
    "top tenth": 0.444,
    "top half": 0.924,
}


def test_constants_of_ml_1m():
    path = SHARED / "ml-1m" / "ratings.dat.gz"
    if not path.exists():
        pytest.skip("needs MovieLens 1M beside the project, in ../shared/data")
    with gzip.open(path) as lines:
        users, items = np.array([line.split(b"::")[:2] for line in lines], dtype=np.int64).T
    measured = skew(users, np.unique(items, return_inverse=True)[1] + 1, 3706)
    assert measured == pytest.approx(ML_1M, rel=0.002)


@pytest.mark.parametrize("seed", [0, 1])
def test_skew_is_like_ml_1m(seed):
    users, items, _ = generate(users=6040, items=3706, interactions=1_000_209, seed=seed)
    assert skew(users, items, 3706) == pytest.approx(ML_1M, rel=0.2)


def hit_rate(scores, candidates, k=10):
    """Share of rows [U] whose first candidate is among the k best; ties count against it."""
    picked = np.take_along_axis(scores, candidates, 1)
    return ((picked[:, 1:] >= picked[:, :1]).sum(1) < k).mean()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_knowing_groups_beats_popularity(seed):
    U, I, N = 2000, 1000, 120_000  # noqa: E741
    users, items, _ = generate(users=U, items=I, interactions=N, seed=seed)
    seen = np.zeros((U, I), bool)
    seen[users - 1, items - 1] = True
    last = np.flatnonzero(np.diff(users, append=0))
    train = seen.copy()
    train[users[last] - 1, items[last] - 1] = False
    # Leave-last-out with 99 distinct untouched items.
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


def test_last_interaction_is_as_popular_as_any():
    users, items, _ = generate(users=2000, items=1000, interactions=120_000, seed=0)
    popularity = np.bincount(items)[items].astype(float)
    ends = np.flatnonzero(np.diff(users, append=0))
    begins = np.append(0, ends[:-1] + 1)
    mean = np.add.reduceat(popularity, begins) / (ends - begins + 1)
    difference = popularity[ends] - mean
    assert abs(difference.mean()) < 5 * difference.std() / np.sqrt(len(ends))


def test_files(tmp_path, capsys):
    size = {"users": 50, "items": 30, "interactions": 1200, "seed": 3}
    log, titles = tmp_path / "it's" / "log.parquet", tmp_path / "titles.parquet"
    write_log(log, titles, **size, progress=True)
    assert "1.20k" in capsys.readouterr().err
    with duckdb.connect() as connection:
        table = connection.from_parquet(str(log))
        assert table.columns == ["user_id", "item_id", "timestamp"]
        assert set(map(str, table.types)) == {"BIGINT"}
        read = table.fetchnumpy()
        named = connection.from_parquet(str(titles)).fetchall()
    for column, expected in zip(read.values(), generate(**size), strict=True):
        assert (np.asarray(column) == expected).all()
    assert named[16] == (17, "Item 17 (group 2)")
    assert len(named) == 30
    assert [path.name for path in log.parent.iterdir()] == ["log.parquet"]


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*file/log\.parquet"):
        write_log(tmp_path / "file" / "log.parquet", tmp_path / "t.parquet", users=5, items=5, interactions=10, seed=0)


def test_full_disk(tmp_path):
    (tmp_path / "log").write_text("an older one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RunError, match="cannot write") as caught:
            write_log(tmp_path / "log", tmp_path / "titles", users=500, items=100, interactions=20_000, seed=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "titles"]
    assert (tmp_path / "log").read_text() == "an older one"


@pytest.mark.slow
def test_ml_20m_size_in_two_minutes(tmp_path):
    begin = time.monotonic()
    write_log(tmp_path / "log", tmp_path / "titles", users=138_493, items=26_744, interactions=20_000_263, seed=0)
    assert time.monotonic() - begin < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2.5 * 1024**2  # KiB
    with duckdb.connect() as connection:
        counts = "count(*), count(DISTINCT (user_id, item_id)), count(DISTINCT user_id), count(DISTINCT item_id)"
        (found,) = connection.from_parquet(str(tmp_path / "log")).aggregate(counts).fetchall()
    assert found == (20_000_263, 20_000_263, 138_493, 26_744)
