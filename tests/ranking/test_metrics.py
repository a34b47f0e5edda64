import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.ranking.metrics import histogram, metrics_of, ranks_of


def metrics_at(ranks: list[int], k: int):
    return metrics_of(histogram(torch.tensor(ranks), max(ranks)), k)


@pytest.mark.parametrize(
    ("rank", "ndcg"), [(1, 1.0), (2, 1 / math.log2(3)), (3, 1 / 2), (10, 1 / math.log2(11)), (11, 0.0)]
)
def test_one_user(rank, ndcg):
    found = metrics_at([rank], 10)
    assert found.ndcg == pytest.approx(ndcg, abs=1e-12)
    assert found.hr == (1.0 if rank <= 10 else 0.0)
    assert found.mrr == pytest.approx(1 / rank)
    assert found.users == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=50), st.integers(1, 60))
def test_metrics_equal_the_definition_user_by_user(ranks, k):
    found = metrics_at(ranks, k)
    assert found.hr == pytest.approx(sum(r <= k for r in ranks) / len(ranks))
    assert found.ndcg == pytest.approx(sum(1 / math.log2(r + 1) for r in ranks if r <= k) / len(ranks))
    assert found.mrr == pytest.approx(sum(1 / r for r in ranks) / len(ranks))
    assert 0 <= found.ndcg <= found.hr <= 1


def test_nobody_to_average_over():
    found = metrics_of(torch.zeros(5, dtype=torch.int64), 10)
    assert (found.hr, found.ndcg, found.mrr, found.users) == (0, 0, 0, 0)


def test_ties_count_against_the_positive():
    others = torch.zeros(1, 99)
    counted = torch.ones(1, 99, dtype=torch.bool)
    assert ranks_of(torch.zeros(1), others, counted).tolist() == [100]


def test_a_nan_is_never_a_hit():
    counted = torch.ones(1, 3, dtype=torch.bool)
    assert ranks_of(torch.tensor([math.nan]), torch.zeros(1, 3), counted).tolist() == [4]
    assert ranks_of(torch.tensor([5.0]), torch.tensor([[math.nan, 1.0, 1.0]]), counted).tolist() == [2]


def test_what_is_not_counted_takes_no_rank():
    others = torch.tensor([[9.0, 1.0, 9.0]])
    counted = torch.tensor([[False, True, True]])
    assert ranks_of(torch.tensor([5.0]), others, counted).tolist() == [2]
