"""The layers through buffers, on a CPU, equal the plain network."""

from typing import Any

import pytest
import torch

from ncf import threads as threads_module
from ncf.model.neumf import NeuMF
from ncf.ranking.scorer import NeuralScorer

N_USERS, N_ITEMS = 23, 70
SHAPES = [{}, {"factors": 0}, {"layers": ()}, {"factors": 5, "layers": (8, 6), "history": 3, "item_bias": True}]


def make_model(shape: dict) -> NeuMF:
    model = NeuMF(N_USERS, N_ITEMS, **shape).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch) -> int:
    monkeypatch.setattr(threads_module, "thread_count", lambda: request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 150, 10_000])  # below the catalogue, below a batch, above both
@torch.no_grad()
def test_scores_are_the_networks(shape, dtype, chunk, threads):
    model = make_model(shape)
    scorer = NeuralScorer(model, dtype)
    scorer.pairs = chunk
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.1}
    everyone, catalogue = torch.arange(N_USERS), torch.arange(N_ITEMS).expand(N_USERS, -1)
    past = torch.randint(-1, N_ITEMS, (N_USERS, 3)) if model.history else None
    expected = model(everyone, catalogue, dtype, history=past)
    user_rows = scorer.user_rows(everyone, past)
    for users in (everyone, everyone[:1], everyone):  # large, small and large again through the same buffers
        torch.testing.assert_close(scorer.score_all(user_rows[users]), expected[: len(users)], **close)
    items = torch.randint(N_ITEMS, (N_USERS, 9), generator=torch.Generator().manual_seed(0))
    for rows in (slice(None), slice(3), slice(None)):
        torch.testing.assert_close(scorer.score(user_rows[rows], items[rows]), expected.gather(1, items)[rows], **close)


def test_scores_are_the_same_inside_inference_mode_and_after_it(threads):
    def score() -> torch.Tensor:
        return scorer.score_all(scorer.user_rows(torch.arange(N_USERS)))

    with torch.inference_mode():
        scorer = NeuralScorer(make_model({}))
        scorer.pairs = 16
        inside = score()
    assert torch.equal(inside, score())
    with torch.inference_mode():
        assert torch.equal(inside, score())
