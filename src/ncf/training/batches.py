"""An epoch's batches: interactions in a new order, with new negatives, on the device that trains."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.negatives import Untouched, draw_unchecked
from ncf.errors import InputError

LARGEST_BATCH = 1_048_576  # the recipe's
STEPS_PER_EPOCH = 100


def batch_size_of(config: TrainConfig, n_train: int, ranks: int = 1) -> int:
    """Samples in a step, positives and negatives together: as asked, or about 100 steps an epoch.

    The default is never below one interaction per process.

    Raises InputError where a batch could not hold one interaction and its negatives.
    """
    each = 1 + config.negative_samples
    if config.batch_size is None:
        return max(ranks, min(LARGEST_BATCH // each, math.ceil(n_train / STEPS_PER_EPOCH))) * each
    if config.batch_size < each:
        raise InputError(
            f"--batch-size must hold one interaction and its {config.negative_samples} negatives, so at least {each}: "
            f"got {config.batch_size}"
        )
    return config.batch_size


def steps_of(counts: Sequence[int], rows: int) -> int:
    """The fewest steps in which ranks with `counts` interactions visit each once, with at most `rows` in a step.

    In each step a rank takes ceil(count / steps) of its own until none is left. Raises InputError where not even one
    interaction of each rank fits a step.
    """
    busy = sum(count > 0 for count in counts)
    if busy > rows:
        raise InputError(
            f"--batch-size must hold one interaction of each of {busy} processes, with its negatives: it holds {rows}"
        )
    low, high = max(1, math.ceil(sum(counts) / rows)), max(1, *counts)
    while low < high:
        middle = (low + high) // 2
        if sum(math.ceil(count / middle) for count in counts) <= rows:
            high = middle
        else:
            low = middle + 1
    return low


class Batches:
    """Draws an epoch's batches from training pairs `users` and `items` [N] (ascending users), on their device.

    `counts` are the interactions of every rank where these are one rank's; all then make the same number of steps.
    """

    def __init__(
        self,
        users: Tensor,
        items: Tensor,
        n_users: int,
        n_items: int,
        config: TrainConfig,
        *,
        pad: bool = False,
        counts: Sequence[int] | None = None,
    ) -> None:
        self.users, self.items, self.n_items = users, items, n_items
        self.negative_samples, self.neg_trick = config.negative_samples, config.neg_trick
        self.untouched = Untouched(users, items, n_users, n_items)
        # whether some user has no untouched item to draw
        self.saturated = not self.neg_trick and bool((self.untouched.counts == 0).any())
        counts = [len(users)] if counts is None else counts
        self.samples = batch_size_of(config, sum(counts), len(counts))  # the most in a step, over all ranks
        self.steps = steps_of(counts, self.samples // (1 + config.negative_samples))
        self.rows = math.ceil(len(users) / self.steps)  # the most in a step
        self.pad = pad  # a compiled step wants one shape: the last batch is filled with rows of weight 0
        # ... and one graph: where a batch has weights, all have them
        self.weighted = self.saturated or (pad and len(users) != self.rows * self.steps)

    def __len__(self) -> int:
        return self.steps

    def epoch(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int | Tensor]]:
        """The epoch's batches: users [B], candidates [B, 1 + n], weights or None, and the number of samples.

        Every interaction comes once, in column 0. A batch may be empty, where other ranks still have some.
        Rows of a batch are sorted by user, which makes the draw and the gathers faster and changes no sum. Weights
        [B, 1 + n] are 0 where a user has no untouched item; how many samples there are then depends on the draw, so
        the number is a tensor [] on the device, which the host need not wait for.
        """
        order = torch.randperm(len(self.users), generator=generator, device=self.users.device)
        for step in range(self.steps):
            rows = order[step * self.rows : (step + 1) * self.rows].sort().values
            users, positives = self.users[rows], self.items[rows].unsqueeze(1)
            negatives = self._negatives(users, generator)
            candidates = torch.cat([positives, negatives.to(positives.dtype)], 1)
            yield self._weigh(users, candidates)

    def _negatives(self, users: Tensor, generator: torch.Generator) -> Tensor:
        if self.neg_trick:
            return draw_unchecked(self.n_items, users, self.negative_samples, generator)
        return self.untouched.draw(users, self.negative_samples, generator)

    def _weigh(self, users: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
        if not self.weighted:
            return users, candidates, None, candidates.numel()
        there = candidates >= 0
        count: int | Tensor = there.sum() if self.saturated else candidates.numel()
        weights = there.float()
        missing = self.rows - len(users) if self.pad and len(users) else 0
        if missing:
            users = torch.cat([users, users[-1:].expand(missing)])
            candidates = torch.cat([candidates, candidates[-1:].expand(missing, -1)])
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        return users, candidates.clamp(min=0), weights, count
