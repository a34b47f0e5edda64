"""What ranks tell each other in a step: one sum over one flat buffer.

    [gradients of the item table, hidden layers and output | number of samples, in two parts | overflow]

Users' gradients stay on their rank.
"""

import torch
from torch import Tensor

from ncf.distributed import Ranks
from ncf.model.neumf import NeuMF
from ncf.training.cpu_worker import grad_of

UNIT = 4_096  # a count goes as count // UNIT and count % UNIT, whose sums fp32 holds exactly
TAIL = 3


class Reduction:
    """Sums the gradients of what all ranks hold, and with them how many samples the step has."""

    def __init__(self, model: NeuMF, ranks: Ranks) -> None:
        self.ranks = ranks
        self.own = model.user_embedding
        self.shared = [parameter for parameter in model.parameters() if parameter is not self.own]
        sizes = [parameter.numel() for parameter in self.shared]
        self.buffer = self.own.new_empty(sum(sizes) + TAIL)
        *parts, self.tail = torch.split(self.buffer, [*sizes, TAIL])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, self.shared, strict=True)]

    @torch.no_grad()
    def __call__(self, count: int | Tensor, *, check_overflow: bool) -> Tensor:
        """Replace the shared gradients by their sums over ranks; the number of samples, float64, on the device.

        With `check_overflow`, an own gradient that is not finite makes a shared one so, on every rank: fp16's loss
        scaling then skips the step on all of them.
        """
        grads = [grad_of(parameter) for parameter in self.shared]
        torch._foreach_copy_(self.views, grads)
        self.tail[0], self.tail[1], self.tail[2] = count // UNIT, count % UNIT, 0
        if check_overflow:
            self.tail[2] = (~torch.isfinite(grad_of(self.own))).any()
        self.ranks.sum_(self.buffer)
        torch._foreach_copy_(grads, self.views)
        if check_overflow:
            grads[-1].masked_fill_(self.tail[2] > 0, torch.inf)
        total: Tensor = self.tail[0].double() * UNIT + self.tail[1].double()
        return total
