"""The gradients of a batch on a CPU, forward and backward written out by hand.

Equal to autograd on `model/neumf.py` (by test, in float64), and faster: micro-batches stay in the cache from the gather
to the scatter, in memory that is allocated once; no graph is kept; dropout's mask is folded into the ReLU.
docs/algorithms.md has the derivation and where the time goes; `worker.py` is what one thread does.
"""

import itertools

import torch
from torch import Tensor

from ncf.cpu.forward import Weights
from ncf.cpu.user_side import grad_of
from ncf.cpu.worker import Worker
from ncf.model.batch import Batch
from ncf.model.losses import Loss
from ncf.model.neumf import NeuMF
from ncf.model.products import product
from ncf.threads import parallel_map, thread_count

SMALLEST_PIECE = 1_024  # samples


class CpuGradients:
    """Computes the gradient of the loss sum into `.grad` of the model's parameters."""

    def __init__(self, model: NeuMF, loss: Loss, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.loss, self.dtype = model, loss, dtype
        self.workers: list[Worker] = []  # made with the first batch
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """The loss sum over a batch; its gradient replaces what the parameters' `.grad` held.

        `generator` seeds the dropout (None: torch's own). Each thread takes a range of users, so no two write to one
        user's gradient, and sums the rest in its own memory; those sums are added in a fixed order.
        """
        torch._foreach_zero_([grad_of(parameter) for parameter in self.model.parameters()])
        if not len(batch.users):
            return torch.zeros((), dtype=torch.float64)
        # torch adds rows by int64 several times faster
        batch = batch._replace(users=batch.users.long(), candidates=batch.candidates.long())
        shared = 0 if batch.shared is None else len(batch.shared)
        parts = cut_by_user(batch.users, self._pieces(batch.candidates.numel() + shared * len(batch.users)))
        workers = self._workers(len(parts), batch.candidates.shape[1], shared)
        weights = Weights(self.model, self.dtype, workers[0].scale)
        for worker in workers:
            worker.start(weights, _new_seed(generator))
        losses = parallel_map(lambda one: one[0].run(batch.rows(one[1])), list(zip(workers, parts, strict=True)))
        for worker in workers:
            worker.finish()
        self._backward_through_items(workers)
        return torch.stack(losses).sum()

    def _pieces(self, samples: int) -> int:
        """One per thread, but none too small to be worth a thread's while."""
        return max(1, min(thread_count(), samples // SMALLEST_PIECE))

    def _workers(self, count: int, candidates: int, shared: int) -> list[Worker]:
        if self.workers and self.workers[0].made_for != (candidates, shared, self.model.training):
            self.workers = []
        while len(self.workers) < count:
            self.workers.append(Worker(self.model, self.dtype, self.loss, candidates, shared))
        return self.workers[:count]

    def _backward_through_items(self, workers: list[Worker]) -> None:
        """Take the summed gradients of the projected items and of GMF's columns to the items' parameters, once."""
        model = self.model
        grad = grad_of(model.item_embedding)
        for worker in workers:
            model.gmf_part(grad).add_(worker.item_gmf_grad)
            if model.item_bias is not None:
                grad_of(model.item_bias).add_(worker.item_bias_grad)
        if model.layers:
            total = workers[0].item_mlp_grad
            for worker in workers[1:]:
                total += worker.item_mlp_grad
            weight, rows = model.item_half(model.mlp[0].weight), model.mlp_part(model.item_embedding)
            model.mlp_part(grad).copy_(product(total, weight.T, None, self.dtype))
            model.item_half(grad_of(model.mlp[0].weight)).copy_(product(total.T, rows.T, None, self.dtype))


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
