"""An epoch's batches: interactions in a new order, with new negatives, on the device that trains."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.history import Histories
from ncf.data.interactions import Sequence
from ncf.data.unseen import UnseenItems, draw_unchecked
from ncf.errors import InputError
from ncf.model.batch import Batch

LARGEST_BATCH = 1_048_576  # the recipe's


def batch_size_of(config: TrainConfig, n_train: int, processes: int = 1) -> int:
    """Samples per step: as asked, or for `steps_per_epoch`. Raises InputError where they hold no interaction."""
    each = 1 + config.negative_samples
    if config.batch_size is None:
        wanted = max(config.smallest_batch, math.ceil(n_train / config.steps_per_epoch))
        return max(processes, min(LARGEST_BATCH // each, wanted, n_train)) * each
    if config.batch_size < each:
        raise InputError(
            f"--batch-size must hold one interaction and its {config.negative_samples} negatives, so at least {each}: "
            f"got {config.batch_size}"
        )
    return config.batch_size


def steps_of(counts: Collection[int], rows: int) -> int:
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
    """Draws an epoch's batches from a sequence of N training interactions, on its device.

    `ordered` says whether the log has a time. `counts` are the interactions of every process where there are several;
    all then make the same number of steps.
    """

    def __init__(
        self,
        sequence: Sequence,
        n_users: int,
        n_items: int,
        config: TrainConfig,
        *,
        ordered: bool = True,
        pad: bool = False,
        counts: Collection[int] | None = None,
    ) -> None:
        users, items = self.users, self.items = sequence.users, sequence.items
        self.n_items, self.user_dropout = n_items, config.user_dropout
        length = config.history
        self.histories = Histories(sequence, n_users, length, ordered=ordered) if length else None
        self.shared_negatives = min(config.shared_negatives, n_items)
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
            batch = Batch(users, candidates, None, candidates.numel())
            if self.histories is not None:
                batch = batch._replace(history=self.histories.of_rows(rows, generator))
            if self.user_dropout:
                chance = torch.rand(len(users), generator=generator, device=users.device)
                batch = batch._replace(hidden=chance < self.user_dropout)
            if self.shared_negatives:
                shared = torch.randperm(self.n_items, generator=generator, device=users.device)
                shared = shared[: self.shared_negatives]
                batch = batch._replace(shared=shared, shared_seen=self.unseen.which_seen(users, shared))
            yield self._weigh(batch)

    def _negatives(self, users: Tensor, generator: torch.Generator) -> Tensor:
        if self.neg_trick:
            return draw_unchecked(self.n_items, users, self.negative_samples, generator)
        return self.unseen.draw(users, self.negative_samples, generator)

    def _weigh(self, batch: Batch) -> Batch:
        if not self.weighted:
            return batch
        there = batch.candidates >= 0
        missing = self.rows - len(batch.users) if self.pad and len(batch.users) else 0
        last = batch.rows(slice(len(batch.users) - 1, None))
        padded = {}
        for name in ("users", "candidates", "history", "hidden", "shared_seen"):
            values, row = getattr(batch, name), getattr(last, name)
            if values is not None and missing:
                values = torch.cat([values, row.expand(missing, *row.shape[1:])])
            padded[name] = values
        weights = there.float()
        if missing:
            weights = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
        padded["candidates"] = padded["candidates"].clamp(min=0)
        samples = there.sum() if self.saturated else batch.samples
        return batch._replace(**padded, weights=weights, samples=samples)
