"""Ranks become HR@k, NDCG@k and MRR. Pure functions; one relevant item a user, so HR@k is also recall@k.

Ties count against the positive: its rank is 1 + the number of candidates that are not below it. So a model that
scores everything alike hits nothing, and a NaN, which is below nothing, never makes a hit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def ranks_of(positive: Tensor, others: Tensor, counted: Tensor) -> Tensor:
    """The pessimistic rank, from 1, of `positive` [B] among `others` [B, n] where `counted` [B, n] is true: [B]."""
    return 1 + (~(others < positive.unsqueeze(1)) & counted).sum(1)


def histogram(ranks: Tensor, size: int) -> Tensor:
    """How often each rank occurs: [size + 1] int64, indexed by rank."""
    return torch.bincount(ranks, minlength=size + 1)


@dataclass(frozen=True)
class Metrics:
    """HR@k, NDCG@k and MRR of `users` evaluated users, each with one relevant item."""

    k: int
    hr: float
    ndcg: float
    mrr: float
    users: int


def metrics_of(counts: Tensor, k: int) -> Metrics:
    """Metrics from a histogram of ranks [R + 1], in float64; all 0 where there is nobody to average over.

    NDCG@k of one relevant item at rank r <= k is 1 / log2(r + 1), as its ideal is 1 (He et al. 2017, section 4.1).
    """
    users = int(counts.sum())
    if not users:
        return Metrics(k, 0.0, 0.0, 0.0, 0)
    counts = counts.double().cpu()
    rank = torch.arange(len(counts), dtype=torch.float64)
    top = counts[1 : k + 1]
    hr = top.sum() / users
    ndcg = (top / torch.log2(rank[1 : k + 1] + 1)).sum() / users
    mrr = (counts[1:] / rank[1:]).sum() / users
    return Metrics(k, hr.item(), ndcg.item(), mrr.item(), users)
