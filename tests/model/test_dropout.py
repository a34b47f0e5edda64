import math

import pytest
import torch

from ncf.model.dropout import RandomBytes, drop, drop_mask, keep_of_256


@pytest.mark.parametrize(("dropout", "keep"), [(0.0, 256), (0.5, 128), (0.25, 192), (0.1, 230), (0.999, 1)])
def test_keep_probability_is_in_steps_of_a_256th(dropout, keep):
    assert keep_of_256(dropout) == keep


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_mean_and_variance_are_those_of_inverted_dropout(dropout):
    n = 1_000_003  # not a multiple of the eight elements that share a draw
    dropped = drop(torch.ones(n), dropout, torch.Generator().manual_seed(0))
    keep = keep_of_256(dropout) / 256
    variance = (1 - keep) / keep
    assert dropped.mean().item() == pytest.approx(1, abs=5 * math.sqrt(variance / n))
    assert dropped.var().item() == pytest.approx(variance, rel=0.02)
    assert sorted(dropped.unique().tolist()) == [0, pytest.approx(1 / keep)]


def test_bytes_of_a_draw_are_independent():
    mask = drop_mask(torch.Size([80_000]), 0.5, torch.Generator().manual_seed(0)).view(-1, 8)
    correlation = torch.corrcoef(mask.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / math.sqrt(10_000)
    assert (mask.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(10_000)


def test_the_generator_fixes_the_mask():
    first, again = (drop_mask(torch.Size([3, 5]), 0.5, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)


def test_no_dropout_changes_nothing():
    x = torch.randn(4, 4)
    assert drop(x, 0.0, None) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.01, 0.5, 0.75, 0.99])
def test_the_arithmetic_compares_every_byte_right(dtype, dropout, monkeypatch):
    every_byte = torch.arange(256, dtype=torch.uint8).view(torch.int64)
    monkeypatch.setattr(torch.Tensor, "random_", lambda self, *_, **__: self.copy_(every_byte))
    expected = torch.arange(256) < keep_of_256(dropout)
    assert torch.equal(drop_mask(torch.Size([256]), dropout, None, dtype), expected.to(dtype))


def xorshift64(word: int) -> int:
    word ^= word << 13 & (2**64 - 1)
    word ^= word >> 7
    return word ^ (word << 17 & (2**64 - 1))


def test_random_bytes_are_xorshift64():
    random = RandomBytes(43)  # not a multiple of the eight bytes of a word
    random.seed(5)
    words = [word % 2**64 for word in random.state.tolist()]
    for _ in range(3):
        random.advance()
        words = [xorshift64(word) for word in words]
        expected = b"".join(word.to_bytes(8, "little") for word in words)[:43]
        assert bytes(random.bytes.view(torch.uint8).tolist()) == expected


def test_random_bytes_are_even_and_unrelated_from_one_time_to_the_next():
    random = RandomBytes(1_000_000)
    random.seed(0)
    random.advance()
    before = random.bytes.double()
    random.advance()
    after = random.bytes.double()
    counts = torch.bincount(random.bytes.long() + 128, minlength=256).double()
    chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum().item()
    assert chi_squared < 255 + 5 * math.sqrt(2 * 255)
    assert abs(torch.corrcoef(torch.stack([before, after]))[0, 1]) < 5 / 1_000
    assert abs(torch.corrcoef(torch.stack([after[:-8], after[8:]]))[0, 1]) < 5 / 1_000  # neighbouring words
