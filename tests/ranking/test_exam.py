import dataclasses

import numpy as np
import pytest
import torch

from ncf.data.negatives import NONE
from ncf.errors import InputError, NcfWarning
from ncf.ranking.exam import make_exam


def test_candidates_are_distinct_and_untouched_in_every_split(tiny):
    exam = make_exam(tiny, "test", 20)
    users, items = tiny.touched()
    assert exam.users.tolist() == list(range(40))
    for user, positive, negatives in zip(
        exam.users.tolist(), exam.positives.tolist(), exam.negatives.tolist(), strict=True
    ):
        touched = set(items[users == user].tolist())
        assert positive == tiny.test_items[user]
        assert len(set(negatives)) == 20
        assert not touched & set(negatives)


def test_both_splits_use_the_same_negatives(tiny):
    assert torch.equal(make_exam(tiny, "test", 20).negatives, make_exam(tiny, "validation", 20).negatives)


def test_the_dataset_seed_is_the_exams(tiny):
    other = dataclasses.replace(tiny, seed=1)
    assert torch.equal(make_exam(tiny, "test", 20).negatives, make_exam(tiny, "test", 20).negatives)
    assert not torch.equal(make_exam(tiny, "test", 20).negatives, make_exam(other, "test", 20).negatives)


def test_fewer_untouched_items_than_asked_for(tiny):
    with pytest.warns(NcfWarning, match="40 of 40 users have fewer than 99 untouched items"):
        exam = make_exam(tiny, "test", 99)
    assert ((exam.negatives != NONE).sum(1) == 60 - 8).all()
    assert exam.pairs == 40 * (60 - 8 + 1)


def test_a_user_who_has_every_item_is_left_out_and_counted(make_dataset):
    dataset = make_dataset([[0, 1, 2, 3], [0, 1, 2], [3, 1]], 4)
    with pytest.warns(NcfWarning, match="1 of 3 users have touched every item"):
        exam = make_exam(dataset, "test", "all")
    assert exam.users.tolist() == [1, 2]
    assert exam.skipped == 1


def test_a_user_with_one_interaction_is_not_evaluated(make_dataset):
    exam = make_exam(make_dataset([[0], [1, 2], [1, 2, 3]], 9), "test", 2)
    assert exam.users.tolist() == [1, 2]
    assert make_exam(make_dataset([[0], [1, 2], [1, 2, 3]], 9), "validation", 2).users.tolist() == [2]


def test_no_items_for_the_split_names_the_ways_out(make_dataset):
    with pytest.raises(InputError, match="0 of 1 users have one.*--select-on test or --select-on last"):
        make_exam(make_dataset([[0, 1]], 5), "validation", 2)


def test_given_negatives_serve_the_test_split_and_repeats_are_masked(make_dataset):
    given = torch.tensor([[4, 5, 4], [3, 6, 7]], dtype=torch.int32)
    dataset = make_dataset([[0, 1, 2], [1, 2, 3]], 9, negatives=given)
    exam = make_exam(dataset, "test", 3)
    assert exam.negatives.tolist() == [[4, 5, NONE], [NONE, 6, 7]]
    assert "came with the log" in exam.protocol
    assert "drawn" in make_exam(dataset, "test", 2).protocol
    assert "drawn" in make_exam(dataset, "validation", 3).protocol
    assert make_exam(dataset, "test", "all").negatives is None


def test_real_negatives_of_he(shared_data):
    import ncf

    dataset = ncf.prepare(shared_data / "ml-1m" / "ml-1m.train.rating.gz")
    exam = make_exam(dataset, "test", 99)
    assert len(exam.users) == 6040
    assert (exam.negatives == NONE).sum() == 156  # users whose held-out item is among their negatives
    assert np.unique(dataset.train_users.numpy(), return_counts=True)[1].min() == 19
