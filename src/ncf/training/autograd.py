"""The gradients of a batch by autograd on the reference network: on a GPU, and wherever the step is compiled."""

import shutil
import warnings
from typing import Any

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.errors import InputError, NcfWarning, RunError
from ncf.model.batch import Batch
from ncf.model.losses import Loss
from ncf.model.neumf import NeuMF
from ncf.parallel.group import first_line


class AutogradGradients:
    """Computes the gradient of the loss sum over `divisor`, times fp16's loss scale, into the parameters' `.grad`."""

    def __init__(
        self,
        model: NeuMF,
        loss: Loss,
        dtype: torch.dtype,
        config: TrainConfig,
        scaler: torch.amp.GradScaler,
        divisor: int = 1,
    ) -> None:
        self.model, self.loss, self.dtype, self.scaler, self.divisor = model, loss, dtype, scaler, divisor
        self.device = model.output.weight.device
        self.compiled, self.required = wants_compile(config, self.device), bool(config.compile)
        self.tried = False  # whether a compiled step has been made
        if self.compiled:  # torch's limit of 8 is for all steps of a process together, and past it compiles no more
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.forward: Any = torch.compile(self._loss_sum, dynamic=False) if self.compiled else self._loss_sum

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """The loss sum []; its gradient replaces what the parameters' `.grad` held."""
        if not len(batch.users):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            nothing = torch.zeros((), device=self.device)
            self.scaler.scale(nothing)  # the scaler begins with the first loss that it sees
            return nothing
        if self.device.type != "cpu":
            generator = None  # a GPU's dropout draws from the device's generator
        try:
            loss = self._differentiate(batch, generator)
        except Exception as error:  # what a compiler lacks shows in many ways, and only at the first step
            if self.tried or not self.compiled:
                raise
            self._do_without_compiling(error)
            loss = self._differentiate(batch, generator)
        self.tried = True
        return loss

    def _loss_sum(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        return loss_sum(self.model, self.loss, batch, self.dtype, generator)

    def _differentiate(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        self.model.zero_grad()
        # Compiled code must not depend on the number of samples, which no part of the loss reads.
        loss: Tensor = self.forward(batch._replace(samples=0), generator)
        torch.autograd.backward(self.scaler.scale(loss / self.divisor))
        return loss.detach()

    def _do_without_compiling(self, error: Exception) -> None:
        """Go on without; raise RunError where compiling was asked for, and what has another reason as it is."""
        if "out of memory" in str(error):
            raise error
        reason = f"{type(error).__name__}: {first_line(error)}"
        if self.required:
            raise RunError(f"the step cannot be compiled ({reason}): leave --compile (--xla) out") from error
        warnings.warn(f"the step cannot be compiled ({reason}), so it is slower", NcfWarning, stacklevel=2)
        self.forward, self.compiled = self._loss_sum, False


def loss_sum(
    model: NeuMF, loss: Loss, batch: Batch, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """The loss sum [] of a batch, differentiable."""
    rows = model.user_rows(batch.known_users(), dtype, batch.history)
    items, bias = model.item_rows(batch.candidates, dtype), model.bias_of(batch.candidates)
    logits = model.logits(rows, items, dtype, generator, bias)
    if batch.shared is None:
        return loss.value(logits, batch.weights)
    items, bias = model.item_rows(batch.shared, dtype), model.bias_of(batch.shared)
    shared = model.logits(rows, items, dtype, generator, bias)
    if batch.shared_seen is not None:
        shared = shared.masked_fill(batch.shared_seen, -torch.inf)
    return loss.value(logits, batch.weights, shared)


def wants_compile(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compile the step: as asked, else on a GPU where there is a C compiler."""
    if config.compile is not None:
        return config.compile
    return device.type == "cuda" and _has_compiler()


def check_compile(config: TrainConfig, device: torch.device) -> None:
    """Raise InputError where compiling is asked for and cannot be; warn where a GPU goes without."""
    if _has_compiler():
        return
    if config.compile:
        raise InputError("--compile (--xla) needs a C compiler, and none of cc, gcc and clang was found: install one")
    if config.compile is None and device.type == "cuda":
        warnings.warn("no C compiler was found, so the step is not compiled and slower", NcfWarning, stacklevel=2)


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))
