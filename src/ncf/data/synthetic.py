"""Logs with a planted structure, at any size from a handful of rows to ml-20m's and beyond.

    write_log("log.parquet", "titles.parquet", users=2000, items=1000, interactions=120_000, seed=0)

Items belong to groups, as films do to genres, and have a popularity. A user has up to three favourite groups, takes
most items from those and the rest from anywhere, in proportion to popularity either way, and never an item twice.
So a ranker by popularity does fairly, and one that learns each user's groups does much better.

The skew follows MovieLens. Measured, as (median / mean interactions of a user; share of the most popular tenth of
the items): ml-100k 65 / 106, 43%; ml-1m 96 / 166, 44%; ml-latest-small (9,724 items) 70 / 165, 60%. Here, at
ml-1m's size, 94 / 166, 40%; and as there the skew of items grows with the catalogue: 57% at ml-latest-small's.

Rules that hold at any possible size: exactly the interactions asked for, all pairs distinct; every user has at least
min(20, items, interactions // users) items; every item occurs if interactions >= items; no user has every item
unless there is no other way.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ncf.data.parquet import write_parquet
from ncf.errors import InputError
from ncf.files import atomic_file

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MIN_RATINGS = 20  # each MovieLens user has as many
MAX_GROUPS = 20  # MovieLens has 18 genres
ACTIVITY_SIGMA = 1.15  # of the log of a user's interactions above the minimum
MIX = np.array([0.55, 0.8, 0.95])  # cumulative shares of the three favourite groups; the rest is from anywhere
CHUNK = 1 << 20  # interactions drawn at a time
DENSE = 8  # a user with more than 1/DENSE of the items is sampled by weighing them all
EPOCH = 788_918_400  # 1995-01-01, when MovieLens began
YEAR = 365 * 86_400


def write_log(
    log_path: Path | str,
    titles_path: Path | str,
    *,
    users: int,
    items: int,
    interactions: int,
    seed: int,
    progress: bool = False,
) -> None:
    """Write `generate`'s log (user_id, item_id, timestamp: int64) and titles (item_id, title) as Parquet.

    Titles name the planted group: `Item 17 (group 17)`. Raises InputError as `generate` does and where a file cannot
    be written, RunError where writing fails midway; neither leaves a partial file behind.
    """
    log = generate(users=users, items=items, interactions=interactions, seed=seed, progress=progress)
    titles = [f"Item {item} (group {group})" for item, group in enumerate(item_groups(items).tolist(), start=1)]
    _write(Path(titles_path), {"item_id": np.arange(1, items + 1), "title": np.array(titles, object)})
    _write(Path(log_path), dict(zip(("user_id", "item_id", "timestamp"), log, strict=True)))


def generate(
    *, users: int, items: int, interactions: int, seed: int, progress: bool = False
) -> tuple[Ints, Ints, Ints]:
    """Draw a log: user ids [N], item ids [N], both from 1, and times [N] in seconds since 1970.

    By user, and within a user by time, which strictly increases. The order of a user's items is random, so the last
    one is as likely a favourite as any. The same arguments give the same log. Memory is linear in N.
    Raises InputError where no log can have these sizes.
    """
    check_sizes(users, items, interactions)
    rng = np.random.default_rng(seed)
    degrees = _activity(rng, users, items, interactions)  # [U]
    taste = _Taste.draw(rng, users, items)
    item_column = np.empty(interactions, np.int64)
    end = 0
    with tqdm(total=interactions, desc="synthetic", unit=" rows", unit_scale=True, disable=not progress) as bar:
        for chunk in _chunks(degrees):
            begin, end = end, end + int(degrees[chunk].sum())
            item_column[begin:end] = _items_of(rng, taste, degrees[chunk], chunk.start)
            bar.update(end - begin)
    _use_every_item(rng, item_column, items)
    item_column += 1
    user_column = np.repeat(np.arange(1, users + 1), degrees)
    return user_column, item_column, _times(rng, degrees)


def item_groups(items: int) -> Ints:
    """The planted group [I] of each item, from 1: items take turns, so that groups are of one size."""
    return np.arange(items) % _group_count(items) + 1


def _group_count(items: int) -> int:
    return min(MAX_GROUPS, max(1, items // 10))


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
    """Interactions of each user [U]: a minimum, and log-normal above it up to a cap; they add up exactly."""
    least = min(MIN_RATINGS, items, interactions // users)
    # Half the catalogue, as MovieLens's keenest users do, where the mean leaves room below it.
    most = min(max(items // 2, 2 * -(-interactions // users)), items - (interactions <= users * (items - 1)))
    weights = np.exp(ACTIVITY_SIGMA * rng.standard_normal(users))

    def degrees(scale: float) -> Ints:
        return np.minimum(least + (scale * weights).astype(np.int64), most)

    low, high = 0.0, most / float(weights.min()) + 1
    for _ in range(64):
        scale = (low + high) / 2
        low, high = (scale, high) if degrees(scale).sum() <= interactions else (low, scale)
    result = degrees(low)
    room = most - result
    given = np.clip(interactions - result.sum() - (np.cumsum(room) - room), 0, room)
    result += given  # the few that rounding left over go to the first users with room
    return result


def _chunks(degrees: Ints) -> Iterator[slice]:
    """Ranges of users with about CHUNK interactions each."""
    totals = np.cumsum(degrees)
    begin = 0
    while begin < len(degrees):
        before = totals[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(totals, before + CHUNK, side="right")))
        yield slice(begin, end)
        begin = end


@dataclass(frozen=True)
class _Taste:
    """Who likes what. Group G, after the real ones, stands for the whole catalogue."""

    popularity: Floats  # [I], positive
    groups: Ints  # [I], from 0
    by_group: Ints  # [I] items, group after group
    edges: Floats  # [I + 1] cumulative popularity in that order
    first: Ints  # [G + 1] where a group begins in that order
    last: Ints  # [G + 1] where it ends, exclusive
    favourites: NDArray[np.int8]  # [U, 4] three groups, of which some may be the same, and G

    @classmethod
    def draw(cls, rng: np.random.Generator, users: int, items: int) -> "_Taste":
        sigma = min(3.0, 2.2 + 0.4 * max(0.0, float(np.log(items / 3706))))  # see the figures above
        popularity = np.exp(sigma * rng.standard_normal(items))
        groups = item_groups(items) - 1
        count = _group_count(items)
        by_group = np.argsort(groups, kind="stable")
        sizes = np.bincount(groups, minlength=count)
        last = np.append(np.cumsum(sizes), items)
        first = np.append(last[:-1] - sizes, 0)
        edges = np.append(0.0, np.cumsum(popularity[by_group]))
        favourites = rng.integers(0, count, (users, len(MIX) + 1), dtype=np.int8)
        favourites[:, -1] = count
        return cls(popularity, groups, by_group, edges, first, last, favourites)

    def draws(self, rng: np.random.Generator, users: Ints) -> Ints:
        """An item [n] for each of these users [n], independently."""
        slot = np.searchsorted(MIX, rng.random(len(users)), side="right")
        group = self.favourites[users, slot]
        low, high = self.edges[self.first[group]], self.edges[self.last[group]]
        place = np.searchsorted(self.edges, low + rng.random(len(users)) * (high - low), side="right") - 1
        # Rounding can reach the group's end: the clip keeps the draw inside.
        return self.by_group[np.clip(place, self.first[group], self.last[group] - 1)]

    def weights(self, user: int) -> Floats:
        """The probability [I] of each item in `draws` for this user."""
        favourites = self.favourites[user]
        mass = self.edges[self.last] - self.edges[self.first]  # [G + 1]
        share = np.bincount(favourites, np.diff(MIX, prepend=0.0, append=1.0), minlength=len(mass)) / mass
        weights: Floats = self.popularity * (share[self.groups] + share[-1])
        return weights


def _items_of(rng: np.random.Generator, taste: _Taste, degrees: Ints, first_user: int) -> Ints:
    """Distinct items, from 0, for users first_user, first_user + 1, ...: as many as `degrees` [C], in random order."""
    items = len(taste.popularity)
    keys, done = _draw_distinct(rng, taste, degrees, first_user)  # a key is user * I + item
    weighed = [
        user * items + _weighted_sample(rng, taste.weights(first_user + user), int(degrees[user]))
        for user in np.flatnonzero(~done).tolist()
    ]
    keys = np.sort(np.concatenate([keys, *weighed]))
    order = _shuffle_within(rng, keys // items)
    return keys[order] % items


def _draw_distinct(
    rng: np.random.Generator, taste: _Taste, degrees: Ints, first_user: int
) -> tuple[Ints, NDArray[np.bool_]]:
    """Draw a little more than needed, drop repeats, again for those who lack some: sorted keys, and who is done [C].

    Users with a large share of the items, or who still lack some at the end, are not done and have no keys.
    """
    items = len(taste.popularity)
    lack = np.where(degrees * DENSE > items, 0, degrees)
    keys = np.empty(0, np.int64)
    for extra in (1.25, 2, 4, 8, 16, 32):  # the last few of a user are the rarest, and take the most draws
        short = np.flatnonzero(lack)
        if not len(short):
            break
        owner = np.repeat(short, (lack[short] * extra).astype(np.int64) + 4)
        fresh = _without(np.sort(owner * items + taste.draws(rng, first_user + owner)), keys)
        owner = fresh // items
        order = _shuffle_within(rng, owner)
        fresh = fresh[order[_rank_within(owner) < lack[owner]]]
        lack = lack - np.bincount(fresh // items, minlength=len(lack))
        keys = np.sort(np.concatenate([keys, fresh]))
    done = (lack == 0) & (degrees * DENSE <= items)
    return keys[done[keys // items]], done


def _without(fresh: Ints, keys: Ints) -> Ints:
    """The distinct values of the sorted `fresh` that the sorted `keys` lack: several times faster than np.isin."""
    new = np.diff(fresh, prepend=-1) > 0
    if len(keys):
        new &= keys[np.minimum(np.searchsorted(keys, fresh), len(keys) - 1)] != fresh
    return fresh[new]


def _weighted_sample(rng: np.random.Generator, weights: Floats, count: int) -> Ints:
    """`count` distinct indices, as successive draws by weight would take them (Efraimidis and Spirakis, 2006)."""
    return np.argpartition(rng.standard_exponential(len(weights)) / weights, count - 1)[:count]


def _shuffle_within(rng: np.random.Generator, owner: Ints) -> Ints:
    """An order [n] that shuffles each run of equal values of the sorted `owner` [n] and keeps the runs in place."""
    return np.argsort((owner << 32) | rng.integers(0, 1 << 32, len(owner)), kind="stable")


def _rank_within(owner: Ints) -> Ints:
    """0, 1, 2, ... [n] along each run of equal values of the sorted `owner` [n]."""
    sizes = np.bincount(owner)
    return np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _use_every_item(rng: np.random.Generator, item_column: Ints, items: int) -> None:
    """Put each unused item in the place of a row whose item occurs elsewhere too, as far as there are such rows.

    Nobody has an unused item yet, so the pairs stay distinct.
    """
    counts = np.bincount(item_column, minlength=items)
    unused = np.flatnonzero(counts == 0)
    kept = np.empty(items, np.int64)
    kept[item_column] = np.arange(len(item_column))  # one row of each used item
    kept = np.sort(kept[counts > 0])
    free = len(item_column) - len(kept)
    unused = unused[: min(free, len(unused))]
    chosen = rng.choice(free, len(unused), replace=False)
    # The r-th row that is not kept is r + c, c counting the kept rows before it.
    rows = chosen + np.searchsorted(kept - np.arange(len(kept)), chosen, side="right")
    item_column[rows] = unused


def _times(rng: np.random.Generator, degrees: Ints) -> Ints:
    """Times [N], by user: a start in 20 years for each, then gaps of some hours, seconds for those with very many."""
    ends = np.cumsum(degrees)
    gap = np.minimum(6 * 3600, 10 * YEAR / degrees)  # mean, seconds
    times: Ints = 1 + (rng.standard_exponential(ends[-1]) * np.repeat(gap, degrees)).astype(np.int64)
    np.cumsum(times, out=times)
    start = EPOCH + rng.integers(0, 20 * YEAR, len(degrees))
    times += np.repeat(start - times[ends - degrees], degrees)
    return times


def _write(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable or path.is_dir():
        raise InputError(f"cannot write {path}: name a file in a folder that can be written to")
    with atomic_file(path) as part:
        write_parquet(part, columns, {})
