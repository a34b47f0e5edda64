"""The user side of a training step on one thread: user rows forward, their gradients backward.

Shapes: b interactions, u different users among them, F factors, H1 the width of the first hidden layer.
"""

import torch
from torch import Tensor

from ncf.model.neumf import NeuMF
from ncf.model.products import product


class UserSide:
    """What a pass needs of users, [b, F + H1]: GMF's factors times the output weights, then Wu x + b1 of the MLP.

    Equal to `NeuMF.user_rows`. A user who occurs several times is computed once.
    """

    def __init__(self, model: NeuMF, dtype: torch.dtype, capacity: int) -> None:
        self.model, self.dtype = model, dtype
        width = model.factors + (model.layers[1] if model.layers else 0)
        self.rows = model.output.weight.new_empty(capacity, width)
        self.row_grads = torch.empty_like(self.rows)  # the backward passes fill it
        self.output_grad = torch.zeros_like(model.gmf_part(model.output.weight[0]))
        if model.layers:
            self.weight_grad = torch.zeros_like(model.user_half(model.mlp[0].weight))
            self.bias_grad = torch.zeros_like(model.mlp[0].bias)

    def start(self) -> None:
        """Forget the gradients of the last batch."""
        self.output_grad.zero_()
        if self.model.layers:
            self.weight_grad.zero_()
            self.bias_grad.zero_()

    def forward(self, users: Tensor) -> Tensor:
        """The rows [b, F + H1] of `users` [b], ascending; in memory that the next call reuses."""
        model = self.model
        place: Tensor
        self.user_ids, place = torch.unique_consecutive(users, return_inverse=True)
        self.place = place  # [b] of each interaction's user among the u different ones
        self.table_rows = model.user_embedding.index_select(0, self.user_ids)  # [u, D]
        rows = self.rows.new_empty(len(self.user_ids), self.rows.shape[1])
        output = model.gmf_part(model.output.weight[0])
        torch.mul(model.gmf_part(self.table_rows), output, out=model.gmf_part(rows))
        if model.layers:
            weight, bias = model.user_half(model.mlp[0].weight), model.mlp[0].bias
            model.mlp_part(rows).copy_(product(model.mlp_part(self.table_rows), weight, bias, self.dtype))
        return torch.index_select(rows, 0, place, out=self.rows[: len(users)])

    def backward(self) -> None:
        """Take the gradients of the rows, which lie in `row_grads`, to the parameters."""
        model = self.model
        sums = self.row_grads.new_zeros(len(self.user_ids), self.row_grads.shape[1])
        sums.index_add_(0, self.place, self.row_grads[: len(self.place)])
        gmf, mlp = model.gmf_part(sums), model.mlp_part(sums)
        grad = torch.empty_like(self.table_rows)
        torch.mul(gmf, model.gmf_part(model.output.weight[0]), out=model.gmf_part(grad))
        self.output_grad += gmf.mul_(model.gmf_part(self.table_rows)).sum(0)
        if model.layers:
            self.weight_grad.addmm_(mlp.T, model.mlp_part(self.table_rows))
            self.bias_grad += mlp.sum(0)
            torch.mm(mlp, model.user_half(model.mlp[0].weight), out=model.mlp_part(grad))
        grad_of(model.user_embedding).index_add_(0, self.user_ids, grad)

    def finish(self) -> None:
        """Add the gradients of what all users share to the parameters'."""
        model = self.model
        model.gmf_part(grad_of(model.output.weight)[0]).add_(self.output_grad)
        if model.layers:
            model.user_half(grad_of(model.mlp[0].weight)).add_(self.weight_grad)
            grad_of(model.mlp[0].bias).add_(self.bias_grad)


def grad_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient; it must have one."""
    if parameter.grad is None:
        raise AssertionError("a parameter without a gradient")
    return parameter.grad
