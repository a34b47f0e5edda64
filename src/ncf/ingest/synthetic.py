"""Logs with a planted structure, up to ml-20m's size and beyond.

    write_log("log.parquet", "titles.parquet", users=2000, items=1000, interactions=120_000, seed=0)

Items have a group and a popularity. A user has up to three favourite groups and takes most items from those, in
proportion to popularity, and never an item twice. So ranking by popularity does fairly, and learning each user's groups
does much better. The skew follows MovieLens (median / mean interactions per user; share of the most popular tenth of
the items): ml-100k 65 / 106, 43%; ml-1m 96 / 166, 44%; ml-latest-small (9,724 items) 70 / 165, 60%.

Every user has at least min(20, items, interactions // users) items, and every item occurs where there are enough
interactions. Their number may fall a few short of what was asked for. ml-20m's size takes about a minute.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ncf.data.duckdb_session import connect
from ncf.data.parquet import write_parquet
from ncf.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MIN_RATINGS = 20  # each MovieLens user has as many
MAX_GROUPS = 20  # MovieLens has 18 genres
ACTIVITY_SIGMA = 1.15  # of the log of a user's interactions above the minimum
FAVOURITES = np.array([0.55, 0.25, 0.15])  # shares of a user's favourite groups; the rest is from anywhere
EPOCH = 788_918_400  # 1995-01-01, when MovieLens began
YEAR = 365 * 86_400


def write_log(
    log_path: Path, titles_path: Path, *, users: int, items: int, interactions: int, seed: int, progress: bool = False
) -> None:
    """Write `generate`'s log (user_id, item_id, timestamp: int64) and titles (item_id, title) as Parquet."""
    log = generate(users=users, items=items, interactions=interactions, seed=seed, progress=progress)
    titles = [f"Item {item} (group {group})" for item, group in enumerate(item_groups(items).tolist(), start=1)]
    with connect() as con:
        write_parquet(con, titles_path, {"item_id": np.arange(1, items + 1), "title": np.array(titles, object)}, {})
        write_parquet(con, log_path, dict(zip(("user_id", "item_id", "timestamp"), log, strict=True)), {})


def generate(
    *, users: int, items: int, interactions: int, seed: int, progress: bool = False
) -> tuple[Ints, Ints, Ints]:
    """Draw a log: user ids [N], item ids [N], both from 1, and times [N] in seconds since 1970.

    By user, and within a user by time, which strictly increases. The order of a user's items is random, so the last
    one is as likely a favourite as any. The same arguments give the same log. Raises InputError where no log can have
    these sizes.
    """
    check_sizes(users, items, interactions)
    rng = np.random.default_rng(seed)
    degrees = _activity(rng, users, items, interactions)
    catalogue = _Catalogue.draw(rng, items)
    tastes = _tastes(rng, users, catalogue.mass)
    ends = np.cumsum(degrees)
    owner = np.searchsorted(ends, rng.choice(ends[-1], min(items, ends[-1]), replace=False), side="right")
    given = np.split(np.argsort(owner), np.cumsum(np.bincount(owner, minlength=users)))  # so that every item occurs
    item_column, times = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int64)
    for user, degree in enumerate(tqdm(degrees.tolist(), "synthetic", unit=" users", disable=not progress)):
        rows = slice(ends[user] - degree, ends[user])
        item_column[rows] = 1 + catalogue.choose(rng, tastes[user], given[user], degree)
        times[rows] = _times(rng, degree)
    return np.repeat(np.arange(1, users + 1), degrees), item_column, times


