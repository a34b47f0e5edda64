"""The forward pass of one thread, for training and for scoring, in memory that stays in its core's cache.

Equal to `NeuMF.logits`, by test. Shapes: b users with C candidates each, n = b * C pairs, F factors, H1 the width of
the first hidden layer, H that of any.
"""

import torch
from torch import Tensor

from ncf.model.dropout import RandomBytes
from ncf.model.neumf import NeuMF
from ncf.model.products import product, product_into

threshold_backward = torch.ops.aten.threshold_backward.grad_input  # grad where x > bound, else 0; in place
PAIRS = 2_048  # per pass: some 4 MB of activations at default sizes; 1,024 to 3,072 were equally fast


class Weights:
    """A network as it is now, in `dtype`, for any number of passes and threads; the catalogue is projected here, once.

    `scale` is what dropout multiplies the activations that it keeps by. The weights that read them carry it, so that
    activations stay unscaled.
    """

    @torch.no_grad()
    def __init__(self, model: NeuMF, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.dtype, self.bias = dtype, model.output.bias
        self.item_gmf = model.gmf_part(model.item_embedding)  # [I, F]
        self.item_mlp = self.item_gmf[:, :0]  # [I, H1]
        self.item_bias = model.item_bias  # [I], or None
        if model.layers:
            weight = model.item_half(model.mlp[0].weight)
            self.item_mlp = product(model.mlp_part(model.item_embedding), weight, None, dtype)
        self.hidden = [
            ((layer.weight * scale).to(dtype), layer.bias.to(dtype))  # [H, H before], [H]
            for layer in model.mlp[1:]
        ]
        self.output_mlp = model.mlp_part(model.output.weight[0]) * scale  # [H]


class Dropout:
    """Masks for hidden activations, from random bytes drawn for all layers at once; `numbers` is memory to work in."""

    def __init__(self, keep: int, numbers: list[Tensor]) -> None:
        self.keep, self.numbers = keep, numbers
        self.random = RandomBytes(sum(x.numel() for x in numbers))
        pieces = torch.split(self.random.bytes, [x.numel() for x in numbers])
        self.drawn = [piece.view_as(x) for piece, x in zip(pieces, numbers, strict=True)]

    def apply(self, x: Tensor, layer: int) -> None:
        """Keep an activation of `x` [n, H] where its byte, one of -128 .. 127, is among the `keep` largest."""
        number = self.numbers[layer][: len(x)].copy_(self.drawn[layer][: len(x)])
        threshold_backward(x, number, 127 - self.keep, grad_input=x)


class Forward:
    """Scores of at most `pairs` pairs at a time; `gmf` and `activations` keep what a backward pass needs."""

    def __init__(self, model: NeuMF, dtype: torch.dtype, pairs: int) -> None:
        self.model, self.pairs = model, pairs
        self.gmf = torch.empty(pairs, model.factors, dtype=model.output.weight.dtype)  # the items' rows
        self.scratch = torch.empty_like(self.gmf)
        self.activations = [torch.empty(pairs, width, dtype=dtype) for width in model.layers[1:]]

    def score(
        self, weights: Weights, rows: Tensor, items: Tensor, scores: Tensor, dropout: Dropout | None = None
    ) -> None:
        """Fill `scores` [b, C] with those of `items` [b, C], int64, for users given as `rows` [b, F + H1]."""
        n, flat = items.numel(), items.view(-1)
        scores.copy_(weights.bias.expand(scores.shape))
        if weights.item_bias is not None:
            scores += weights.item_bias[items]
        if self.model.factors:
            gmf = torch.index_select(weights.item_gmf, 0, flat, out=self.gmf[:n]).view(*items.shape, -1)
            user = self.model.gmf_part(rows).unsqueeze(1)
            scores += torch.mul(gmf, user, out=self.scratch[:n].view_as(gmf)).sum(2)
        if self.model.layers:
            first = torch.index_select(weights.item_mlp, 0, flat, out=self.activations[0][:n])
            first.view(*items.shape, -1).add_(self.model.mlp_part(rows).to(first.dtype).unsqueeze(1))
            scores += self._hidden_layers(weights, n, dropout).view(scores.shape)

    def score_block(self, weights: Weights, rows: Tensor, items: slice, scores: Tensor) -> None:
        """The same for c consecutive items, which all users share: fills `scores` [b, c]."""
        scores.copy_(weights.bias.expand(scores.shape))
        if weights.item_bias is not None:
            scores += weights.item_bias[items]
        if self.model.factors:
            scores += self.model.gmf_part(rows) @ weights.item_gmf[items].T
        if self.model.layers:
            n, first = scores.numel(), weights.item_mlp[items]
            user = self.model.mlp_part(rows).to(first.dtype).unsqueeze(1)
            torch.add(first, user, out=self.activations[0][:n].view(*scores.shape, -1))
            scores += self._hidden_layers(weights, n, None).view(scores.shape)

    def _hidden_layers(self, weights: Weights, n: int, dropout: Dropout | None) -> Tensor:
        """The MLP's part of the scores, [n], of the first layer's sums, which lie in `activations[0]`."""
        hidden = self.activations[0][:n].relu_()
        if dropout is not None:
            dropout.random.advance()
            dropout.apply(hidden, 0)
        for layer, (weight, bias) in enumerate(weights.hidden, 1):
            above = self.activations[layer][:n]
            product_into(hidden, weight.T, bias, above)
            hidden = above.relu_()
            if dropout is not None:
                dropout.apply(hidden, layer)
        return hidden.to(weights.output_mlp.dtype) @ weights.output_mlp  # in fp32: 16 bits would make ties
