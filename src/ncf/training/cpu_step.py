"""The gradients of a batch on a CPU, forward and backward written out by hand.

Equal to autograd on `neumf.py` (by test, in float64), and faster for these reasons: micro-batches stay in the cache
from the gather to the scatter, in buffers that are allocated once; no graph is kept; and dropout's mask is folded into
the ReLU, since an activation is above zero exactly where both let it through. docs/algorithms.md has the derivation
and where the time goes; `cpu_worker.py` is what one core does.
"""

import itertools

import torch
from torch import Tensor

from ncf.model.neumf import NeuMF, product
from ncf.training.cpu_worker import Worker, grad_of
from ncf.workers import spread, worker_count

SMALLEST_PIECE = 1_024  # samples


class CpuGradients:
    """Computes the gradient of the loss sum into `.grad` of the model's parameters."""

    def __init__(self, model: NeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model, dtype
        self.workers: list[Worker] = []  # made with the first batch
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def __call__(
        self, users: Tensor, candidates: Tensor, weights: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """The loss sum over a batch; its gradient replaces what the parameters' `.grad` held.

        `users` [B], ascending; `candidates` [B, C] with the positive in column 0; `weights` [B, C], or None for all
        1; `generator` seeds the dropout (None: torch's own). Each core takes a range of users, so no two write to one
        user's gradient, and sums the rest into buffers of its own; those are added in a fixed order.
        """
        torch._foreach_zero_([grad_of(parameter) for parameter in self.model.parameters()])
        users, candidates = users.long(), candidates.long()  # torch adds rows by int64 several times faster
        parts = cut_by_user(users, self._pieces(candidates.numel()))
        if self.workers and self.workers[0].candidates != candidates.shape[1]:
            self.workers = []
        while len(self.workers) < len(parts):
            self.workers.append(Worker(self.model, self.dtype, candidates.shape[1]))
        workers = self.workers[: len(parts)]
        projection = self._project_items()
        for worker in workers:
            worker.start(projection, _new_seed(generator))
        losses = spread(
            lambda one: one[0].run(users[one[1]], candidates[one[1]], None if weights is None else weights[one[1]]),
            list(zip(workers, parts, strict=True)),
        )
        for worker in workers:
            worker.finish()
        self._backward_through_items(workers)
        return torch.stack(losses).sum()

    def _pieces(self, samples: int) -> int:
        """One a core, but none too small to be worth a thread's while."""
        return max(1, min(worker_count(), samples // SMALLEST_PIECE))

    def _project_items(self) -> Tensor:
        """The items' side of the first hidden layer for the whole catalogue, [I, H1]; [I, 0] where there is none."""
        if not self.model.layers:
            return self.model.item_embedding[:, :0].to(self.dtype)
        half = self.model.layers[0] // 2
        rows = self.model.item_embedding[:, self.model.factors :]
        return product(rows, self.model.mlp[0].weight[:, half:], None, self.dtype)

    def _backward_through_items(self, workers: list["Worker"]) -> None:
        """Take the summed gradients of the projected items and of GMF's columns to the items' parameters, once."""
        model, factors = self.model, self.model.factors
        grad = grad_of(model.item_embedding)
        for worker in workers:
            grad[:, :factors] += worker.gmf_grad
        if model.layers:
            half = model.layers[0] // 2
            total = workers[0].projection_grad
            for worker in workers[1:]:
                total += worker.projection_grad
            weight, rows = model.mlp[0].weight[:, half:], model.item_embedding[:, factors:]
            grad[:, factors:] = product(total, weight.T, None, self.dtype)
            grad_of(model.mlp[0].weight)[:, half:] = product(total.T, rows.T, None, self.dtype)


def cut_by_user(users: Tensor, pieces: int) -> list[slice]:
    """Ranges of about equal length that cover ascending `users` [B], none of them dividing a user."""
    cuts = [0]
    for k in range(1, pieces):
        near = len(users) * k // pieces
        cuts.append(int(torch.searchsorted(users, users[near - 1 : near], right=True)) if near else 0)
    cuts.append(len(users))
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def _new_seed(generator: torch.Generator | None) -> int:
    return int(torch.randint(2**62, (), generator=generator))
