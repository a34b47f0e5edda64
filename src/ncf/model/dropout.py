"""Inverted dropout with a mask of random bytes, which a CPU draws far faster than torch's own masks."""

import torch
from torch import Tensor
from torch.nn import functional


def keep_of_256(dropout: float) -> int:
    """How many of 256 byte values keep an activation: the keep probability in steps of 1/256, at least one step."""
    return max(1, round((1 - dropout) * 256))


def drop_mask(
    shape: torch.Size, dropout: float, generator: torch.Generator | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A mask of 0 and 1 of `shape` on the CPU; each element is 1 with probability `keep_of_256(dropout) / 256`.

    One 64-bit draw serves eight elements, so a mask costs an eighth of a draw an element. The comparison of a byte
    with the bound is arithmetic (every byte is exact in 16 bits), as torch compares bytes some five times slower.
    """
    words = torch.empty((shape.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    drawn = words.view(torch.uint8)[: shape.numel()].view(shape)
    return torch.rsub(drawn.to(dtype), keep_of_256(dropout)).clamp_(0, 1)  # 1 where the byte is below the bound


def drop(x: Tensor, dropout: float, generator: torch.Generator | None) -> Tensor:
    """Drop a share of `x`, any shape, and scale what is kept so that the expectation is exactly `x`.

    On a GPU this is `torch.nn.functional.dropout`, which compiles into its neighbours and draws from the device's
    own generator; on a CPU the draws come from `generator`.
    """
    if x.device.type != "cpu":
        return functional.dropout(x, dropout)
    if keep_of_256(dropout) == 256:
        return x
    scale = 256 / keep_of_256(dropout)
    return x * drop_mask(x.shape, dropout, generator, x.dtype).mul_(scale)


class RandomBytes:
    """`n` random bytes at a time, each value of -128 .. 127 as likely: for masks that are drawn in a hurry.

    Eight bytes are a word of xorshift64 (Marsaglia, "Xorshift RNGs", Journal of Statistical Software 2003, shifts 13, 7
    and 17). Every word has a state of its own, seeded by torch's Mersenne Twister, so that all advance at once in
    vector instructions, several times faster than torch draws them one by one.
    """

    def __init__(self, n: int) -> None:
        self.state = torch.empty((n + 7) // 8, dtype=torch.int64)
        self.shifted = torch.empty_like(self.state)
        self.bytes = self.state.view(torch.int8)[:n]  # [n], new ones after each `advance`

    def seed(self, seed: int) -> None:
        """Begin the stream of `seed`."""
        self.state.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))

    def advance(self) -> None:
        """Replace `bytes` by the next ones."""
        state, shifted = self.state, self.shifted
        state ^= torch.bitwise_left_shift(state, 13, out=shifted)
        torch.bitwise_right_shift(state, 7, out=shifted)
        state ^= shifted.bitwise_and_(2**57 - 1)  # torch's shift brings in the sign
        state ^= torch.bitwise_left_shift(state, 17, out=shifted)
