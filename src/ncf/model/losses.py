"""What training minimises, in one place for autograd and for the hand-written CPU step.

The gradient is that of the loss *sum*, which is divided once, in fp32, by the normaliser: at initial weights most
gradients of a mean over a million samples are below Adam's eps and below what fp16 can hold.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.batch import Batch


class BinaryCrossEntropy:
    """Binary cross-entropy per sample, of logits [B, C] with the positive in column 0 (He et al. 2017, equation 7).

    softplus(x) is the loss of a negative, softplus(-x) = softplus(x) - x that of a positive.
    """

    def value(self, logits: Tensor, weights: Tensor | None) -> Tensor:
        """The loss sum [], differentiable; `weights` [B, C] is 0 where there is no sample, None for all 1."""
        loss = functional.softplus(logits)
        if weights is None:
            return loss.sum() - logits[:, 0].sum()
        return (loss * weights).sum() - (logits[:, 0] * weights[:, 0]).sum()

    def value_and_grad(self, logits: Tensor, weights: Tensor | None, grad: Tensor) -> Tensor:
        """The loss sum [] in float64; its derivative by `logits` goes into `grad` [B, C]."""
        torch.sigmoid(logits, out=grad)
        grad[:, 0] -= 1
        loss = functional.softplus(logits)
        loss[:, 0] -= logits[:, 0]
        if weights is not None:
            grad *= weights
            loss *= weights
        return loss.sum(dtype=torch.float64)

    def normaliser(self, batch: Batch) -> int | Tensor:
        """What the sum is divided by: the number of samples."""
        return batch.samples
