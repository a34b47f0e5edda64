"""What training minimises, in one place for autograd and for the hand-written CPU step.

The gradient is that of the loss *sum*, which is divided once, in fp32, by the normaliser: at initial weights most
gradients of a mean over a million samples are below Adam's eps and below what fp16 can hold.

A row has the logits of its candidates [B, C], the positive in column 0, and may have those of negatives that all rows
share [B, N]. A shared one that is no negative of a row has the logit -inf there.
"""

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.batch import Batch


class Loss(Protocol):
    """A loss sum over rows. `weights` [B, C] are 0 where there is no sample; None for all 1."""

    def value(self, logits: Tensor, weights: Tensor | None, shared: Tensor | None = None) -> Tensor:
        """The loss sum [], differentiable."""

    def value_and_grad(
        self, logits: Tensor, weights: Tensor | None, grad: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """The loss sum [] in float64; its derivative by `logits` goes into `grad` [B, C], by `shared` into `shared`."""

    def normaliser(self, batch: Batch) -> int | Tensor:
        """What the sum is divided by."""


class BinaryCrossEntropy:
    """Binary cross-entropy per sample (He et al. 2017, equation 7).

    softplus(x) is the loss of a negative, softplus(-x) = softplus(x) - x that of a positive.
    """

    def value(self, logits: Tensor, weights: Tensor | None, shared: Tensor | None = None) -> Tensor:
        """The loss sum []."""
        if shared is not None:
            raise ValueError("binary cross-entropy takes no shared negatives")
        loss = functional.softplus(logits)
        if weights is None:
            return loss.sum() - logits[:, 0].sum()
        return (loss * weights).sum() - (logits[:, 0] * weights[:, 0]).sum()

    def value_and_grad(
        self, logits: Tensor, weights: Tensor | None, grad: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """The loss sum [] in float64, and its derivative."""
        if shared is not None:
            raise ValueError("binary cross-entropy takes no shared negatives")
        torch.sigmoid(logits, out=grad)
        grad[:, 0] -= 1
        loss = functional.softplus(logits)
        loss[:, 0] -= logits[:, 0]
        if weights is not None:
            grad *= weights
            loss *= weights
        return loss.sum(dtype=torch.float64)

    def normaliser(self, batch: Batch) -> int | Tensor:
        """The number of samples."""
        return batch.samples


class SampledSoftmax:
    """Cross-entropy of the positive among itself and its negatives, which stand for all other items.

    Of M uniform negatives among I - 1 items each counts (I - 1) / M times, so that the sum over them estimates that
    over the catalogue (Jean et al., "On using very large target vocabulary for neural machine translation", ACL 2015,
    section 3).
    """

    def __init__(self, n_items: int, negatives: int) -> None:
        self.correction = math.log(max(1.0, (n_items - 1) / negatives))

    def value(self, logits: Tensor, weights: Tensor | None, shared: Tensor | None = None) -> Tensor:
        """The loss sum []."""
        positive, negatives = logits[:, :1], logits[:, 1:] + self.correction
        if weights is not None:
            negatives = negatives.masked_fill(weights[:, 1:] == 0, -torch.inf)
        parts = [positive, negatives] if shared is None else [positive, negatives, shared + self.correction]
        loss = torch.cat(parts, 1).logsumexp(1) - logits[:, 0]
        return loss.sum() if weights is None else (loss * weights[:, 0]).sum()

    def value_and_grad(
        self, logits: Tensor, weights: Tensor | None, grad: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """The loss sum [] in float64, and its derivative."""
        grad.copy_(logits)
        grad[:, 1:] += self.correction
        if weights is not None:
            grad[:, 1:].masked_fill_(weights[:, 1:] == 0, -torch.inf)
        largest = grad.amax(1, keepdim=True)
        if shared is not None:
            shared += self.correction
            largest = torch.maximum(largest, shared.amax(1, keepdim=True))
            shared.sub_(largest).exp_()
        loss = largest.squeeze(1) - logits[:, 0]
        grad.sub_(largest).exp_()
        total = grad.sum(1, keepdim=True)
        if shared is not None:
            total += shared.sum(1, keepdim=True)
        loss += total.squeeze(1).log()
        scale = total.reciprocal()
        if weights is not None:
            scale *= weights[:, :1]
            loss *= weights[:, 0]
        grad *= scale
        grad[:, 0] -= 1 if weights is None else weights[:, 0]
        if shared is not None:
            shared *= scale
        return loss.sum(dtype=torch.float64)

    def normaliser(self, batch: Batch) -> int | Tensor:
        """The number of rows."""
        return len(batch.users) if batch.weights is None else batch.weights[:, 0].sum()
