"""The gradients of a batch on a CPU, forward and backward written out by hand.

Equal to autograd on `neumf.py` (by test, in float64), and faster for three reasons: micro-batches stay in the cache
from the gather to the scatter; no graph is kept; and dropout's mask is folded into the ReLU, since an activation is
above zero exactly where both let it through. docs/algorithms.md has the derivation.

Shapes: R = b * C samples in a micro-batch of b users, F factors, H widths of hidden layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.dropout import drop_mask, keep_of_256
from ncf.model.neumf import NeuMF, product

MICRO_BATCH = 8_192  # samples: some 256 floats each, twice, about fill a core's share of the cache


@dataclass
class _Hidden:
    """One hidden layer after the first: its weights with dropout's scale in them, and their gradients."""

    weight: Tensor  # [H, H_before]
    bias: Tensor
    weight_grad: Tensor
    bias_grad: Tensor


class CpuGradients:
    """Computes the gradient of the loss sum into `.grad` of the model's parameters."""

    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model, dtype
        # What is kept of an activation is scaled by 256/keep; here the next layer's weights carry the factor.
        self.scale = 256 / keep_of_256(model.dropout)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def __call__(
        self, users: Tensor, candidates: Tensor, weights: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The loss sum over a batch; adds its gradient to the parameters' zeroed `.grad`.

        `users` [B] (fastest when sorted), `candidates` [B, C] with the positive in column 0, `weights` [B, C] or
        None for all 1; `generator` draws the dropout.
        """
        model = self.model
        torch._foreach_zero_([_grad(parameter) for parameter in model.parameters()])
        with torch.enable_grad():
            table = model.item_table(self.dtype)
        batch = _Batch(self, table.detach())
        loss = torch.zeros((), dtype=torch.float64)
        for part in _micro_batches(users, candidates, weights):
            loss += batch.add(*part, generator)
        batch.finish()
        torch.autograd.backward(table, batch.table_grad)  # through the projection, once
        return loss


def _micro_batches(
    users: Tensor, candidates: Tensor, weights: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    step = max(1, MICRO_BATCH // candidates.shape[1])
    for at in range(0, len(users), step):
        part = slice(at, at + step)
        yield users[part], candidates[part], None if weights is None else weights[part]


class _Batch:
    """What the micro-batches of one batch share."""

    def __init__(self, owner: CpuGradients, table: Tensor) -> None:
        model = owner.model
        self.model, self.dtype, self.scale = model, owner.dtype, owner.scale
        self.table, self.table_grad = table, torch.zeros_like(table)
        self.hidden = [
            _Hidden((layer.weight * self.scale).to(self.dtype), layer.bias, _grad(layer.weight), _grad(layer.bias))
            for layer in model.mlp[1:]
        ]
        self.output = model.output.weight[0].clone()  # [F + H]
        self.output[model.factors :] *= self.scale
        self.output_grad = torch.zeros_like(self.output)

    def finish(self) -> None:
        """Turn gradients of the scaled weights into those of the weights."""
        for layer in self.hidden:
            layer.weight_grad.mul_(self.scale)
        self.output_grad[self.model.factors :] *= self.scale
        _grad(self.model.output.weight)[0].copy_(self.output_grad)

    def add(
        self, users: Tensor, candidates: Tensor, weights: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The loss sum of a micro-batch; adds its gradients."""
        factors = self.model.factors
        user = functional.embedding(users, self.model.user_embedding)  # [b, D]
        item = functional.embedding(candidates, self.table)  # [b, C, F + H]
        user_grad, item_grad = torch.empty_like(user), torch.empty_like(item)
        logits = self.model.output.bias.expand(candidates.shape)
        if factors:
            weighted = user[:, :factors] * self.output[:factors]
            logits = logits + torch.bmm(item[..., :factors], weighted.unsqueeze(2)).squeeze(2)
        if self.model.layers:
            activations = self._forward(user[:, factors:], item[..., factors:], generator)
            top = activations[-1]
            logits = logits + product(top, self.output[None, factors:], None, self.dtype).view(candidates.shape)
        loss, logit_grad = _loss_and_grad(logits, weights)
        if factors:
            self._gmf_backward(user, item, weighted, logit_grad, user_grad, item_grad)
        if self.model.layers:
            self._mlp_backward(user, activations, logit_grad, user_grad, item_grad)
        _grad(self.model.output.bias).add_(logit_grad.sum())
        _grad(self.model.user_embedding).index_add_(0, users, user_grad)
        self.table_grad.index_add_(0, candidates.flatten(), item_grad.flatten(0, 1))
        return loss

    def _forward(self, user: Tensor, item: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """Activations of every hidden layer, [R, H] each, without dropout's scale."""
        first = self.model.mlp[0]
        projection = product(user, first.weight[:, : user.shape[1]], first.bias, self.dtype)
        hidden = self._activate((item + projection.unsqueeze(1)).flatten(0, 1).to(self.dtype), generator)
        activations = [hidden]
        for layer in self.hidden:
            hidden = self._activate(product(hidden, layer.weight, layer.bias, self.dtype), generator)
            activations.append(hidden)
        return activations

    def _activate(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        hidden.relu_()
        if self.scale == 1 or not self.model.training:
            return hidden
        return hidden.mul_(drop_mask(hidden.shape, self.model.dropout, generator))

    def _gmf_backward(
        self, user: Tensor, item: Tensor, weighted: Tensor, logit_grad: Tensor, user_grad: Tensor, item_grad: Tensor
    ) -> None:
        factors = self.model.factors
        item_grad[..., :factors] = logit_grad.unsqueeze(2) * weighted.unsqueeze(1)
        weighted_grad = torch.bmm(logit_grad.unsqueeze(1), item[..., :factors]).squeeze(1)  # [b, F]
        user_grad[:, :factors] = weighted_grad * self.output[:factors]
        self.output_grad[:factors] += (weighted_grad * user[:, :factors]).sum(0)

    def _mlp_backward(
        self, user: Tensor, activations: list[Tensor], logit_grad: Tensor, user_grad: Tensor, item_grad: Tensor
    ) -> None:
        factors = self.model.factors
        column = logit_grad.flatten().unsqueeze(1).to(self.dtype)  # [R, 1]
        self.output_grad[factors:] += product(activations[-1].T, column.T, None, self.dtype).squeeze(1)
        grad = column * self.output[factors:].to(self.dtype)
        for layer, above, below in zip(
            reversed(self.hidden), reversed(activations[1:]), reversed(activations[:-1]), strict=True
        ):
            grad = torch.ops.aten.threshold_backward(grad, above, 0)
            layer.weight_grad += product(grad.T, below.T, None, self.dtype)
            layer.bias_grad += grad.sum(0, dtype=layer.bias_grad.dtype)
            grad = product(grad, layer.weight.T, None, self.dtype)
        grad = torch.ops.aten.threshold_backward(grad, activations[0], 0).view(*logit_grad.shape, -1)  # [b, C, H]
        item_grad[..., factors:] = grad
        projection_grad = grad.sum(1, dtype=user.dtype)  # [b, H]
        first = self.model.mlp[0]
        half = user.shape[1] - factors
        _grad(first.weight)[:, :half] += projection_grad.T @ user[:, factors:]
        _grad(first.bias).add_(projection_grad.sum(0))
        user_grad[:, factors:] = projection_grad @ first.weight[:, :half]


def _loss_and_grad(logits: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of logits [b, C], column 0 positive: its weighted sum, and its gradient [b, C]."""
    loss = functional.softplus(logits)
    loss[:, 0] -= logits[:, 0]
    grad = torch.sigmoid(logits)
    grad[:, 0] -= 1
    if weights is not None:
        loss, grad = loss * weights, grad * weights
    return loss.sum(), grad


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise AssertionError("CpuGradients gives every parameter a gradient at its start")
    return parameter.grad
