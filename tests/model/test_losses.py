import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.model.losses import BinaryCrossEntropy
from ncf.model.neumf import NeuMF

LOSS = BinaryCrossEntropy()


def test_the_loss_is_binary_cross_entropy() -> None:
    logits = torch.tensor([[0.3, -1.2, 2.0], [-0.7, 0.1, 0.0]], dtype=torch.float64)
    labels = torch.tensor([[1.0, 0, 0]] * 2).double()
    expected = -(labels * torch.sigmoid(logits).log() + (1 - labels) * (1 - torch.sigmoid(logits)).log()).sum()
    torch.testing.assert_close(LOSS.value(logits, None), expected)


def test_an_extreme_logit_gives_a_finite_loss() -> None:
    """Sigmoid and then a logarithm would be infinite here; the loss is computed from the logits."""
    logits = torch.full((1, 2), 1e4)
    assert LOSS.value(logits, None).item() == pytest.approx(1e4)
    assert LOSS.value_and_grad(logits, None, torch.empty_like(logits)).item() == pytest.approx(1e4)


@given(st.integers(0, 50), st.booleans())
def test_value_and_gradient_equal_autograd(seed: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(6, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    weights = (torch.rand(6, 4, generator=generator) > 0.3).double() if weighted else None
    expected = LOSS.value(logits, weights)
    expected.backward()
    grad = torch.empty(6, 4, dtype=torch.float64)
    torch.testing.assert_close(LOSS.value_and_grad(logits.detach(), weights, grad), expected.detach())
    torch.testing.assert_close(grad, logits.grad)


def test_the_first_loss_is_that_of_a_coin() -> None:
    logits = NeuMF(50, 50).eval()(torch.arange(50), torch.randint(50, (50, 5)))
    assert LOSS.value(logits, None).item() / 250 == pytest.approx(math.log(2), rel=0.02)
