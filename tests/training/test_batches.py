import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.config import TrainConfig
from ncf.data.interactions import Sequence
from ncf.errors import InputError
from ncf.training.batches import Batches, batch_size_of


def epoch_of(batches: Batches, seed: int):
    return list(batches.epoch(torch.Generator().manual_seed(seed)))


@given(
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=50),
    st.integers(3, 40),
    st.integers(0, 3),
    st.booleans(),
)
def test_an_epoch_visits_every_interaction_once_with_untouched_negatives(pairs, batch_size, seed, pad):
    ordered = sorted(pairs)
    users, items = torch.tensor(ordered, dtype=torch.int32).unbind(1)
    config = TrainConfig(negative_samples=2, batch_size=batch_size)
    batches = Batches(Sequence(users, items), 6, 10, config, pad=pad)
    seen, total = [], 0
    for batch_users, candidates, weights, samples, *_ in epoch_of(batches, seed):
        kept = torch.ones(candidates.shape) if weights is None else weights
        assert samples == kept.sum()
        total += samples
        if pad:
            assert len(batch_users) == batches.rows <= batch_size // 3
        for user, row, weight in zip(batch_users.tolist(), candidates.tolist(), kept.tolist(), strict=True):
            if weight[0]:
                seen.append((user, row[0]))
            full = sum(u == user for u, _ in pairs) == 10
            for item, one in zip(row[1:], weight[1:], strict=True):
                assert one == (not full and weight[0])
                assert not one or (user, item) not in pairs
    assert sorted(seen) == ordered
    saturated = sum(sum(u == user for u, _ in pairs) == 10 for user, _ in pairs)
    assert total == 3 * len(pairs) - 2 * saturated


def test_two_epochs_differ_in_order_and_negatives():
    users = torch.arange(40, dtype=torch.int32)
    batches = Batches(Sequence(users, users % 7), 40, 50, TrainConfig(batch_size=50))
    first, second = (torch.cat([batch.candidates for batch in epoch_of(batches, seed)]) for seed in (1, 2))
    assert not torch.equal(first[:, 0], second[:, 0])
    assert set(map(tuple, first[:, 1:].tolist())) != set(map(tuple, second[:, 1:].tolist()))


def test_the_shortcut_may_draw_positives_and_the_exact_draw_never():
    users = torch.zeros(9, dtype=torch.int32)
    items = torch.arange(9, dtype=torch.int32)
    for trick in (False, True):
        batches = Batches(Sequence(users, items), 1, 10, TrainConfig(batch_size=100, neg_trick=trick))
        drawn = torch.cat([batch.candidates[:, 1:].flatten() for batch in epoch_of(batches, 0)])
        assert (drawn == 9).all() == (not trick)


@pytest.mark.parametrize(
    ("n_train", "batch_size", "expected"),
    [(994_169, None, 49_710), (19_861_770, None, 993_090), (10**9, None, 1_048_575), (7, None, 5), (7, 64, 64)],
)
def test_the_automatic_batch_gives_about_100_steps(n_train, batch_size, expected):
    assert batch_size_of(TrainConfig(batch_size=batch_size), n_train) == expected


def test_more_negatives_than_the_largest_batch_still_make_a_step():
    assert batch_size_of(TrainConfig(negative_samples=2_000_000), 10) == 2_000_001


def test_a_batch_must_hold_an_interaction_and_its_negatives():
    with pytest.raises(InputError, match="at least 5: got 4"):
        batch_size_of(TrainConfig(batch_size=4), 100)
