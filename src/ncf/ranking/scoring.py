"""Scores of candidates, in chunks that fit the cache: the network's, and popularity's as the baseline to beat.

Everything that ranks (evaluation, recommendation) goes through a `Scorer`, so that there is one scoring path.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.neumf import NeuMF
from ncf.workers import spread

CHUNK = 4_096  # user-item pairs that a core scores at a time
GPU_CHUNK = 1_048_576  # and a GPU


class Scorer(Protocol):
    """Scores as fp32; higher is better."""

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""


class NeuralScorer:
    """Scores of a trained network, as logits; the item side of the first layer is computed once, here.

    On a CPU each core takes chunks of its own.
    """

    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.eval(), dtype
        with torch.no_grad():
            self.table = model.item_table(dtype)
        self.chunk = CHUNK if self.table.device.type == "cpu" else GPU_CHUNK

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""
        scores = torch.empty(items.shape, device=items.device)
        step = max(1, self.chunk // items.shape[1])

        def score_chunk(at: int) -> None:
            part = slice(at, at + step)
            rows = self.model.user_rows(users[part], self.dtype)
            scores[part] = self.model.logits(rows, functional.embedding(items[part], self.table), self.dtype)

        self._for_each(score_chunk, range(0, len(users), step))
        return scores

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""
        scores = torch.empty(len(users), len(self.table), device=users.device)
        item_step = min(self.chunk, len(self.table))
        user_step = max(1, self.chunk // item_step)

        def score_chunk(at: int) -> None:
            part = slice(at, at + user_step)
            rows = self.model.user_rows(users[part], self.dtype)
            for i in range(0, len(self.table), item_step):
                chosen = slice(i, i + item_step)
                scores[part, chosen] = self.model.logits(rows, self.table[chosen], self.dtype)

        self._for_each(score_chunk, range(0, len(users), user_step))
        return scores

    def _for_each(self, function: Callable[[int], None], starts: range) -> None:
        if self.table.device.type == "cpu":
            spread(function, starts)
            return
        with torch.no_grad():
            for at in starts:
                function(at)


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
