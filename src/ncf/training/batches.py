"""An epoch's batches: interactions in a new order, with new negatives, on the device that trains."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.negatives import Untouched, draw_unchecked
from ncf.errors import InputError

LARGEST_BATCH = 1_048_576  # the recipe's
STEPS_PER_EPOCH = 100


def batch_size_of(config: TrainConfig, n_train: int) -> int:
    """Samples in a step, positives and negatives together: as asked, or about 100 steps an epoch.

    Raises InputError where a batch could not hold one interaction and its negatives.
    """
    each = 1 + config.negative_samples
    if config.batch_size is None:
        return max(1, min(LARGEST_BATCH // each, math.ceil(n_train / STEPS_PER_EPOCH))) * each
    if config.batch_size < each:
        raise InputError(
            f"--batch-size must hold one interaction and its {config.negative_samples} negatives, so at least {each}: "
            f"got {config.batch_size}"
        )
    return config.batch_size


class Batches:
    """Draws an epoch's batches from training pairs `users` and `items` [N] (ascending users), on their device."""

    def __init__(
        self, users: Tensor, items: Tensor, n_users: int, n_items: int, config: TrainConfig, *, pad: bool = False
    ) -> None:
        self.users, self.items, self.n_items = users, items, n_items
        self.negative_samples, self.neg_trick = config.negative_samples, config.neg_trick
        self.untouched = Untouched(users, items, n_users, n_items)
        self.saturated = bool((self.untouched.counts == 0).any())
        self.rows = batch_size_of(config, len(users)) // (1 + config.negative_samples)
        self.pad = pad  # a compiled step wants one shape: the last batch is filled with rows of weight 0

    def __len__(self) -> int:
        return math.ceil(len(self.users) / self.rows)

    def epoch(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
        """The epoch's batches: users [B], candidates [B, 1 + n], weights or None, and the number of samples.

        Every interaction comes once, in column 0. Rows of a batch are sorted by user, which makes the draw and the
        gathers faster and changes no sum. Weights [B, 1 + n] are 0 where a user has no untouched item.
        """
        order = torch.randperm(len(self.users), generator=generator, device=self.users.device)
        for at in range(0, len(order), self.rows):
            rows = order[at : at + self.rows].sort().values
            users, positives = self.users[rows], self.items[rows].unsqueeze(1)
            negatives = self._negatives(users, generator)
            candidates = torch.cat([positives, negatives.to(positives.dtype)], 1)
            yield self._weigh(users, candidates)

    def _negatives(self, users: Tensor, generator: torch.Generator) -> Tensor:
        if self.neg_trick:
            return draw_unchecked(self.n_items, users, self.negative_samples, generator)
        return self.untouched.draw(users, self.negative_samples, generator)

    def _weigh(self, users: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
        missing = self.rows - len(users) if self.pad else 0
        if not missing and not (self.saturated and not self.neg_trick):
            return users, candidates, None, candidates.numel()
        weights = (candidates >= 0).float()
        count = int(weights.sum()) if self.saturated else candidates.numel()
        if missing:
            users = torch.cat([users, users[-1:].expand(missing)])
            candidates = torch.cat([candidates, candidates[-1:].expand(missing, -1)])
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        return users, candidates.clamp(min=0), weights, count
