"""One optimizer step on any device: gradients, their sum over processes, Adam."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.cpu.gradients import CpuGradients
from ncf.errors import InputError, NcfWarning
from ncf.model.batch import Batch
from ncf.model.losses import BinaryCrossEntropy, Loss, SampledSoftmax
from ncf.model.neumf import NeuMF
from ncf.model.products import DTYPES, has_fast_bf16
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.training.allreduce import AllReduce
from ncf.training.autograd import AutogradGradients, wants_compile

FIRST_LOSS_SCALE = 65536.0  # where dynamic scaling starts, as torch's own
Gradients = Callable[[Batch, torch.Generator | None], Tensor]  # fills the parameters' `.grad`, returns the loss sum


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


def check_loss(config: TrainConfig) -> None:
    """Raise InputError where the options of the loss and its negatives do not go together."""
    if config.shared_negatives and config.layers:
        layers = " ".join(map(str, config.layers))
        raise InputError(
            f"--layers {layers} has no place beside --shared-negatives {config.shared_negatives}, which GMF alone can "
            "score: take --layers none or, for an MLP, --recipe nvidia (with --history 20, say)"
        )
    if config.shared_negatives and config.loss == "bce":
        raise InputError("--shared-negatives need --loss softmax: binary cross-entropy takes --negative-samples alone")
    if not config.shared_negatives and not config.negative_samples:
        raise InputError("--negative-samples 0 leaves no negatives: give some, or --shared-negatives")
    if config.user_dropout and not config.history:
        raise InputError("--user-dropout hides the user's row, so it needs something beside it: give --history")


def make_loss(config: TrainConfig, n_items: int) -> Loss:
    """The loss of `config`."""
    if config.loss == "bce":
        return BinaryCrossEntropy()
    return SampledSoftmax(n_items, config.negative_samples + min(config.shared_negatives, n_items))


class Step:
    """Adam on the exact gradient of a batch, or of the union of the processes' batches.

    Parameters and Adam's state are fp32; only the products are in the chosen precision. A loss scale is one of the
    *mean* loss, as the recipe's is. fp32 on CUDA is fp32, not TF32, unless torch is told so:
    `torch.set_float32_matmul_precision("high")`, or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment.

    On CUDA a step only queues work: the host waits for nothing that the device computes, an overflow included, which
    the fused Adam reads where it is.
    """

    def __init__(
        self,
        model: NeuMF,
        config: TrainConfig,
        group: ProcessGroup = SINGLE,
        *,
        samples: int = 1,
        gradients: Gradients | None = None,
    ) -> None:
        """`samples` are about what a step has over all processes; fp16's loss scale is relative to it.

        `gradients` replaces the back end: by hand on a CPU, autograd elsewhere and where the step is compiled.
        """
        self.model, self.device = model, model.output.weight.device
        dtype, self.loss = DTYPES[config.precision], make_loss(config, model.n_items)
        self.optimizer = torch.optim.AdamW(  # Adam where the weight decay is 0
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=float(config.weight_decay),
            fused=True,
        )
        dynamic = config.loss_scale == "dynamic"
        self.fixed_scale = None if dynamic else float(config.loss_scale)
        self.scaler = torch.amp.GradScaler(
            self.device.type, init_scale=self.fixed_scale or FIRST_LOSS_SCALE, enabled=config.precision == "fp16"
        )
        # fp16's gradients are those of the mean from the start, as the loss scale keeps the mean's in its range. The
        # count is only known afterwards; until then a number near it serves, which all processes have.
        self.divisor = samples if self.scaler.is_enabled() else 1
        by_hand = self.device.type == "cpu" and not wants_compile(config, self.device)
        self.gradients = gradients or (
            CpuGradients(model, self.loss, dtype)
            if by_hand
            else AutogradGradients(model, self.loss, dtype, config, self.scaler, self.divisor)
        )
        self.allreduce = AllReduce(model, group) if group.connected else None

    def set_learning_rate(self, rate: float) -> None:
        """The step size from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def __call__(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """One step; its loss sum [], float64, left on the device.

        With fp16, a step whose gradients overflow changes nothing but the loss scale. Of several processes each brings
        its own batch, possibly empty, and all make the step together.
        """
        loss = self.gradients(batch, generator)
        count = self.loss.normaliser(batch)
        if self.allreduce is not None:
            count = self.allreduce(count, check_overflow=self.scaler.is_enabled())
        self._divide_gradients(count / self.divisor)
        self.scaler.step(self.optimizer)
        self.scaler.update(self.fixed_scale)
        return loss.double()

    def _divide_gradients(self, by: float | Tensor) -> None:
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch._foreach_div_(grads, by.double() if isinstance(by, Tensor) else by)
