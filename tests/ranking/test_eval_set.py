import dataclasses

import numpy as np
import pytest
import torch

from ncf.data.unseen import PAD
from ncf.errors import InputError, NcfWarning
from ncf.ranking.eval_set import make_eval_set


def test_candidates_are_distinct_and_unseen_in_every_split(tiny):
    eval_set = make_eval_set(tiny, "test", 20)
    users, items = tiny.interactions.seen_pairs()
    assert eval_set.users.tolist() == list(range(40))
    for user, positive, negatives in zip(
        eval_set.users.tolist(), eval_set.positives.tolist(), eval_set.negatives.tolist(), strict=True
    ):
        seen = set(items[users == user].tolist())
        assert positive == tiny.interactions.test_items[user]
        assert len(set(negatives)) == 20
        assert not seen & set(negatives)


def negatives(dataset, split: str = "test") -> list[list[int]]:
    return make_eval_set(dataset, split, 20).negatives.tolist()


def test_both_splits_use_the_same_negatives(tiny):
    assert negatives(tiny) == negatives(tiny, "validation")


def test_the_dataset_seed_is_the_evaluation_sets(tiny):
    other = dataclasses.replace(tiny, seed=1)
    assert negatives(tiny) == negatives(tiny) != negatives(other)


def test_fewer_unseen_items_than_asked_for(tiny):
    with pytest.warns(NcfWarning, match="40 of 40 users have fewer than 99 unseen items"):
        eval_set = make_eval_set(tiny, "test", 99)
    assert ((eval_set.negatives != PAD).sum(1) == 60 - 8).all()
    assert eval_set.pairs == 40 * (60 - 8 + 1)


def test_a_user_who_has_every_item_is_left_out_and_counted(make_dataset):
    dataset = make_dataset([[0, 1, 2, 3], [0, 1, 2], [3, 1]], 4)
    with pytest.warns(NcfWarning, match="1 of 3 users have seen every item"):
        eval_set = make_eval_set(dataset, "test", "all")
    assert eval_set.users.tolist() == [1, 2]
    assert eval_set.skipped == 1


def test_a_user_with_one_interaction_is_not_evaluated(make_dataset):
    eval_set = make_eval_set(make_dataset([[0], [1, 2], [1, 2, 3]], 9), "test", 2)
    assert eval_set.users.tolist() == [1, 2]
    assert make_eval_set(make_dataset([[0], [1, 2], [1, 2, 3]], 9), "validation", 2).users.tolist() == [2]


def test_no_items_for_the_split_names_the_ways_out(make_dataset):
    with pytest.raises(InputError, match="0 of 1 users have one.*--select-on test or --select-on last"):
        make_eval_set(make_dataset([[0, 1]], 5), "validation", 2)


def test_given_negatives_serve_the_test_split_and_repeats_are_masked(make_dataset):
    given = torch.tensor([[4, 5, 4], [3, 6, 7]], dtype=torch.int32)
    dataset = make_dataset([[0, 1, 2], [1, 2, 3]], 9, negatives=given)
    eval_set = make_eval_set(dataset, "test", 3)
    assert eval_set.negatives.tolist() == [[4, 5, PAD], [PAD, 6, 7]]
    assert "came with the log" in eval_set.protocol
    assert "drawn" in make_eval_set(dataset, "test", 2).protocol
    assert "drawn" in make_eval_set(dataset, "validation", 3).protocol
    assert make_eval_set(dataset, "test", "all").negatives is None


def test_real_negatives_of_he(shared_data):
    import ncf

    dataset = ncf.prepare(shared_data / "ml-1m" / "ml-1m.train.rating.gz")
    eval_set = make_eval_set(dataset, "test", 99)
    assert len(eval_set.users) == 6040
    assert (eval_set.negatives == PAD).sum() == 156  # users whose held-out item is among their negatives
    assert np.unique(dataset.interactions.train_users.numpy(), return_counts=True)[1].min() == 19
