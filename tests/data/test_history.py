"""Histories beside a slow version of the rule; and that nothing of a held-out item or later is in one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.data.history import Histories
from ncf.data.interactions import Sequence
from ncf.data.unseen import PAD
from ncf.errors import NcfWarning
from ncf.ingest.prepare import prepare
from ncf.ranking.eval_set import make_eval_set


def sequence_of(users, earlier):
    items = torch.arange(len(users), dtype=torch.int32) + 100  # an item tells its row
    counts = None if earlier is None else torch.tensor(earlier, dtype=torch.int32)
    return Sequence(torch.tensor(users, dtype=torch.int32), items, counts)


@st.composite
def moments(draw):
    """Sorted users with a time each: rows with the times of 0 to 3 per user, in order."""
    rows = sorted(draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=30)))
    return [user for user, _ in rows], [time for _, time in rows]


@given(moments(), st.integers(1, 6))
def test_a_history_is_the_last_earlier_items(rows, length):
    users, times = rows
    earlier = [
        sum(1 for u, t in zip(users, times, strict=True) if (u, t < times[k]) == (users[k], True))
        for k in range(len(users))
    ]
    sequence = sequence_of(users, earlier)
    histories = Histories(sequence, 5, length)
    found = histories.of_rows(torch.arange(len(users)))
    for row, history in enumerate(found.tolist()):
        before = [100 + k for k in range(row) if users[k] == users[row] and times[k] < times[row]]
        expected = before[::-1][:length]
        assert history == expected + [PAD] * (length - len(expected))
    last = histories.of_users(torch.arange(5))
    for user, history in enumerate(last.tolist()):
        everything = [100 + k for k in range(len(users)) if users[k] == user]
        assert [item for item in history if item != PAD] == everything[::-1][:length]


def test_without_ties_all_rows_before_count():
    histories = Histories(sequence_of([0, 0, 0, 1, 1], None), 3, 2)
    assert histories.of_rows(torch.arange(5)).tolist() == [[-1, -1], [100, -1], [101, 100], [-1, -1], [103, -1]]
    assert histories.of_users(torch.tensor([2, 0]), torch.tensor([0, 1])).tolist() == [[-1, -1], [100, -1]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 1000))
def test_without_an_order_it_is_a_sample_of_the_others(raw_users, length, seed):
    users = sorted(raw_users)
    generator = torch.Generator().manual_seed(seed)
    found = Histories(sequence_of(users, None), 4, length, ordered=False).of_rows(torch.arange(len(users)), generator)
    for row, history in enumerate(found.tolist()):
        kept = [item for item in history if item != PAD]
        others = {100 + k for k in range(len(users)) if users[k] == users[row]} - {100 + row}
        assert set(kept) <= others
        assert len(kept) == len(set(kept)) == min(length, len(others))


def test_a_sample_takes_every_other_item_alike():
    histories = Histories(sequence_of([0] * 9, None), 1, 3, ordered=False)
    generator = torch.Generator().manual_seed(0)
    drawn = histories.of_rows(torch.full((9000,), 4), generator)
    counts = torch.bincount(drawn.flatten() - 100, minlength=9)
    assert counts[4] == 0
    assert counts[[0, 1, 2, 3, 5, 6, 7, 8]].min() > 0.8 * 9000 * 3 / 8


def test_an_evaluation_sees_what_came_before_the_held_out_item_alone(make_dataset):
    dataset = make_dataset([[1, 2, 3, 4, 5], [6, 7]], 9)
    validation, test = (make_eval_set(dataset, split, "all", history=4) for split in ("validation", "test"))
    assert validation.history is not None
    assert validation.history.tolist() == [[3, 2, 1, PAD]]
    assert test.history is not None
    assert test.history.tolist() == [[4, 3, 2, 1], [6, PAD, PAD, PAD]]


def test_simultaneous_items_are_not_in_an_evaluations_history(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(
        "user,item,time\n" + "".join(f"1,{item},{time}\n" for item, time in enumerate([1, 2, 7, 7, 7])) + "2,8,1\n"
    )
    with pytest.warns(NcfWarning, match="1 of 2 users have no test item"):
        dataset = prepare(log, min_ratings=1)
    for split in ("validation", "test"):
        history = make_eval_set(dataset, split, 1, history=4).history
        assert history is not None
        assert history.tolist() == [[1, 0, PAD, PAD]]
