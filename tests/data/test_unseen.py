import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncf.data.unseen import PAD, UnseenItems, draw_unchecked, evaluation_negatives

N_ITEMS = 12
logs = st.lists(st.lists(st.integers(0, N_ITEMS - 1), max_size=20), min_size=1, max_size=6)


def untouched_of(histories: list[list[int]], n_items: int = N_ITEMS) -> UnseenItems:
    pairs = [(user, item) for user, history in enumerate(histories) for item in history]
    users, items = torch.tensor(pairs, dtype=torch.int32).view(-1, 2).unbind(1)
    return UnseenItems(users, items, len(histories), n_items)


@given(logs)
def test_numbers_name_the_untouched_items_in_order(histories):
    unseen = untouched_of(histories)
    for user, history in enumerate(histories):
        expected = sorted(set(range(N_ITEMS)) - set(history))
        assert unseen.counts[user] == len(expected)
        numbers = torch.arange(len(expected)).unsqueeze(0)
        assert unseen.item_at(torch.tensor([user]), numbers).tolist() == [expected]


@given(logs)
def test_touched_lists_every_item_of_the_users_asked_for(histories):
    unseen = untouched_of(histories)
    users = torch.tensor([*reversed(range(len(histories))), 0])
    rows, items = unseen.seen(users)
    for row, user in enumerate(users.tolist()):
        assert items[rows == row].tolist() == sorted(set(histories[user]))


@given(logs, st.integers(0, 2**32 - 1))
def test_draws_are_untouched_and_none_where_there_is_none(histories, seed):
    unseen = untouched_of(histories)
    users = torch.arange(len(histories))
    drawn = unseen.draw(users, 5, torch.Generator().manual_seed(seed))
    for user, history in enumerate(histories):
        left = set(range(N_ITEMS)) - set(history)
        assert set(drawn[user].tolist()) <= (left or {PAD})


@pytest.mark.parametrize("checked", [True, False])
def test_draws_are_uniform(checked):
    histories = [[0, 1, 2, 5, 11], []]
    generator = torch.Generator().manual_seed(0)
    users = torch.tensor([0])
    n = 70_000
    if checked:
        drawn = untouched_of(histories).draw(users, n, generator)
        left = sorted(set(range(N_ITEMS)) - set(histories[0]))
    else:
        drawn = draw_unchecked(N_ITEMS, users, n, generator)
        left = list(range(N_ITEMS))
    counts = torch.bincount(drawn.flatten(), minlength=N_ITEMS)
    expected = n / len(left)
    assert counts[left].sum() == n
    chi_square = ((counts[left] - expected) ** 2 / expected).sum().item()
    assert chi_square < len(left) - 1 + 5 * math.sqrt(2 * (len(left) - 1))


@settings(max_examples=50)
@given(logs, st.integers(1, 15), st.integers(0, 2**32 - 1))
def test_evaluation_negatives_are_distinct_untouched_and_as_many_as_there_are(histories, n, seed):
    unseen = untouched_of(histories)
    negatives = evaluation_negatives(unseen, torch.arange(len(histories)), n, seed)
    for user, history in enumerate(histories):
        left = set(range(N_ITEMS)) - set(history)
        found = [item for item in negatives[user].tolist() if item != PAD]
        assert len(found) == len(set(found)) == min(n, len(left))
        assert set(found) <= left


def test_evaluation_negatives_depend_on_the_seed_and_the_user_alone():
    unseen = untouched_of([[u, u + 1] for u in range(8)], 500)
    everyone = evaluation_negatives(unseen, torch.arange(8), 20, 7)
    for user in (0, 3, 7):
        assert torch.equal(evaluation_negatives(unseen, torch.tensor([user]), 20, 7)[0], everyone[user])
    assert not torch.equal(evaluation_negatives(unseen, torch.arange(8), 20, 8), everyone)
    assert not torch.equal(everyone[0], everyone[1])


def test_evaluation_negatives_are_uniform_over_users():
    n_users, n_items, n = 4000, 40, 10
    unseen = untouched_of([[0]] * n_users, n_items)
    counts = torch.bincount(evaluation_negatives(unseen, torch.arange(n_users), n, 0).flatten(), minlength=n_items)
    expected = n_users * n / (n_items - 1)
    assert counts[0] == 0
    chi_square = ((counts[1:] - expected) ** 2 / expected).sum().item()
    assert chi_square < 38 + 5 * math.sqrt(2 * 38)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9))
def test_which_of_some_items_a_user_has_seen(seed, n_items, n_users):
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(n_users, n_items, generator=generator) < 0.4
    unseen = UnseenItems(seen.nonzero()[:, 0], seen.nonzero()[:, 1], n_users, n_items)
    users = torch.randint(n_users, (20,), generator=generator).sort().values
    items = torch.randperm(n_items, generator=generator)[: 1 + n_items // 2]
    assert torch.equal(unseen.which_seen(users, items), seen[users][:, items])
    assert torch.equal(unseen.pairs, seen.flatten().nonzero().flatten())
