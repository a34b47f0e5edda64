"""Scores of candidates, in chunks that fit the cache: the network's, and popularity's as the baseline to beat.

Everything that ranks (evaluation, recommendation) goes through a `Scorer`, so that there is one scoring path.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.neumf import NeuMF, product_into
from ncf.workers import spread

CHUNK = 2_048  # user-item pairs that a core scores at a time
GPU_CHUNK = 1_048_576  # and a GPU


class Scorer(Protocol):
    """Scores as fp32; higher is better."""

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""


class NeuralScorer:
    """Scores of a trained network, as logits; the item side of the first layer is computed once, here.

    On a CPU each core takes chunks of its own, through the layers in buffers that stay in its cache; the scores equal
    those of `NeuMF.logits`, by test. The model is put into evaluation mode. A scorer is of the model as it is now: make
    another one when the model has been trained further.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.eval(), dtype
        with torch.no_grad():
            self.table = model.item_table(dtype)  # [I, F + H1]
        self.on_cpu = self.table.device.type == "cpu"
        self.buffers = threading.local()
        if self.on_cpu:
            self.gmf, self.items = (x.contiguous() for x in self.table.tensor_split([model.factors], 1))
            self.items = self.items.to(dtype)
            del self.table
            self.weights = [layer.weight.detach().to(dtype).T for layer in model.mlp[1:]]
            self.biases = [layer.bias.detach().to(dtype) for layer in model.mlp[1:]]

    @torch.inference_mode(mode=False)  # whatever the caller's mode: threads write into one tensor, and buffers are kept
    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""
        scores = torch.empty(items.shape, device=items.device)
        step = max(1, (CHUNK if self.on_cpu else GPU_CHUNK) // items.shape[1])
        with torch.no_grad():
            rows = self.model.user_rows(users, self.dtype)

        def score_chunk(at: int) -> None:
            part = slice(at, at + step)
            if self.on_cpu:
                self._score_candidates(rows[part], items[part], scores[part])
            else:
                scores[part] = self.model.logits(rows[part], functional.embedding(items[part], self.table), self.dtype)

        self._for_each(score_chunk, range(0, len(users), step))
        return scores

    @torch.inference_mode(mode=False)
    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""
        scores = torch.empty(len(users), self.model.n_items, device=users.device)
        chunk = CHUNK if self.on_cpu else GPU_CHUNK
        item_step = min(chunk, self.model.n_items)
        user_step = max(1, chunk // item_step)
        with torch.no_grad():
            rows = self.model.user_rows(users, self.dtype)

        def score_chunk(at: tuple[int, int]) -> None:
            some, chosen = slice(at[0], at[0] + user_step), slice(at[1], at[1] + item_step)
            if self.on_cpu:
                self._score_block(rows[some], chosen, scores[some, chosen])
            else:
                scores[some, chosen] = self.model.logits(rows[some], self.table[chosen], self.dtype)

        starts = itertools.product(range(0, len(users), user_step), range(0, self.model.n_items, item_step))
        self._for_each(score_chunk, list(starts))
        return scores

    def _for_each(self, function: Callable[[Any], None], starts: Sequence[Any]) -> None:
        if self.on_cpu:
            spread(function, starts)
            return
        with torch.no_grad():
            for at in starts:
                function(at)

    def _score_candidates(self, rows: Tensor, items: Tensor, scores: Tensor) -> None:
        """Scores [b, C] of `items` [b, C] for the users of `rows` [b, F + H1], into `scores`."""
        factors, flat = self.model.factors, items.flatten()
        scores.copy_(self.model.output.bias.expand(scores.shape))
        if factors:
            gmf = self._buffer("gmf", len(flat), factors, self.gmf.dtype)
            torch.index_select(self.gmf, 0, flat, out=gmf)
            gmf = gmf.view(*items.shape, factors)
            scores += gmf.mul_(rows[:, None, :factors]).sum(2)
        if self.model.layers:
            hidden = self._buffer(0, len(flat), self.items.shape[1], self.dtype)
            torch.index_select(self.items, 0, flat, out=hidden)
            hidden.view(*items.shape, -1).add_(rows[:, None, factors:].to(self.dtype))
            scores += self._through_layers(hidden).view(items.shape)

    def _score_block(self, rows: Tensor, chosen: slice, scores: Tensor) -> None:
        """Scores [b, c] of the items `chosen` for the users of `rows` [b, F + H1], into `scores`."""
        factors = self.model.factors
        scores.copy_(self.model.output.bias.expand(scores.shape))
        if factors:
            scores += rows[:, :factors] @ self.gmf[chosen].T
        if self.model.layers:
            items = self.items[chosen]
            hidden = self._buffer(0, scores.numel(), items.shape[1], self.dtype)
            torch.add(items, rows[:, None, factors:].to(self.dtype), out=hidden.view(*scores.shape, -1))
            scores += self._through_layers(hidden).view(scores.shape)

    def _through_layers(self, hidden: Tensor) -> Tensor:
        """The MLP's part of the logits, [R], of the first layer's sums [R, H1], which are overwritten."""
        hidden.relu_()
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            above = self._buffer(place, len(hidden), len(bias), self.dtype)
            product_into(hidden, weight, bias, above)
            hidden = above.relu_()
        output = self.model.output.weight[0, self.model.factors :]
        return hidden.to(output.dtype) @ output  # in fp32: 16 bits would make ties

    def _buffer(self, name: str | int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Memory of this thread for [rows, width], the same at every call."""
        held: Tensor | None = getattr(self.buffers, f"{name}", None)
        if held is None or len(held) < rows:
            held = torch.empty(max(rows, CHUNK), width, dtype=dtype)
            setattr(self.buffers, f"{name}", held)
        return held[:rows]


class PopularityScorer:
    """The same list for everyone: an item's score is its number of training interactions."""

    def __init__(self, train_items: Tensor, n_items: int) -> None:
        self.counts = torch.bincount(train_items.long(), minlength=n_items).float()

    def score(self, users: Tensor, items: Tensor) -> Tensor:  # noqa: ARG002 - the same for every user
        """Scores [B, C] of `items` [B, C]."""
        return self.counts[items.long()]

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue."""
        return self.counts.expand(len(users), -1).clone()
