import math

import pytest
import torch

from ncf.data.unseen import PAD
from ncf.errors import NcfWarning, RunError
from ncf.model.neumf import NeuMF
from ncf.ranking import evaluate as module
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate, warn_if_odd
from ncf.ranking.scorer import NeuralScorer, PopularityScorer


class TableScorer:
    """Scores from a table users x items."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def user_rows(self, users, history=None):  # noqa: ARG002
        return self.table[users]

    def score(self, rows, items):
        return rows.gather(1, items)

    def score_all(self, rows):
        return rows.clone()


def slow_metrics(table, dataset, eval_set, k):
    """Rank by rank, as the protocol reads."""
    users, items = dataset.interactions.seen_pairs()
    hits = gain = reciprocal = 0.0
    for row, user in enumerate(eval_set.users.tolist()):
        positive = int(eval_set.positives[row])
        if eval_set.negatives is None:
            others = set(range(dataset.n_items)) - set(items[users == user].tolist())
        else:
            others = set(eval_set.negatives[row].tolist()) - {PAD}
        rank = 1 + sum(bool(table[user, other] >= table[user, positive]) for other in others)
        reciprocal += 1 / rank
        if rank <= k:
            hits += 1
            gain += 1 / math.log2(rank + 1)
    n = len(eval_set.users)
    return hits / n, gain / n, reciprocal / n


@pytest.mark.parametrize("negatives", [20, "all"])
@pytest.mark.parametrize("users_per_batch", [7, 5000])
def test_metrics_equal_the_slow_reference(tiny, negatives, users_per_batch):
    table = torch.randint(0, 30, (40, 60), generator=torch.Generator().manual_seed(0)).float()  # with ties
    eval_set = make_eval_set(tiny, "test", negatives)
    found = evaluate(TableScorer(table), eval_set, k=5, users_per_batch=users_per_batch)
    expected = slow_metrics(table, tiny, eval_set, 5)
    assert (found.hr, found.ndcg, found.mrr) == pytest.approx(expected, abs=1e-12)
    assert found.users == 40


@pytest.mark.parametrize("negatives", [20, "all"])
def test_a_constant_model_hits_nothing_and_is_warned_of(tiny, negatives):
    eval_set = make_eval_set(tiny, "test", negatives)
    found = evaluate(TableScorer(torch.zeros(40, 60)), eval_set, k=10)
    assert (found.hr, found.ndcg, found.ties) == (0, 0, 1)
    with pytest.warns(NcfWarning, match="100.0% of the held-out items tie"):
        warn_if_odd(found, eval_set)


def test_every_candidate_within_k_is_warned_of(tiny):
    eval_set = make_eval_set(tiny, "test", 5)
    table = torch.arange(60.0).expand(40, 60)
    with pytest.warns(NcfWarning, match="k = 6 is not below the 6 candidates"):
        warn_if_odd(evaluate(TableScorer(table), eval_set, k=6), eval_set)


@pytest.mark.parametrize("negatives", [20, "all"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_end_the_run(tiny, negatives, bad):
    table = torch.zeros(40, 60)
    eval_set = make_eval_set(tiny, "test", negatives)
    table[3, eval_set.positives[3]] = bad
    with pytest.raises(RunError, match="1 of 40 users are not finite"):
        evaluate(TableScorer(table), eval_set, k=10)


def test_what_a_user_has_seen_does_not_count_in_the_full_catalogue(tiny):
    """A model that scores the history above the rest loses nothing by it."""
    table = torch.zeros(40, 60)
    table[tiny.interactions.train_users.long(), tiny.interactions.train_items.long()] = 9
    table[torch.arange(40), tiny.interactions.test_items.long()] = 1
    assert evaluate(TableScorer(table), make_eval_set(tiny, "test", "all"), k=1).hr == 1


def test_full_ranking_holds_a_bounded_number_of_scores(tiny, monkeypatch):
    monkeypatch.setattr(module, "MAX_SCORES", 150)
    sizes = []

    class Watched(TableScorer):
        def score_all(self, rows):
            sizes.append(len(rows))
            return super().score_all(rows)

    evaluate(Watched(torch.rand(40, 60)), make_eval_set(tiny, "test", "all"), k=10)
    assert max(sizes) == 2


def test_popularity_counts_training_interactions(tiny):
    scorer = PopularityScorer(tiny.interactions.train_items, 60)
    expected = torch.bincount(tiny.interactions.train_items.long(), minlength=60).float()
    assert torch.equal(scorer.score(torch.tensor([1]), torch.tensor([[3, 5]])), expected[None, [3, 5]])
    assert torch.equal(scorer.score_all(torch.tensor([0, 7])), expected.expand(2, -1))


def test_one_scoring_path():
    """Candidates score the same alone, in a batch and among the whole catalogue."""
    scorer = NeuralScorer(NeuMF(40, 60))
    scorer.pairs = 64
    rows = scorer.user_rows(torch.arange(40))
    everything = scorer.score_all(rows)
    items = torch.randint(60, (40, 9))
    torch.testing.assert_close(scorer.score(rows, items), everything.gather(1, items), rtol=0, atol=1e-6)
    torch.testing.assert_close(scorer.score(rows[5:6], items[5:6]), everything[5:6].gather(1, items[5:6]))
