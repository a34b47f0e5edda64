"""Scores of candidates: the network's, and popularity's as the baseline to beat.

Everything that ranks (evaluation, recommendation) goes through a `Scorer`, so that there is one scoring path.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ncf.cpu.forward import PAIRS, Forward, Weights
from ncf.model.neumf import NeuMF
from ncf.threads import parallel_map

GPU_PAIRS = 1_048_576  # user-item pairs that a GPU scores at a time


class Scorer(Protocol):
    """Scores as fp32; higher is better. Users are given as rows, so that a user need not be in the user table."""

    def user_rows(self, users: Tensor, history: Tensor | None = None) -> Tensor:
        """What `score` needs of `users` [B] with `history` [B, L], a row each."""

    def score(self, rows: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for the users of `rows` [B, ...]."""

    def score_all(self, rows: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue."""


class NeuralScorer:
    """Scores of a trained network, as logits; the catalogue is projected once, here.

    On a CPU each thread takes chunks of its own; the scores equal those of `NeuMF.logits`, by test. The model is put
    into evaluation mode. A scorer is of the model as it is now: make another one when the model has been trained
    further.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.eval(), dtype
        self.on_cpu = model.output.weight.device.type == "cpu"
        self.pairs = PAIRS if self.on_cpu else GPU_PAIRS
        self.local = threading.local()  # each thread's Forward
        with torch.no_grad():
            if self.on_cpu:
                self.weights = Weights(model, dtype)
                self.weights.item_gmf = self.weights.item_gmf.contiguous()
            else:
                self.table = model.item_table(dtype)  # [I, F + H1]

    @torch.inference_mode(mode=False)  # whatever the caller's mode: threads write into one tensor
    def user_rows(self, users: Tensor, history: Tensor | None = None) -> Tensor:
        """Projected user rows [B, F + H1]; a network with a history needs that of every user."""
        if self.model.history and history is None:
            raise ValueError("a network with a history needs that of every user")
        with torch.no_grad():
            return self.model.user_rows(users, self.dtype, history)

    @torch.inference_mode(mode=False)
    def score(self, rows: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C]."""
        scores = torch.empty(items.shape, device=items.device)
        step = max(1, self.pairs // items.shape[1])

        def score_chunk(at: int) -> None:
            part = slice(at, at + step)
            if self.on_cpu:
                forward = self._forward(items[part].numel())
                forward.score(self.weights, rows[part], items[part].contiguous(), scores[part])
            else:
                table, bias = functional.embedding(items[part], self.table), self.model.bias_of(items[part])
                scores[part] = self.model.logits(rows[part], table, self.dtype, bias=bias)

        self._for_each(score_chunk, range(0, len(rows), step))
        return scores

    @torch.inference_mode(mode=False)
    def score_all(self, rows: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue."""
        n_items = self.model.n_items
        scores = torch.empty(len(rows), n_items, device=rows.device)
        item_step = min(self.pairs, n_items)
        user_step = max(1, self.pairs // item_step)

        def score_chunk(at: tuple[int, int]) -> None:
            some, chosen = slice(at[0], at[0] + user_step), slice(at[1], at[1] + item_step)
            if self.on_cpu:
                self._forward(self.pairs).score_block(self.weights, rows[some], chosen, scores[some, chosen])
            else:
                bias = None if self.model.item_bias is None else self.model.item_bias[chosen]
                scores[some, chosen] = self.model.logits(rows[some], self.table[chosen], self.dtype, bias=bias)

        starts = itertools.product(range(0, len(rows), user_step), range(0, n_items, item_step))
        self._for_each(score_chunk, list(starts))
        return scores

    def _for_each(self, function: Callable[[Any], None], starts: Sequence[Any]) -> None:
        if self.on_cpu:
            parallel_map(function, starts)
            return
        with torch.no_grad():
            for at in starts:
                function(at)

    def _forward(self, pairs: int) -> Forward:
        """The calling thread's own pass, for at least so many pairs."""
        held: Forward | None = getattr(self.local, "forward", None)
        if held is None or held.pairs < pairs:
            held = self.local.forward = Forward(self.model, self.dtype, max(pairs, self.pairs))
        return held


class PopularityScorer:
    """The same list for everyone: an item's score is its number of training interactions."""

    def __init__(self, train_items: Tensor, n_items: int) -> None:
        self.counts = torch.bincount(train_items.long(), minlength=n_items).float()

    def user_rows(self, users: Tensor, history: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as above
        """The users themselves, as nothing is needed of them."""
        return users

    def score(self, rows: Tensor, items: Tensor) -> Tensor:  # noqa: ARG002 - the same for every user
        """Scores [B, C] of `items` [B, C]."""
        return self.counts[items.long()]

    def score_all(self, rows: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue."""
        return self.counts.expand(len(rows), -1).clone()
