"""Scores of candidates, in chunks that fit the cache: the network's, and popularity's as the baseline to beat.

Everything that ranks (evaluation, recommendation) goes through a `Scorer`, so that there is one scoring path.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ncf.model.neumf import NeuMF

CHUNK = 16_384  # user-item pairs scored at a time


class Scorer(Protocol):
    """Scores as fp32; higher is better."""

    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""


class NeuralScorer:
    """Scores of a trained network, as logits; the item side of the first layer is computed once, here."""

    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.eval(), dtype
        with torch.no_grad():
            self.table = model.item_table(dtype)

    @torch.no_grad()
    def score(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for `users` [B]."""
        step = max(1, CHUNK // items.shape[1])
        rows = self.model.user_rows(users, self.dtype)
        chunks = [
            self.model.logits(rows[at : at + step], functional.embedding(items[at : at + step], self.table), self.dtype)
            for at in range(0, len(users), step)
        ]
        return torch.cat(chunks) if chunks else torch.empty(items.shape, device=items.device)

    def score_all(self, users: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for `users` [B]."""
        with torch.no_grad():
            return self.score_rows(self.model.user_rows(users, self.dtype))

    @torch.no_grad()
    def score_rows(self, rows: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue for users given as `NeuMF.user_rows` [B, F + H]."""
        scores = torch.empty(len(rows), len(self.table), device=rows.device)
        item_step = min(CHUNK, len(self.table))
        user_step = max(1, CHUNK // item_step)
        for u in range(0, len(rows), user_step):
            for i in range(0, len(self.table), item_step):
                part = self.model.logits(rows[u : u + user_step], self.table[i : i + item_step], self.dtype)
                scores[u : u + user_step, i : i + item_step] = part
        return scores


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
