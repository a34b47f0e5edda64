"""Matrix products in fp32, bf16 and fp16."""

import platform

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b with the operands in `dtype`, summed in fp32; `x` [..., A], `weight` [Z, A] give [..., Z] in `dtype`.

    A CPU without 16-bit products would take some fifty times longer for bf16 than for fp32; there the operands are
    rounded to bf16 and multiplied in fp32, which gives the same figures.
    """
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if dtype == torch.bfloat16 and x.device.type == "cpu" and not has_fast_bf16():
        wide = None if bias is None else bias.float()
        return functional.linear(x.float(), weight.float(), wide).to(dtype)
    return functional.linear(x, weight, bias)


def product_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x @ weight + b into `out` [R, Z], on a CPU; `x` [R, A], `weight` [A, Z] and `bias` [Z] are of its dtype."""
    if out.dtype == torch.bfloat16 and not has_fast_bf16():
        out.copy_(product(x, weight.T, bias, out.dtype))
    elif bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


def add_product(x: Tensor, y: Tensor, total: Tensor) -> None:
    """Add x @ y to `total` [A, Z], whose precision may be higher than theirs; `x` [A, R] and `y` [R, Z]."""
    if x.dtype == total.dtype:
        total.addmm_(x, y)
    else:
        total += product(x, y.T, None, x.dtype)


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16, AMX, or Arm's BF16).

    oneDNN's own answer is also yes where it only emulates, so on x86 the instructions decide.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
