"""What evaluates and lists gives the same on every device."""

from typing import Any

import pytest
import torch

from ncf.config import TrainConfig
from ncf.data.unseen import UnseenItems
from ncf.model.neumf import NeuMF
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer, PopularityScorer
from ncf.ranking.topk import top_items
from ncf.training.trainer import Trainer

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
SHAPE: dict[str, Any] = {"factors": 8, "layers": (32, 16)}


def trained(planted) -> NeuMF:
    model = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    config = TrainConfig(batch_size=1000, compile=False, **SHAPE)
    trainer = Trainer(model, planted.interactions.sequence(), config, torch.device("cpu"), "train")
    for number in range(1, 9):
        trainer.epoch(number)
    return model


@pytest.fixture(scope="module")
def model(planted) -> NeuMF:
    return trained(planted)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("negatives", [30, "all"])
def test_evaluation(model, planted, device, negatives):
    eval_set = make_eval_set(planted, "test", negatives)
    expected = evaluate(NeuralScorer(model), eval_set, k=10)
    assert 0.3 < expected.hr < 1
    there = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    there.load_state_dict(model.state_dict())
    found = evaluate(NeuralScorer(there.to(device)), eval_set.to(torch.device(device)), k=10, users_per_batch=33)
    assert found.hr == pytest.approx(expected.hr, abs=0.01)  # a rounding may turn two items over
    assert found.ndcg == pytest.approx(expected.ndcg, abs=0.01)
    popular = PopularityScorer(planted.interactions.train_items.to(device), planted.n_items)
    baseline = evaluate(PopularityScorer(planted.interactions.train_items, planted.n_items), eval_set, k=10)
    assert evaluate(popular, eval_set.to(torch.device(device)), k=10) == baseline


def lists(model: NeuMF, users: torch.Tensor, seen: UnseenItems) -> tuple[torch.Tensor, torch.Tensor]:
    scorer = NeuralScorer(model)
    return top_items(scorer.score_all(scorer.user_rows(users)), 4, seen.seen(users))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_lists(model, planted, device):
    pairs = planted.interactions.seen_pairs()
    seen = UnseenItems(pairs[0], pairs[1], planted.n_users, planted.n_items)
    users = torch.arange(planted.n_users)
    items, scores = lists(model, users, seen)
    there = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    there.load_state_dict(model.state_dict())
    found = lists(there.to(device), users.to(device), seen.to(torch.device(device)))
    torch.testing.assert_close(found[1].cpu(), scores, rtol=0, atol=1e-4)
    assert (found[0].cpu() == items).float().mean() > 0.99


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_trainer_on_a_gpu_ends_where_one_on_a_cpu_does(planted, compiled):
    losses = {}
    for device in ("cpu", "cuda"):
        model = NeuMF(planted.n_users, planted.n_items, dropout=0.0, **SHAPE).to(device)
        config = TrainConfig(batch_size=1000, dropout=0.0, compile=compiled and device == "cuda", **SHAPE)
        trainer = Trainer(model, planted.interactions.sequence(), config, torch.device(device), "train")
        losses[device] = [trainer.epoch(number) for number in range(1, 16)]
    assert losses["cuda"][-1] == pytest.approx(losses["cpu"][-1], rel=0.1)
    assert losses["cuda"][-1] < 0.8 * losses["cuda"][0]
