"""One thread's share of a training step: micro-batches forward and backward, gradients summed in its own memory.

Shapes: b interactions with C candidates each, n = b * C samples, F factors, H the width of a hidden layer.
"""

import itertools

import torch
from torch import Tensor

from ncf.cpu import forward
from ncf.cpu.forward import Dropout, Forward, Weights, threshold_backward
from ncf.cpu.user_side import UserSide, grad_of
from ncf.model.batch import Batch
from ncf.model.dropout import keep_of_256
from ncf.model.losses import Loss
from ncf.model.neumf import NeuMF
from ncf.model.products import add_product, product_into

SHARED_LOGITS = 262_144  # of shared negatives in a micro-batch: 1 MiB in fp32
MICRO_BATCHES_PER_CHUNK = 8  # the user side is computed for so many at a time


class Worker:
    """Micro-batches of one thread, one after another."""

    def __init__(self, model: NeuMF, dtype: torch.dtype, loss: Loss, candidates: int, shared: int = 0) -> None:
        self.model, self.loss, self.made_for = model, loss, (candidates, shared, model.training)
        self.rows = max(1, min(forward.PAIRS // candidates, SHARED_LOGITS // max(1, shared)))  # in a micro-batch
        pairs, wide = self.rows * candidates, model.output.weight.dtype
        self.forward = Forward(model, dtype, pairs)
        self.users = UserSide(model, dtype, self.rows * MICRO_BATCHES_PER_CHUNK)
        self.logits, self.logit_grads = torch.empty(2, self.rows, candidates, dtype=wide).unbind()
        self.grads = [torch.empty_like(x) for x in self.forward.activations]
        # The first layer's gradient is summed, so it is needed in the sums' precision.
        self.first_grad = self.grads[0].to(wide) if self.grads else self.logits
        keep = keep_of_256(model.dropout if model.training else 0.0)
        self.scale = 256 / keep
        self.dropout = Dropout(keep, self.grads) if keep < 256 and self.grads else None
        # Sums over the batch. The items' are of a row per item: GMF's columns, and the projected first layer.
        self.item_gmf_grad = torch.zeros_like(model.gmf_part(model.item_embedding))
        self.item_mlp_grad = model.output.weight.new_zeros(model.n_items, model.layers[1] if model.layers else 0)
        self.weight_grads = [torch.zeros_like(layer.weight) for layer in model.mlp[1:]]
        self.bias_grads = [torch.zeros_like(layer.bias) for layer in model.mlp[1:]]
        self.output_mlp_grad = torch.zeros_like(model.mlp_part(model.output.weight[0]))
        self.output_bias_grad = torch.zeros_like(model.output.bias)
        self.sums = [self.item_gmf_grad, self.item_mlp_grad, *self.weight_grads, *self.bias_grads]
        self.sums += [self.output_mlp_grad, self.output_bias_grad]
        if model.item_bias is not None:
            self.item_bias_grad = torch.zeros_like(model.item_bias)
            self.sums.append(self.item_bias_grad)
        self.shared = SharedNegatives(model, self.rows, shared) if shared else None

    def start(self, weights: Weights, seed: int) -> None:
        """Begin a batch with the network as it is now; `seed` is for dropout."""
        self.weights = weights
        torch._foreach_zero_(self.sums)
        self.users.start()
        if self.dropout is not None:
            self.dropout.random.seed(seed)

    @torch.inference_mode()  # torch's least overhead per operation
    def run(self, batch: Batch) -> Tensor:
        """The loss sum [], float64, of this thread's rows of a batch; adds up their gradients."""
        loss = torch.zeros((), dtype=torch.float64)
        step = self.rows * MICRO_BATCHES_PER_CHUNK
        if self.shared is not None and batch.shared is not None:
            self.shared.start(batch.shared, self.weights)
        for at in range(0, len(batch.users), step):
            chunk = slice(at, at + step)
            part = batch.rows(chunk)
            rows = self.users.forward(part)
            of_rows = (rows, self.users.row_grads[: len(rows)], part.candidates)
            always = [torch.split(x, self.rows) for x in of_rows]
            perhaps = [
                itertools.repeat(None) if x is None else torch.split(x, self.rows)
                for x in (part.weights, part.shared_seen)
            ]
            for piece in zip(*always, *perhaps, strict=False):
                loss += self._micro_batch(*piece)
            self.users.backward(len(rows))
        if self.shared is not None:
            self.shared.add_to(self.item_gmf_grad, getattr(self, "item_bias_grad", None))
        return loss

    def finish(self) -> None:
        """Add the gradients to the parameters', but for those of the items."""
        self.users.finish()
        for layer, weight_grad, bias_grad in zip(self.model.mlp[1:], self.weight_grads, self.bias_grads, strict=True):
            grad_of(layer.weight).add_(weight_grad, alpha=self.scale)  # of scaled weights, so scaled once more
            grad_of(layer.bias).add_(bias_grad)
        self.model.mlp_part(grad_of(self.model.output.weight)[0]).add_(self.output_mlp_grad, alpha=self.scale)
        grad_of(self.model.output.bias).add_(self.output_bias_grad)

    def _micro_batch(
        self, rows: Tensor, row_grads: Tensor, candidates: Tensor, weights: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        """Forward and backward; the loss sum. Fills `row_grads` [b, F + H1], adds to the other gradients."""
        logits, logit_grads = self.logits[: len(rows)], self.logit_grads[: len(rows)]
        self.forward.score(self.weights, rows, candidates, logits, self.dropout)
        shared = None if self.shared is None else self.shared.score(rows, seen)
        loss = self.loss.value_and_grad(logits, weights, logit_grads, shared)
        self.output_bias_grad += logit_grads.sum()
        if self.model.item_bias is not None:
            self.item_bias_grad.index_add_(0, candidates.view(-1), logit_grads.view(-1))
        if self.model.factors:
            self._gmf_backward(rows, row_grads, candidates.view(-1), logit_grads.unsqueeze(2))
        if self.shared is not None and shared is not None:
            self.output_bias_grad += shared.sum()
            self.shared.backward(rows, row_grads, shared)
        if self.model.layers:
            self._mlp_backward(row_grads, candidates.view(-1), logit_grads.view(-1))
        return loss

    def _gmf_backward(self, rows: Tensor, row_grads: Tensor, items: Tensor, logit_grads: Tensor) -> None:
        scratch = self.forward.scratch[: len(items)]
        scratches = scratch.view(len(rows), -1, self.model.factors)
        gmf = self.forward.gmf[: len(items)].view_as(scratches)
        torch.sum(torch.mul(gmf, logit_grads, out=scratches), 1, out=self.model.gmf_part(row_grads))
        torch.mul(self.model.gmf_part(rows).unsqueeze(1), logit_grads, out=scratches)
        self.item_gmf_grad.index_add_(0, items, scratch)

    def _mlp_backward(self, row_grads: Tensor, items: Tensor, logit_grads: Tensor) -> None:
        n = len(items)
        activations, grads = ([x[:n] for x in both] for both in (self.forward.activations, self.grads))
        output = self.weights.output_mlp
        self.output_mlp_grad.addmv_(activations[-1].to(output.dtype).T, logit_grads)
        torch.outer(logit_grads.to(self.weights.dtype), output.to(self.weights.dtype), out=grads[-1])
        for layer in range(len(grads) - 1, 0, -1):
            grad = _through_relu(grads[layer], activations[layer])
            add_product(grad.T, activations[layer - 1], self.weight_grads[layer - 1])
            self.bias_grads[layer - 1] += grad.sum(0, dtype=output.dtype)
            product_into(grad, self.weights.hidden[layer - 1][0], None, grads[layer - 1])
        first = _through_relu(grads[0], activations[0])
        if first.dtype != self.first_grad.dtype:
            first = self.first_grad[:n].copy_(first)
        self.item_mlp_grad.index_add_(0, items, first)
        torch.sum(first.view(len(row_grads), -1, first.shape[1]), 1, out=self.model.mlp_part(row_grads))


class SharedNegatives:
    """GMF's scores of the items that are negatives of every row, as one matrix product; there is no MLP beside it."""

    def __init__(self, model: NeuMF, rows: int, shared: int) -> None:
        self.logits = model.output.weight.new_empty(rows, shared)
        self.item_grads = model.output.weight.new_zeros(shared, model.factors)
        self.bias_grads = model.output.weight.new_zeros(shared)

    def start(self, items: Tensor, weights: Weights) -> None:
        """Take the batch's shared `items` [N]."""
        self.items = items
        self.rows = weights.item_gmf.index_select(0, items)  # [N, F]
        bias = weights.bias.expand(len(items))
        self.bias = bias if weights.item_bias is None else bias + weights.item_bias[items]
        self.item_grads.zero_()
        self.bias_grads.zero_()

    def score(self, user_rows: Tensor, seen: Tensor | None) -> Tensor:
        """The logits [b, N], -inf where `seen` [b, N]."""
        logits = torch.addmm(self.bias, user_rows, self.rows.T, out=self.logits[: len(user_rows)])
        return logits if seen is None else logits.masked_fill_(seen, -torch.inf)

    def backward(self, user_rows: Tensor, row_grads: Tensor, logit_grads: Tensor) -> None:
        """Add to `row_grads` [b, F], and to the items' gradients."""
        row_grads.addmm_(logit_grads, self.rows)
        self.item_grads.addmm_(logit_grads.T, user_rows)
        self.bias_grads += logit_grads.sum(0)

    def add_to(self, item_grad: Tensor, bias_grad: Tensor | None) -> None:
        """Add the batch's gradients to those of all items [I, F], and of their biases [I]."""
        item_grad.index_add_(0, self.items, self.item_grads)
        if bias_grad is not None:
            bias_grad.index_add_(0, self.items, self.bias_grads)


def _through_relu(grad: Tensor, activation: Tensor) -> Tensor:
    """The gradient before ReLU and dropout's mask, in place of that after them: both let through what is above 0."""
    threshold_backward(grad, activation, 0, grad_input=grad)
    return grad
