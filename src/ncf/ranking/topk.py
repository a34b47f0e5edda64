"""The best items of a user."""

import torch
from torch import Tensor

from ncf.errors import RunError


def top_items(scores: Tensor, k: int, left_out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The `k` best items of each row of `scores` [B, I]: items [B, K] and scores [B, K], best first, K = min(k, I).

    `left_out` are rows and items [T] that are not listed; where fewer than K remain, the rest of the row has score
    -inf. `scores` is overwritten there. Equal scores are in order of item. Raises RunError where a score is not finite.
    """
    if not torch.isfinite(scores).all():
        raise RunError("the model's scores are not finite: train it again with a lower learning rate")
    if left_out is not None:
        scores[left_out] = -torch.inf
    k = min(k, scores.shape[1])
    # The k-th best score decides; taking ties at it in order of item needs a look beyond torch.topk's own choice.
    threshold = scores.topk(k).values[:, -1:]
    tied = scores == threshold
    above = (scores > threshold).sum(1, keepdim=True)
    scores = scores.masked_fill(tied & (tied.cumsum(1) > k - above), -torch.inf)
    items = scores.topk(k).indices.sort(dim=1).values
    order = scores.gather(1, items).sort(dim=1, descending=True, stable=True)
    return items.gather(1, order.indices), order.values
