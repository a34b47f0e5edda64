"""The gradients of a batch on a CPU, forward and backward written out by hand.

Equal to autograd on `neumf.py` (by test, in float64), and faster for three reasons: micro-batches stay in the cache
from the gather to the scatter; no graph is kept; and dropout's mask is folded into the ReLU, since an activation is
above zero exactly where both let it through. docs/algorithms.md has the derivation.

Shapes: R = b * C samples in a micro-batch of b users, F factors, H widths of hidden layers.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.dropout import drop_mask, keep_of_256
from ncf.model.neumf import NeuMF, product
from ncf.workers import spread, worker_count

SMALLEST_PIECE = 1_024  # samples
MICRO_BATCH = 4_096  # samples: activations of some MB, about what a core has of the cache


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
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def __call__(
        self, users: Tensor, candidates: Tensor, weights: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The loss sum over a batch; its gradient replaces what the parameters' `.grad` held.

        `users` [B], ascending; `candidates` [B, C] with the positive in column 0; `weights` [B, C], or None for all
        1; `generator` seeds the dropout. Each core takes a range of users, so no two write to one user's gradient,
        and sums the rest into buffers of its own; those are added in a fixed order.
        """
        model = self.model
        table = model.item_table(self.dtype)
        with torch.no_grad():
            torch._foreach_zero_([_grad(parameter) for parameter in model.parameters()])
            pieces = [
                (_Piece(model, self.dtype, table.detach()), part, _new_seed(generator))
                for part in cut_by_user(users, self._pieces(candidates.numel()))
            ]
            losses = spread(lambda one: one[0].run(users, candidates, weights, one[1], one[2]), pieces)
            table_grad = pieces[0][0].finish()
            for piece, _, _ in pieces[1:]:
                table_grad += piece.finish()
        torch.autograd.backward(table, table_grad)  # through the projection, once
        return torch.stack(losses).sum()

    def _pieces(self, samples: int) -> int:
        """One a core, but none too small to be worth a thread's while."""
        return max(1, min(worker_count(), samples // SMALLEST_PIECE))


def cut_by_user(users: Tensor, pieces: int) -> list[slice]:
    """Ranges of about equal length that cover ascending `users` [B], none of them dividing a user."""
    cuts = [0]
    for k in range(1, pieces):
        near = len(users) * k // pieces
        cuts.append(int(torch.searchsorted(users, users[near - 1 : near], right=True)) if near else 0)
    cuts.append(len(users))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def _new_seed(generator: torch.Generator | None) -> int:
    return 0 if generator is None else int(torch.randint(2**62, (), generator=generator))


class _Piece:
    """One core's share of a batch: micro-batches one after another, gradients into buffers of its own."""

    def __init__(self, model: NeuMF, dtype: torch.dtype, table: Tensor) -> None:
        self.model, self.dtype = model, dtype
        self.table, self.table_grad = table, torch.zeros_like(table)
        # What dropout keeps of an activation is scaled by 256/keep; here the next layer's weights carry the factor.
        self.dropout = model.dropout if model.training else 0.0
        self.scale = 256 / keep_of_256(self.dropout)
        self.hidden = [
            _Hidden(
                (layer.weight * self.scale).to(dtype),
                layer.bias,
                torch.zeros_like(layer.weight),
                torch.zeros_like(layer.bias),
            )
            for layer in model.mlp[1:]
        ]
        self.output = model.output.weight[0].clone()  # [F + H]
        self.output[model.factors :] *= self.scale
        self.output_grad, self.bias_grad = torch.zeros_like(self.output), torch.zeros_like(model.output.bias)
        if model.layers:
            self.first_grad = torch.zeros_like(model.mlp[0].weight[:, : model.layers[0] // 2])
            self.first_bias_grad = torch.zeros_like(model.mlp[0].bias)

    def run(self, users: Tensor, candidates: Tensor, weights: Tensor | None, part: slice, seed: int) -> Tensor:
        """The loss sum of the rows in `part`; `seed` fixes their dropout."""
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=torch.float64)
        step = max(1, MICRO_BATCH // candidates.shape[1])
        for at in range(part.start, part.stop, step):
            rows = slice(at, min(at + step, part.stop))
            loss += self.add(users[rows], candidates[rows], None if weights is None else weights[rows], generator)
        return loss

    def finish(self) -> Tensor:
        """Add the gradients to the parameters', those of scaled weights turned into those of the weights.

        Returns the gradient of the item table, [I, F + H].
        """
        model = self.model
        for layer, own in zip(model.mlp[1:], self.hidden, strict=True):
            _grad(layer.weight).add_(own.weight_grad, alpha=self.scale)
            _grad(layer.bias).add_(own.bias_grad)
        if model.layers:
            _grad(model.mlp[0].weight)[:, : self.first_grad.shape[1]] += self.first_grad
            _grad(model.mlp[0].bias).add_(self.first_bias_grad)
        self.output_grad[model.factors :] *= self.scale
        _grad(model.output.weight)[0] += self.output_grad
        _grad(model.output.bias).add_(self.bias_grad)
        return self.table_grad

    def add(self, users: Tensor, candidates: Tensor, weights: Tensor | None, generator: torch.Generator) -> Tensor:
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
            logits = logits + (top.to(self.output.dtype) @ self.output[factors:]).view(candidates.shape)
        loss, logit_grad = _loss_and_grad(logits, weights)
        if factors:
            self._gmf_backward(user, item, weighted, logit_grad, user_grad, item_grad)
        if self.model.layers:
            self._mlp_backward(user, activations, logit_grad, user_grad, item_grad)
        self.bias_grad += logit_grad.sum()
        _grad(self.model.user_embedding).index_add_(0, users, user_grad)
        self.table_grad.index_add_(0, candidates.flatten(), item_grad.flatten(0, 1))
        return loss

    def _forward(self, user: Tensor, item: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Activations of every hidden layer, [R, H] each, without dropout's scale."""
        first = self.model.mlp[0]
        projection = product(user, first.weight[:, : user.shape[1]], first.bias, self.dtype)
        hidden = self._activate((item + projection.unsqueeze(1)).flatten(0, 1).to(self.dtype), generator)
        activations = [hidden]
        for layer in self.hidden:
            hidden = self._activate(product(hidden, layer.weight, layer.bias, self.dtype), generator)
            activations.append(hidden)
        return activations

    def _activate(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        hidden.relu_()
        if self.scale == 1:
            return hidden
        return hidden.mul_(drop_mask(hidden.shape, self.dropout, generator, hidden.dtype))

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
        flat = logit_grad.flatten()  # [R]
        self.output_grad[factors:] += activations[-1].to(flat.dtype).T @ flat
        grad = torch.outer(flat, self.output[factors:]).to(self.dtype)
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
        self.first_grad += projection_grad.T @ user[:, factors:]
        self.first_bias_grad += projection_grad.sum(0)
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