def item_groups(items: int) -> Ints:
    """The planted group [I] of each item, from 1: items take turns, so that groups are of one size."""
    return np.arange(items) % min(MAX_GROUPS, max(1, items // 10)) + 1


def check_sizes(users: int, items: int, interactions: int) -> None:
    """Raise InputError where no log can have these sizes."""
    if users < 1 or items < 2:
        raise InputError(f"a synthetic log needs at least 1 user and 2 items: got {users} users and {items} items")
    if interactions < users:
        raise InputError(
            f"{interactions} interactions cannot give each of {users} users one: "
            f"ask for at least {users} interactions or at most {interactions} users"
        )
    if interactions > users * items:
        raise InputError(
            f"{users} users and {items} items make {users * items} distinct pairs, fewer than the {interactions} "
            f"interactions asked for: ask for at most {users * items}, or for more users or items"
        )


def _activity(rng: np.random.Generator, users: int, items: int, interactions: int) -> Ints:
    """Interactions of each user [U]: a minimum, and log-normal above it up to a cap; in all a few too few."""
    least = min(MIN_RATINGS, items, interactions // users)
    # Half the catalogue, as MovieLens's keenest users do, where the mean leaves room below it.
    most = min(items, max(items // 2, 2 * -(-interactions // users)))
    weights = np.exp(ACTIVITY_SIGMA * rng.standard_normal(users))

    def degrees(scale: float) -> Ints:
        return np.minimum(least + scale * weights, most).astype(np.int64)

    low, high = 0.0, most / float(weights.min()) + 1
    for _ in range(64):
        scale = (low + high) / 2
        low, high = (scale, high) if degrees(scale).sum() <= interactions else (low, scale)
    return degrees(low)


def _tastes(rng: np.random.Generator, users: int, mass: Floats) -> Floats:
    """The share of each group in what each user takes [U, G]; a group may be a favourite more than once."""
    shares = np.tile((1 - FAVOURITES.sum()) * mass / mass.sum(), (users, 1))
    for share in FAVOURITES:
        shares[np.arange(users), rng.integers(0, len(mass), users)] += share
    return shares


@dataclass(frozen=True)
class _Catalogue:
    """The items' popularity, in order of group."""

    items: Ints  # [I], group after group
    groups: Ints  # [I] of those, from 0
    popularity: Floats  # [I] of those
    edges: Floats  # [I] cumulative popularity
    mass: Floats  # [G] popularity of each group

    @classmethod
    def draw(cls, rng: np.random.Generator, items: int) -> "_Catalogue":
        """Draw popularities, whose skew grows with the catalogue as it does among the MovieLens logs."""
        sigma = min(3.0, 2.2 + 0.4 * max(0.0, float(np.log(items / 3706))))
        popularity = np.exp(sigma * rng.standard_normal(items))
        groups = item_groups(items) - 1
        order = np.argsort(groups, kind="stable")
        edges = np.cumsum(popularity)
        edges[-1] = np.inf  # whatever rounding does, a draw is below
        mass = np.bincount(groups[order], popularity).astype(np.float64)
        return cls(order, groups[order], popularity, edges, mass)

    def choose(self, rng: np.random.Generator, taste: Floats, given: Ints, degree: int) -> Ints:
        """`degree` distinct items, from 0, in random order: `given` [at most degree], then by `taste` [G]."""
        group = rng.choice(len(taste), 4 * degree, p=taste)
        low = np.cumsum(self.mass) - self.mass
        place = np.searchsorted(self.edges, low[group] + rng.random(len(group)) * self.mass[group])
        drawn = np.append(given, self.items[place])
        first = np.unique(drawn, return_index=True)[1]
        chosen = drawn[np.sort(first)[:degree]]
        return rng.permutation(chosen if len(chosen) == degree else self._race(rng, taste, given, degree))

    def _race(self, rng: np.random.Generator, taste: Floats, given: Ints, degree: int) -> Ints:
        """The same for a large share of the catalogue, without repeated draws (Efraimidis and Spirakis, 2006)."""
        times = rng.standard_exponential(len(self.items)) / (self.popularity * (taste / self.mass)[self.groups])
        times[np.isin(self.items, given)] = 0
        return self.items[np.argpartition(times, degree - 1)[:degree]]


def _times(rng: np.random.Generator, degree: int) -> Ints:
    """A user's times [degree]: a start within 20 years, then gaps of some hours, shorter for very many."""
    gap = min(6 * 3600, 10 * YEAR / degree)  # mean, seconds
    start = EPOCH + int(rng.integers(0, 20 * YEAR))
    return start + np.cumsum(1 + (gap * rng.standard_exponential(degree)).astype(np.int64))
