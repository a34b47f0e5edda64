"""The best items of a user, those that the user has already touched left out."""

import torch
from torch import Tensor

from ncf.data.negatives import Untouched
from ncf.errors import RunError
from ncf.ranking.scoring import Scorer


def top_items(scorer: Scorer, users: Tensor, k: int, seen: Untouched | None) -> tuple[Tensor, Tensor]:
    """The `k` best items of each of `users` [B]: items [B, K] and scores [B, K], best first, K = min(k, I).

    With `seen`, the items that a user has touched are left out; where fewer than K remain, the rest of the row has
    score -inf. Equal scores are in order of item. Raises RunError where a score is not finite.
    """
    scores = scorer.score_all(users)
    if not torch.isfinite(scores).all():
        raise RunError("the model's scores are not finite: train it again with a lower learning rate")
    if seen is not None:
        scores[seen.touched(users)] = -torch.inf
    k = min(k, scores.shape[1])
    # The k-th best score decides; taking ties at it in order of item needs a look beyond torch.topk's own choice.
    threshold = scores.topk(k).values[:, -1:]
    tied = scores == threshold
    above = (scores > threshold).sum(1, keepdim=True)
    scores = scores.masked_fill(tied & (tied.cumsum(1) > k - above), -torch.inf)
    items = scores.topk(k).indices.sort(dim=1).values
    order = scores.gather(1, items).sort(dim=1, descending=True, stable=True)
    return items.gather(1, order.indices), order.values
