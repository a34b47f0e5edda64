"""Numbers that look random and depend on what they are of alone: not on the order of rows, a batch or a device."""

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15  # of SplitMix64's counter: 2**64 divided by the golden ratio


def signed(number: int) -> int:
    """The int64 with the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) on int64, which wraps as uint64 does."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def hash_chain(seed: int, users: Tensor, others: Tensor) -> Tensor:
    """Numbers from 0 to 2**63 - 1, each from (seed, user, other) alone; `users` and `others` are broadcast."""
    start = mix(torch.full_like(users, signed(seed + STEP), dtype=torch.int64))
    per_user = mix(start + (users.long() + 1) * signed(STEP))
    return mix(per_user + (others.long() + 1) * signed(STEP)) & ((1 << 63) - 1)
