"""Training in bf16 follows training in fp32, and evaluating in bf16 gives the metrics of fp32."""

import numpy as np
import pytest
import torch

from ncf.config import TrainConfig
from ncf.data.interactions import Sequence
from ncf.model.neumf import NeuMF
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer
from ncf.training.trainer import Trainer

EPOCHS, SEEDS = 6, (0, 1, 2)


def planted(n_users: int = 300, n_items: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    """Each user takes a third of the items of a third of the catalogue."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.where((torch.arange(n_users)[:, None] - torch.arange(n_items)) % 3 == 0, 1 / 3, 0.01)
    users, items = torch.nonzero(torch.rand(n_users, n_items, generator=generator) < chance, as_tuple=True)
    return users.int(), items.int()


def curve(precision: str, seed: int, dropout: float) -> torch.Tensor:
    users, items = planted()
    config = TrainConfig(
        factors=8, layers=(32, 16), batch_size=2000, seed=seed, precision=precision, dropout=dropout, compile=False
    )
    model = NeuMF(300, 120, factors=8, layers=(32, 16), dropout=dropout, seed=seed)
    trainer = Trainer(model, Sequence(users, items), config, torch.device("cpu"), "train")
    return torch.tensor([trainer.epoch(number) for number in range(1, EPOCHS + 1)])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.filterwarnings("ignore::ncf.errors.NcfWarning")
def test_curves_in_bf16_are_those_in_fp32_over_seeds(dropout):
    exact, rounded = (torch.stack([curve(p, seed, dropout) for seed in SEEDS]) for p in ("fp32", "bf16"))
    assert exact[:, -1].max() < 0.9 * exact[:, 0].min()  # there is something to learn, and it is learnt
    assert not torch.equal(exact, rounded)
    apart = (exact.mean(0) - rounded.mean(0)).abs()
    assert (apart < 0.01 * exact.mean(0) + 2 * exact.std(0)).all(), (exact, rounded)
    # The same seed draws the same batches and masks, so each pair of curves is closer than two seeds are.
    assert ((exact - rounded).abs() < 0.02 * exact).all(), (exact, rounded)


@pytest.mark.parametrize("negatives", [99, "all"])
@pytest.mark.filterwarnings("ignore::ncf.errors.NcfWarning")
def test_metrics_in_bf16_are_those_in_fp32_to_two_thousandths(make_dataset, negatives):
    rng = np.random.default_rng(0)
    clusters = [np.arange(group, 300, 6) for group in range(6)]
    dataset = make_dataset([rng.permutation(clusters[user % 6])[:12].tolist() for user in range(6000)], 300)
    config = TrainConfig(factors=8, layers=(32, 16), batch_size=20_000, compile=False)
    model = NeuMF(6000, 300, factors=8, layers=(32, 16), seed=0)
    trainer = Trainer(model, dataset.interactions.sequence(), config, torch.device("cpu"), "train")
    for number in range(1, 7):
        trainer.epoch(number)
    eval_set = make_eval_set(dataset, "test", negatives)
    exact, rounded = (evaluate(NeuralScorer(model, dtype), eval_set, k=10) for dtype in (torch.float32, torch.bfloat16))
    assert 0.2 < exact.hr < 0.95  # learnt, and not so well that rounding could not matter
    assert exact != rounded
    assert rounded.hr == pytest.approx(exact.hr, abs=2e-3)
    assert rounded.ndcg == pytest.approx(exact.ndcg, abs=2e-3)
