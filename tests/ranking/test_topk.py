import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.errors import RunError
from ncf.ranking.topk import top_items


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=8, max_size=8), min_size=1, max_size=4),
    st.sets(st.integers(0, 7)),
    st.integers(1, 12),
)
def test_the_best_unseen_items_in_order_ties_by_item(table, seen, k):
    scores = torch.tensor(table, dtype=torch.float32)
    pairs = [(user, item) for user in range(len(table)) for item in seen]
    users, items = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    found, values = top_items(scores, k, (users, items))
    for row, scores_row in enumerate(table):
        expected = sorted((i for i in range(8) if i not in seen), key=lambda i: (-scores_row[i], i))[:k]
        kept = values[row] > -math.inf
        assert found[row][kept].tolist() == expected
        assert values[row][kept].tolist() == [scores_row[i] for i in expected]


def test_seen_items_can_be_included():
    found, _ = top_items(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    assert found.tolist() == [[1, 2]]


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(RunError, match="not finite"):
        top_items(torch.tensor([[math.nan, 1.0]]), 1)
