"""An epoch's batches: interactions in a new order, with new negatives, on the device that trains."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.unseen import UnseenItems, draw_unchecked
from ncf.errors import InputError
from ncf.model.batch import Batch

LARGEST_BATCH = 1_048_576  # the recipe's
STEPS_PER_EPOCH = 100


def batch_size_of(config: TrainConfig, n_train: int, processes: int = 1) -> int:
    """Samples per step: as asked, or about 100 steps per epoch. Raises InputError where they hold no interaction."""
    each = 1 + config.negative_samples
    if config.batch_size is None:
        return max(processes, min(LARGEST_BATCH // each, math.ceil(n_train / STEPS_PER_EPOCH))) * each
    if config.batch_size < each:
        raise InputError(
            f"--batch-size must hold one interaction and its {config.negative_samples} negatives, so at least {each}: "
            f"got {config.batch_size}"
        )
    return config.batch_size


def steps_of(counts: Sequence[int], rows: int) -> int:
    """The fewest steps in which processes with `counts` interactions visit each once, with at most `rows` in a step.

    In each step a process takes ceil(count / steps) of its own until none is left. Raises InputError where not even one
    interaction of each process fits a step.
    """
    busy = sum(count > 0 for count in counts)
    if busy > rows:
        raise InputError(
            f"--batch-size must hold one interaction of each of {busy} processes, with its negatives: it holds {rows}"
        )
    low, high = max(1, math.ceil(sum(counts) / rows)), max(1, *counts)
    return low + bisect_left(
        range(low, high), True, key=lambda steps: sum(math.ceil(count / steps) for count in counts) <= rows
    )


class Batches:
    """Draws an epoch's batches from training pairs `users` and `items` [N] (ascending users), on their device.

    `counts` are the interactions of every process where there are several; all then make the same number of steps.
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
        self.unseen = UnseenItems(users, items, n_users, n_items)
        # whether some user has no unseen item to draw
        self.saturated = not self.neg_trick and bool((self.unseen.counts == 0).any())
        counts = [len(users)] if counts is None else counts
        self.samples = batch_size_of(config, sum(counts), len(counts))  # the most in a step, over all processes
        self.steps = steps_of(counts, self.samples // (1 + config.negative_samples))
        self.rows = math.ceil(len(users) / self.steps)  # the most in a step
        self.pad = pad  # a compiled step wants one shape: the last batch is filled with rows of weight 0
        # ... and one graph: where a batch has weights, all have them
        self.weighted = self.saturated or (pad and len(users) != self.rows * self.steps)

    def __len__(self) -> int:
        return self.steps

    def epoch(self, generator: torch.Generator) -> Iterator[Batch]:
        """The epoch's batches, C = 1 + n; every interaction comes once.

        A batch may be empty, where other processes still have some. Its rows are sorted by user, which makes the draw
        and the gathers faster and changes no sum. Weights are 0 where a user has no unseen item.
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
        return self.unseen.draw(users, self.negative_samples, generator)

    def _weigh(self, users: Tensor, candidates: Tensor) -> Batch:
        if not self.weighted:
            return Batch(users, candidates, None, candidates.numel())
        there = candidates >= 0
        count: int | Tensor = there.sum() if self.saturated else candidates.numel()
        weights = there.float()
        missing = self.rows - len(users) if self.pad and len(users) else 0
        if missing:
            users = torch.cat([users, users[-1:].expand(missing)])
            candidates = torch.cat([candidates, candidates[-1:].expand(missing, -1)])
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        return Batch(users, candidates.clamp(min=0), weights, count)
