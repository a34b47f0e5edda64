"""What processes exchange in a step: one sum over one flat buffer.

    [gradients of the item table, hidden layers and output | the normaliser, in two parts | overflow]

Gradients of what is by user stay on their process.
"""

import torch
from torch import Tensor

from ncf.cpu.user_side import grad_of
from ncf.model.neumf import NeuMF
from ncf.parallel.group import ProcessGroup

UNIT = 4_096  # a count goes as count // UNIT and count % UNIT, whose sums fp32 holds exactly
TAIL = 3


class AllReduce:
    """Sums the gradients of what all processes hold, and with them the normaliser of the step's loss."""

    def __init__(self, model: NeuMF, group: ProcessGroup) -> None:
        self.group = group
        parameters = dict(model.named_parameters())
        self.own = [parameters[name] for name in parameters if name in model.BY_USER]
        self.shared = [parameters[name] for name in parameters if name not in model.BY_USER]
        sizes = [parameter.numel() for parameter in self.shared]
        self.buffer = self.shared[0].new_empty(sum(sizes) + TAIL)
        *parts, self.tail = torch.split(self.buffer, [*sizes, TAIL])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, self.shared, strict=True)]

    @torch.no_grad()
    def __call__(self, count: int | Tensor, *, check_overflow: bool) -> Tensor:
        """Replace the shared gradients by their sums over processes; the summed count [], float64, on the device.

        With `check_overflow`, an own gradient that is not finite makes a shared one so, on every process: fp16's loss
        scaling then skips the step on all of them.
        """
        grads = [grad_of(parameter) for parameter in self.shared]
        torch._foreach_copy_(self.views, grads)
        self.tail[0], self.tail[1], self.tail[2] = count // UNIT, count % UNIT, 0
        if check_overflow:
            self.tail[2] = torch.stack([(~torch.isfinite(grad_of(one))).any() for one in self.own]).any()
        self.group.all_reduce_(self.buffer)
        torch._foreach_copy_(grads, self.views)
        if check_overflow:
            grads[-1].masked_fill_(self.tail[2] > 0, torch.inf)
        total: Tensor = self.tail[0].double() * UNIT + self.tail[1].double()
        return total
