"""What a training step computes on."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """B interactions with their candidates, on one device."""

    users: Tensor  # [B], ascending
    candidates: Tensor  # [B, C]: the positive in column 0, then the negatives
    weights: Tensor | None  # [B, C], 0 where there is no sample; None for all 1
    samples: int | Tensor  # how many; a tensor [] where the draw decides: the host need not wait for the device
