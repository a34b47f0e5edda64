"""One core's share of a batch: micro-batches, forward and backward, gradients summed into buffers of its own.

Shapes: R = b * C samples in a micro-batch of b interactions, F factors, H the width of a hidden layer, H1 of the first,
D the width of an embedding.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from ncf.model.dropout import RandomBytes, keep_of_256
from ncf.model.neumf import NeuMF, product, product_into

MICRO_BATCH = 2_048  # samples: some 4 MB of activations at default sizes; 1,024 to 3,072 were equally fast
MICRO_BATCHES_A_CHUNK = 8  # users of that many are projected at a time
threshold_backward = torch.ops.aten.threshold_backward.grad_input  # grad where x > bound, else 0; in place


class _Hidden:
    """A hidden layer in a worker: its weights, and the sums of its gradients.

    Of the first hidden layer only the half that meets the user lies here.
    """

    def __init__(self, layer: nn.Linear, weight: Tensor) -> None:
        self.layer, self.weight = layer, weight  # [H, H before]
        self.weight_grad, self.bias_grad = torch.zeros_like(weight), torch.zeros_like(layer.bias)

    def start(self, scale: float, dtype: torch.dtype) -> None:
        """Take the weights as they are now, times `scale`; forget the gradients."""
        self.scale = scale
        self.scaled, self.bias = (self.weight * scale).to(dtype), self.layer.bias.to(dtype)
        self.weight_grad.zero_()
        self.bias_grad.zero_()

    def finish(self) -> None:
        """Add the gradients to the layer's: of scaled weights, so scaled once more."""
        grad_of(self.layer.weight)[:, : self.weight.shape[1]].add_(self.weight_grad, alpha=self.scale)
        grad_of(self.layer.bias).add_(self.bias_grad)


class _Buffers:
    """What a micro-batch of b interactions with C candidates is computed in; R = b * C."""

    def __init__(self, model: NeuMF, b: int, candidates: int, dtype: torch.dtype) -> None:
        factors, widths, wide = model.factors, model.layers[1:], model.output.weight.dtype
        rows = b * candidates
        self.item, self.scratch = torch.empty(2, rows, factors, dtype=wide).unbind()  # [R, F] of GMF
        self.items, self.scratches = (x.view(b, candidates, factors) for x in (self.item, self.scratch))
        # Hidden layers' activations [R, H], without dropout's scale; the first's is made anew.
        self.activation = [torch.empty(rows, width, dtype=dtype) for width in widths]
        self.grad = [torch.empty(rows, width, dtype=dtype) for width in widths]
        # Dropout's random bytes, and the same as numbers: before there are gradients, in their memory.
        self.random = RandomBytes(rows * sum(widths))
        self.drawn = [x.view(rows, -1) for x in torch.split(self.random.bytes, [rows * width for width in widths])]
        self.number = self.grad
        if widths:  # the first layer's gradient is summed, so it is needed in the sum's precision
            self.first_grad = self.grad[0] if dtype == wide else torch.empty(rows, widths[0], dtype=wide)
            self.first_grads = self.first_grad.view(b, candidates, -1)
            self.first = self.activation[0].view(b, candidates, -1)


