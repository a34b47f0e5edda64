import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf.model.losses import BinaryCrossEntropy, SampledSoftmax
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


def test_softmax_with_all_other_items_is_cross_entropy_over_the_catalogue() -> None:
    scores = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = SampledSoftmax(12, 11)
    expected = torch.nn.functional.cross_entropy(scores, torch.zeros(5, dtype=torch.int64), reduction="sum")
    torch.testing.assert_close(loss.value(scores, None), expected)
    torch.testing.assert_close(loss.value(scores[:, :4], None, scores[:, 4:]), expected)


def test_softmax_of_few_negatives_stands_for_all() -> None:
    """Of equal scores the loss is log I, however many negatives there are."""
    for negatives in (1, 7, 99):
        loss = SampledSoftmax(100, negatives)
        assert loss.value(torch.zeros(3, 1 + negatives), None).item() == pytest.approx(3 * math.log(100), rel=1e-6)


@given(st.integers(0, 50), st.booleans(), st.booleans())
def test_softmaxs_gradient_equals_autograd(seed: int, weighted: bool, with_shared: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(6, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    shared = (3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)).requires_grad_() if with_shared else None
    seen = torch.rand(6, 9, generator=generator) < 0.3
    weights = (torch.rand(6, 4, generator=generator) > 0.3).double() if weighted else None
    loss = SampledSoftmax(50, 12)
    masked = None if shared is None else shared.masked_fill(seen, -torch.inf)
    expected = loss.value(logits, weights, masked)
    expected.backward()
    grad = torch.empty(6, 4, dtype=torch.float64)
    by_hand = None if masked is None else masked.detach().clone()
    torch.testing.assert_close(loss.value_and_grad(logits.detach(), weights, grad, by_hand), expected.detach())
    torch.testing.assert_close(grad, logits.grad)
    if shared is not None and by_hand is not None:
        torch.testing.assert_close(by_hand, shared.grad)


def test_masked_negatives_and_rows_without_weight_have_no_gradient() -> None:
    shared = torch.tensor([[1.0, -torch.inf], [0.5, 2.0]])
    grad = torch.empty(2, 2)
    SampledSoftmax(9, 3).value_and_grad(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), grad, shared)
    assert shared[0, 1] == 0
    assert shared[1].tolist() == [0, 0]
    assert grad[0, 1] == grad[1].abs().sum() == 0
