"""What evaluates and lists gives the same on every device."""

import pytest
import torch

from ncf.config import TrainConfig
from ncf.data.negatives import Untouched
from ncf.model.neumf import NeuMF
from ncf.ranking.evaluate import evaluate
from ncf.ranking.exam import make_exam
from ncf.ranking.scoring import NeuralScorer, PopularityScorer
from ncf.ranking.topk import top_items
from ncf.training.trainer import Trainer

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
SHAPE = {"factors": 8, "layers": (32, 16)}


def trained(planted) -> NeuMF:
    model = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    config = TrainConfig(batch_size=1000, compile=False, **SHAPE)
    trainer = Trainer(model, planted.train_users, planted.train_items, config, torch.device("cpu"), "train")
    for number in range(1, 9):
        trainer.epoch(number)
    return model


@pytest.fixture(scope="module")
def model(planted) -> NeuMF:
    return trained(planted)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("negatives", [30, "all"])
def test_evaluation(model, planted, device, negatives):
    exam = make_exam(planted, "test", negatives)
    expected = evaluate(NeuralScorer(model), exam, k=10)
    assert 0.3 < expected.hr < 1
    there = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    there.load_state_dict(model.state_dict())
    found = evaluate(NeuralScorer(there.to(device)), exam.to(torch.device(device)), k=10, users_per_batch=33)
    assert found.hr == pytest.approx(expected.hr, abs=0.01)  # a rounding may turn two items over
    assert found.ndcg == pytest.approx(expected.ndcg, abs=0.01)
    popular = PopularityScorer(planted.train_items.to(device), planted.n_items)
    baseline = evaluate(PopularityScorer(planted.train_items, planted.n_items), exam, k=10)
    assert evaluate(popular, exam.to(torch.device(device)), k=10) == baseline


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_lists(model, planted, device):
    seen = Untouched(*planted.touched(), planted.n_users, planted.n_items)
    users = torch.arange(planted.n_users)
    items, scores = top_items(NeuralScorer(model), users, 4, seen)
    there = NeuMF(planted.n_users, planted.n_items, **SHAPE)
    there.load_state_dict(model.state_dict())
    found = top_items(NeuralScorer(there.to(device)), users.to(device), 4, seen.to(torch.device(device)))
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
        pairs = planted.train_users.to(device), planted.train_items.to(device)
        trainer = Trainer(model, *pairs, config, torch.device(device), "train")
        losses[device] = [trainer.epoch(number) for number in range(1, 16)]
    assert losses["cuda"][-1] == pytest.approx(losses["cpu"][-1], rel=0.1)
    assert losses["cuda"][-1] < 0.8 * losses["cuda"][0]
