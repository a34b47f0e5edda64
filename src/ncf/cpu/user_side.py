"""The user side of a training step on one thread: user rows forward, their gradients backward.

Shapes: b interactions, u different users among them, F factors, H1 the width of the first hidden layer, D that of a row
of the user table, L the history's length.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.model.products import product

bag_weight_grads = torch.ops.aten._embedding_bag_per_sample_weights_backward  # [b * L] of grad [b, D] and rows


class UserSide:
    """What a pass needs of users, [b, F + H1]: GMF's factors times the output weights, then Wu x + b1 of the MLP.

    Equal to `NeuMF.user_rows`. Without a history, a user who occurs several times is computed once.
    """

    def __init__(self, model: NeuMF, dtype: torch.dtype, capacity: int) -> None:
        self.model, self.dtype = model, dtype
        width = model.factors + (model.layers[1] if model.layers else 0)
        self.rows = model.output.weight.new_empty(capacity, width)
        self.row_grads = torch.empty_like(self.rows)  # the backward passes fill it
        self.output_grad = torch.zeros_like(model.gmf_part(model.output.weight[0]))
        self.sums = [self.output_grad]  # over the batch
        if model.layers:
            self.weight_grad = torch.zeros_like(model.user_half(model.mlp[0].weight))
            self.bias_grad = torch.zeros_like(model.mlp[0].bias)
            self.sums += [self.weight_grad, self.bias_grad]
        self.past = History(model) if model.history else None
        if self.past is not None:
            self.sums += self.past.sums

    def start(self) -> None:
        """Forget the gradients of the last batch."""
        torch._foreach_zero_(self.sums)

    def forward(self, batch: Batch) -> Tensor:
        """The rows [b, F + H1] of a batch's users, ascending; in memory that the next call reuses."""
        model, users = self.model, batch.users
        self.place: Tensor | None = None  # [b] of each interaction's user among the u different ones
        self.known: Tensor | None = None if batch.hidden is None else (~batch.hidden).unsqueeze(1)
        if self.past is None:
            self.user_ids, self.place = torch.unique_consecutive(users, return_inverse=True)
            self.inputs = model.user_embedding.index_select(0, self.user_ids)  # [u, D]
        else:
            self.user_ids = users
            self.inputs = model.user_embedding.index_select(0, users)  # [b, D]
            if self.known is not None:
                self.inputs *= self.known
            self.inputs += self.past.forward(batch)
        rows = self.rows[: len(users)] if self.place is None else self.rows.new_empty(len(self.user_ids), *self.width)
        output = model.gmf_part(model.output.weight[0])
        torch.mul(model.gmf_part(self.inputs), output, out=model.gmf_part(rows))
        if model.layers:
            weight, bias = model.user_half(model.mlp[0].weight), model.mlp[0].bias
            model.mlp_part(rows).copy_(product(model.mlp_part(self.inputs), weight, bias, self.dtype))
        if self.place is None:
            return rows
        return torch.index_select(rows, 0, self.place, out=self.rows[: len(users)])

    @property
    def width(self) -> tuple[int]:
        """F + H1."""
        return (self.rows.shape[1],)

    def backward(self, count: int) -> None:
        """Take the gradients of the batch's `count` rows, which lie in `row_grads`, to the parameters."""
        model, grads = self.model, self.row_grads[:count]
        if self.place is not None:
            grads = grads.new_zeros(len(self.user_ids), *self.width).index_add_(0, self.place, grads)
        gmf, mlp = model.gmf_part(grads), model.mlp_part(grads)
        grad = torch.empty_like(self.inputs)
        torch.mul(gmf, model.gmf_part(model.output.weight[0]), out=model.gmf_part(grad))
        self.output_grad += gmf.mul_(model.gmf_part(self.inputs)).sum(0)
        if model.layers:
            self.weight_grad.addmm_(mlp.T, model.mlp_part(self.inputs))
            self.bias_grad += mlp.sum(0)
            torch.mm(mlp, model.user_half(model.mlp[0].weight), out=model.mlp_part(grad))
        if self.past is not None:
            self.past.backward(grad)
        if self.known is not None:
            grad *= self.known
        grad_of(model.user_embedding).index_add_(0, self.user_ids, grad)

    def finish(self) -> None:
        """Add the gradients of what all users share to the parameters'."""
        model = self.model
        model.gmf_part(grad_of(model.output.weight)[0]).add_(self.output_grad)
        if model.layers:
            model.user_half(grad_of(model.mlp[0].weight)).add_(self.weight_grad)
            grad_of(model.mlp[0].bias).add_(self.bias_grad)
        if self.past is not None:
            self.past.finish()


class History:
    """The weighted sum of the rows of each history's items, [b, D]."""

    def __init__(self, model: NeuMF) -> None:
        self.model = model
        self.table_grad = torch.zeros_like(model.history_embedding)
        self.weights_grad = torch.zeros_like(model.history_weights)
        self.sums = [self.table_grad, self.weights_grad]

    def forward(self, batch: Batch) -> Tensor:
        """The sums of `batch.history` [b, L]."""
        if batch.history is None:
            raise ValueError("a network with a history needs that of every row")
        there = batch.history >= 0
        self.items = batch.history.clamp(min=0)
        self.weights = self.model.history_weights * there  # [b, L]
        self.there = there
        return functional.embedding_bag(
            self.items, self.model.history_embedding, per_sample_weights=self.weights, mode="sum"
        )

    def backward(self, grad: Tensor) -> None:
        """Add up the gradients, of the sums' `grad` [b, D]."""
        flat, length = self.items.flatten(), self.items.shape[1]
        row = torch.arange(len(grad), dtype=flat.dtype).repeat_interleave(length)
        starts = torch.arange(0, len(flat), length, dtype=flat.dtype)
        each = bag_weight_grads(grad, self.model.history_embedding, flat, starts, row, 0, -1).view(-1, length)
        each = (each * self.there).sum(0)
        self.weights_grad += each if len(self.weights_grad) > 1 else each.sum()
        # Transposed: the pairs by item, then one bag of the gradient's rows for each item.
        ordered, order = flat.sort()
        items, counts = torch.unique_consecutive(ordered, return_counts=True)
        sums = functional.embedding_bag(
            order.div(length, rounding_mode="floor"),
            grad,
            counts.cumsum(0) - counts,
            per_sample_weights=self.weights.flatten()[order],
            mode="sum",
        )
        self.table_grad.index_add_(0, items, sums)

    def finish(self) -> None:
        """Add the gradients to the parameters'."""
        grad_of(self.model.history_embedding).add_(self.table_grad)
        grad_of(self.model.history_weights).add_(self.weights_grad)


def grad_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient; it must have one."""
    if parameter.grad is None:
        raise AssertionError("a parameter without a gradient")
    return parameter.grad
