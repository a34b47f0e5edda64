"""One optimizer step on any device: the loss and its gradient, the precision, Adam.

The gradient is that of the loss *sum*, divided once, in fp32, by the number of samples: at initial weights most
gradients of a mean over a million samples are below Adam's eps and below what fp16 can hold.
"""

import shutil
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ncf.config import TrainConfig
from ncf.distributed import ALONE, Ranks, first_line
from ncf.errors import InputError, NcfWarning, RunError
from ncf.model.neumf import NeuMF, has_fast_bf16
from ncf.training.cpu_step import CpuGradients
from ncf.training.reduction import Reduction

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_LOSS_SCALE = 65536.0  # where dynamic scaling starts, as torch's own


def loss_sum(
    model: NeuMF,
    users: Tensor,
    candidates: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Binary cross-entropy from logits, in fp32, summed over a batch (He et al. 2017, equation 7).

    `users` [B], `candidates` [B, C] with the positive in column 0, `weights` [B, C] or None for all 1.
    """
    logits: Tensor = model(users, candidates, dtype, generator)
    loss = functional.softplus(logits)  # of a negative; a positive's is softplus(-x) = softplus(x) - x
    if weights is None:
        return loss.sum() - logits[:, 0].sum()
    return (loss * weights).sum() - (logits[:, 0] * weights[:, 0]).sum()


def check_precision(precision: str, device: torch.device) -> None:
    """Raise InputError where the device cannot compute in the precision; warn where that is no faster than fp32."""
    if precision not in DTYPES:
        raise InputError(f"--precision must be fp32, bf16 or fp16: got {precision!r}")
    if precision == "fp16" and device.type != "cuda":
        raise InputError(
            f"--precision fp16 (--fp16) needs a CUDA device, as its small range needs loss scaling on the device: "
            f"got device {device}; use --precision bf16 or fp32"
        )
    if precision == "bf16" and device.type == "cpu" and not has_fast_bf16():
        warnings.warn(
            "this CPU has no bf16 products (AVX-512 or AMX): --precision bf16 gives bf16's rounding without its "
            "speed; use fp32",
            NcfWarning,
            stacklevel=2,
        )


class Step:
    """Adam on the exact gradient of a batch, or of the union of the ranks' batches.

    Parameters and Adam's state are fp32; only the products are in the chosen precision. A loss scale is one of the
    *mean* loss, as the recipe's is. fp32 on CUDA is fp32, not TF32, unless torch is told so:
    `torch.set_float32_matmul_precision("high")`, or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment.

    On CUDA a step only queues work: the host waits for nothing that the device computes, an overflow included, which
    the fused Adam reads where it is.
    """

    def __init__(self, model: NeuMF, config: TrainConfig, ranks: Ranks = ALONE, samples: int = 1) -> None:
        """`samples` is about how many a step has over all ranks, the same number on each of them."""
        self.model = model
        self.device = model.user_embedding.device
        self.dtype = DTYPES[config.precision]
        self.optimizer = torch.optim.Adam(
            model.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        dynamic = config.loss_scale == "dynamic"
        self.fixed_scale = None if dynamic else float(config.loss_scale)
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=FIRST_LOSS_SCALE if dynamic else float(config.loss_scale),
            enabled=config.precision == "fp16",
        )
        self.compiled, self.asked = wants_compile(config, self.device), bool(config.compile)
        self.tried = False  # whether a compiled step has been made
        if self.compiled:  # torch's limit of 8 is for all steps of a process together, and past it compiles no more
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.loss_sum: Any = torch.compile(loss_sum, dynamic=False) if self.compiled else loss_sum
        by_hand = self.device.type == "cpu" and not self.compiled
        self.cpu = CpuGradients(model, self.dtype) if by_hand else None
        self.reduction = Reduction(model, ranks) if ranks.joined else None
        self.samples = samples

    def __call__(
        self,
        users: Tensor,
        candidates: Tensor,
        weights: Tensor | None,
        count: int | Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """One step on a batch of `count` samples, a number or a tensor [] on the device; its loss sum, left there.

        `users` [B], ascending; `candidates` [B, C] with the positive in column 0; `weights` [B, C] is 0 where there is
        no sample, or None for all 1. With fp16, a step whose gradients overflow changes nothing but the loss scale. Of
        several ranks each brings its own batch, possibly empty, and all make the step together.
        """
        # fp16's gradients are those of the mean from the start, as the scale keeps the mean's in its range. What the
        # mean is over, ranks only know afterwards; until then a number near it serves, which all of them have.
        divided: int | Tensor = 1
        if self.scaler.is_enabled():
            divided = count if self.reduction is None else self.samples
        loss = self._gradients(users, candidates, weights, divided, generator)
        total: int | Tensor = count
        if self.reduction is not None:
            total = self.reduction(count, check_overflow=self.scaler.is_enabled())
        if total is not divided:
            self._divide_gradients((total.double() if isinstance(total, Tensor) else total) / divided)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.fixed_scale)
        return loss.detach().double()

    def _gradients(
        self,
        users: Tensor,
        candidates: Tensor,
        weights: Tensor | None,
        divided: int | Tensor,
        generator: torch.Generator | None,
    ) -> Tensor:
        """The loss sum; the parameters get its gradient over `divided`, times fp16's loss scale."""
        if not len(users):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
            nothing = torch.zeros((), dtype=torch.float64, device=self.device)
            self.scaler.scale(nothing)  # the scaler begins with the first loss that it sees
            return nothing
        if self.cpu is not None:
            return self.cpu(users, candidates, weights, generator)
        own = generator if self.device.type == "cpu" else None  # a GPU's dropout draws from the device's generator

        def differentiate() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.loss_sum(self.model, users, candidates, weights, self.dtype, own)
            torch.autograd.backward(self.scaler.scale(loss / divided if self.scaler.is_enabled() else loss))
            return loss

        if self.tried or not self.compiled:
            return differentiate()
        self.tried = True
        try:
            return differentiate()
        except Exception as error:  # noqa: BLE001 - what a compiler lacks shows in many ways, and only now
            self._do_without_compiling(error)
        return differentiate()

    def _do_without_compiling(self, error: Exception) -> None:
        """Go on without; raise RunError where compiling was asked for, and what has another reason as it is."""
        if "out of memory" in str(error):
            raise error
        reason = f"{type(error).__name__}: {first_line(error)}"
        if self.asked:
            raise RunError(f"the step cannot be compiled ({reason}): leave --compile (--xla) out") from error
        warnings.warn(f"the step cannot be compiled ({reason}), so it is slower", NcfWarning, stacklevel=2)
        self.loss_sum, self.compiled = loss_sum, False

    def _divide_gradients(self, by: float | Tensor) -> None:
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch._foreach_div_(grads, by if isinstance(by, Tensor) else float(by))


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