class Worker:
    """One core's share of batches: micro-batches one after another, gradients into buffers of its own.

    A user's side is computed once for a chunk of micro-batches, however many interactions the user has there.
    """

    def __init__(self, model: NeuMF, dtype: torch.dtype, candidates: int) -> None:
        self.model, self.dtype, self.candidates = model, dtype, candidates
        self.rows = max(1, MICRO_BATCH // candidates)  # interactions in a micro-batch
        self.buffers = _Buffers(model, self.rows, candidates, dtype)
        self.hidden = [
            _Hidden(layer, layer.weight if place else layer.weight[:, : model.layers[0] // 2])
            for place, layer in enumerate(model.mlp)
        ]
        self.gmf_table = model.item_embedding[:, : model.factors]
        self.gmf_grad = torch.zeros_like(self.gmf_table)
        self.output_grad = torch.zeros_like(model.output.weight[0])
        self.gmf_output_grad, self.mlp_output_grad = (
            self.output_grad[: model.factors],
            self.output_grad[model.factors :],
        )
        self.projection_grad = model.output.weight.new_zeros(model.n_items, model.layers[1] if model.layers else 0)

    def start(self, projection: Tensor, seed: int) -> None:
        """Begin a batch: the weights as they are now, `projection` [I, H1] of the items, `seed` for dropout."""
        self.seed = seed
        self.projection = projection
        # What dropout keeps of an activation is scaled by 256/keep; here the next layer's weights carry the factor.
        self.keep = keep_of_256(self.model.dropout if self.model.training else 0.0)
        self.scale = 256 / self.keep
        for place, hidden in enumerate(self.hidden):
            hidden.start(self.scale if place else 1.0, self.dtype)
        output, factors = self.model.output.weight[0], self.model.factors
        self.gmf_output, self.mlp_output = output[:factors], output[factors:] * self.scale
        for total in (self.gmf_grad, self.output_grad, self.projection_grad):
            total.zero_()

    @torch.inference_mode()  # torch's least overhead an operation
    def run(self, users: Tensor, candidates: Tensor, weights: Tensor | None) -> Tensor:
        """The loss sum of this worker's rows of a batch; adds up their gradients."""
        if self.keep < 256:
            self.buffers.random.seed(self.seed)
        logits, logit_grad = torch.empty(2, *candidates.shape, dtype=self.output_grad.dtype).unbind()
        for at in range(0, len(users), self.rows * MICRO_BATCHES_A_CHUNK):
            chunk = slice(at, at + self.rows * MICRO_BATCHES_A_CHUNK)
            place = self._take_users(users[chunk])
            parts = [torch.split(x, self.rows) for x in (place, candidates[chunk], logits[chunk], logit_grad[chunk])]
            weighing = itertools.repeat(None) if weights is None else torch.split(weights[chunk], self.rows)
            for part in zip(*parts, weighing, strict=False):
                self._add(self._buffers_for(len(part[0]), candidates.shape[1]), *part)
            self._give_users()
        self.output_bias_grad = logit_grad.sum()
        loss = functional.softplus(logits)
        loss[:, 0] -= logits[:, 0]
        return (loss if weights is None else loss * weights).sum(dtype=torch.float64)

    def _buffers_for(self, b: int, candidates: int) -> _Buffers:
        if b == self.rows:
            return self.buffers
        rest = _Buffers(self.model, b, candidates, self.dtype)  # the last micro-batch is shorter
        if self.keep < 256:
            rest.random.seed(self.seed + 1)
        return rest

    def finish(self) -> None:
        """Add the gradients to the parameters', but for those of the items."""
        for hidden in self.hidden:
            hidden.finish()
        self.mlp_output_grad *= self.scale
        grad_of(self.model.output.weight)[0] += self.output_grad
        grad_of(self.model.output.bias).add_(self.output_bias_grad)

    def _take_users(self, users: Tensor) -> Tensor:
        """Make ready what the micro-batches need of `users` [b], ascending; the place [b] of each among them."""
        factors = self.model.factors
        place: Tensor
        self.user_ids, place = torch.unique_consecutive(users, return_inverse=True)
        self.user = self.model.user_embedding.index_select(0, self.user_ids)  # [u, D], for u different users
        self.weighted = self.user[:, :factors] * self.gmf_output  # [u, F]
        self.weighted_grad = torch.zeros_like(self.weighted)
        if self.hidden:
            first = self.hidden[0]
            self.user_projection = product(self.user[:, factors:], first.scaled, first.bias, self.dtype)  # [u, H1]
            self.user_projection_grad = torch.zeros_like(self.user_projection, dtype=self.user.dtype)
        return place

    def _give_users(self) -> None:
        """Take the gradients that the micro-batches left for the users to their rows."""
        factors = self.model.factors
        user_grad = torch.empty_like(self.user)
        torch.mul(self.weighted_grad, self.gmf_output, out=user_grad[:, :factors])
        self.gmf_output_grad += self.weighted_grad.mul_(self.user[:, :factors]).sum(0)
        if self.hidden:
            first = self.hidden[0]
            first.weight_grad.addmm_(self.user_projection_grad.T, self.user[:, factors:])
            first.bias_grad += self.user_projection_grad.sum(0)
            torch.mm(self.user_projection_grad, first.weight, out=user_grad[:, factors:])
        grad_of(self.model.user_embedding).index_add_(0, self.user_ids, user_grad)

    def _add(
        self,
        at: _Buffers,
        place: Tensor,
        candidates: Tensor,
        logits: Tensor,
        logit_grad: Tensor,
        weights: Tensor | None,
    ) -> None:
        """Forward and backward of a micro-batch: fills `logits` and `logit_grad` [b, C], adds to the gradients."""
        items = candidates.view(-1)
        logits.copy_(self.model.output.bias.expand(candidates.shape))
        if self.model.factors:
            weighted = self._gmf_forward(at, place, items, logits)
        if self.hidden:
            self._mlp_forward(at, place, candidates, logits.view(-1))
        torch.sigmoid(logits, out=logit_grad)  # of binary cross-entropy with column 0 positive
        logit_grad[:, 0] -= 1
        if weights is not None:
            logit_grad *= weights
        if self.model.factors:
            self._gmf_backward(at, place, items, weighted, logit_grad.unsqueeze(2))
        if self.hidden:
            self._mlp_backward(at, place, items, logit_grad.view(-1))

    def _gmf_forward(self, at: _Buffers, place: Tensor, items: Tensor, logits: Tensor) -> Tensor:
        """Add GMF's part to `logits`; the users' factors times the output weights, [b, 1, F]."""
        torch.index_select(self.gmf_table, 0, items, out=at.item)
        weighted = self.weighted.index_select(0, place).unsqueeze(1)
        logits += torch.mul(at.items, weighted, out=at.scratches).sum(2)
        return weighted

    def _gmf_backward(self, at: _Buffers, place: Tensor, items: Tensor, weighted: Tensor, logit_grad: Tensor) -> None:
        self.weighted_grad.index_add_(0, place, torch.mul(at.items, logit_grad, out=at.scratches).sum(1))
        torch.mul(weighted, logit_grad, out=at.scratches)
        self.gmf_grad.index_add_(0, items, at.scratch)

    def _mlp_forward(self, at: _Buffers, place: Tensor, candidates: Tensor, logits: Tensor) -> None:
        """Add the MLP's part to `logits` [R]; leaves the activations in the buffers."""
        torch.index_select(self.projection, 0, candidates.view(-1), out=at.activation[0])
        at.first.add_(self.user_projection.index_select(0, place).unsqueeze(1))
        if self.keep < 256:
            at.random.advance()
        self._activate(at, 0)
        for layer, hidden in enumerate(self.hidden[1:], 1):
            product_into(at.activation[layer - 1], hidden.scaled.T, hidden.bias, at.activation[layer])
            self._activate(at, layer)
        logits.addmv_(at.activation[-1].to(logits.dtype), self.mlp_output)

    def _activate(self, at: _Buffers, layer: int) -> None:
        """ReLU and dropout's mask, in place."""
        x = at.activation[layer].relu_()
        if self.keep < 256:
            number = at.number[layer].copy_(at.drawn[layer])  # -128 .. 127, each as likely
            threshold_backward(x, number, 127 - self.keep, grad_input=x)

    def _mlp_backward(self, at: _Buffers, place: Tensor, items: Tensor, logit_grad: Tensor) -> None:
        self.mlp_output_grad.addmv_(at.activation[-1].to(logit_grad.dtype).T, logit_grad)
        torch.outer(logit_grad.to(self.dtype), self.mlp_output.to(self.dtype), out=at.grad[-1])
        for layer in range(len(self.hidden) - 1, 0, -1):
            hidden, grad = self.hidden[layer], self._through_activation(at, layer)
            _add_product(grad.T, at.activation[layer - 1], hidden.weight_grad)
            hidden.bias_grad += grad.sum(0, dtype=hidden.bias_grad.dtype)
            product_into(grad, hidden.scaled, None, at.grad[layer - 1])
        grad = self._through_activation(at, 0)
        if at.first_grad is not grad:
            at.first_grad.copy_(grad)
        self.projection_grad.index_add_(0, items, at.first_grad)
        self.user_projection_grad.index_add_(0, place, at.first_grads.sum(1))

    @staticmethod
    def _through_activation(at: _Buffers, layer: int) -> Tensor:
        """The gradient before ReLU and mask, in place of that after them."""
        grad = at.grad[layer]
        threshold_backward(grad, at.activation[layer], 0, grad_input=grad)
        return grad


def _add_product(x: Tensor, y: Tensor, total: Tensor) -> None:
    """Add x @ y to `total`, whose precision may be higher than theirs."""
    if x.dtype == total.dtype:
        total.addmm_(x, y)
    else:
        total += product(x, y.T, None, x.dtype)


def grad_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient; it must have one."""
    if parameter.grad is None:
        raise AssertionError("a parameter without a gradient")
    return parameter.grad
