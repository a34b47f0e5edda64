import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncf import workers
from ncf.model.dropout import RandomBytes, keep_of_256
from ncf.model.neumf import NeuMF
from ncf.training import cpu_step, cpu_worker
from ncf.training.cpu_step import CpuGradients, cut_by_user
from ncf.training.step import loss_sum

SHAPES = [{}, {"factors": 0}, {"layers": ()}, {"factors": 5, "layers": (8, 6)}]
N_USERS, N_ITEMS = 30, 25


def make_model(shape: dict, *, dropout: float) -> NeuMF:
    model = NeuMF(N_USERS, N_ITEMS, dropout=dropout, **shape).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make_batch(rows: int = 77) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    users = torch.randint(N_USERS, (rows,), generator=generator, dtype=torch.int32).sort().values
    return users, torch.randint(N_ITEMS, (rows, 5), generator=generator, dtype=torch.int32)


@pytest.fixture(autouse=True)
def small_micro_batches(monkeypatch):
    monkeypatch.setattr(cpu_worker, "MICRO_BATCH", 64)  # so that a batch is several, the last one shorter
    monkeypatch.setattr(cpu_step, "SMALLEST_PIECE", 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_gradients_equal_autograd(shape, weighted, cores, monkeypatch):
    monkeypatch.setattr(cpu_step, "worker_count", lambda: cores)
    monkeypatch.setattr(workers, "worker_count", lambda: cores)
    model = make_model(shape, dropout=0.0)
    users, candidates = make_batch()
    weights = (torch.rand(77, 5) > 0.2).double() if weighted else None
    loss = CpuGradients(model, torch.float64)(users, candidates, weights, None)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = loss_sum(model, users, candidates, weights, torch.float64)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_a_second_batch_starts_from_zero():
    model = make_model({}, dropout=0.0)
    gradients = CpuGradients(model, torch.float64)
    gradients(*make_batch(), None, None)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    gradients(*make_batch(), None, None)
    for gradient, parameter in zip(first, model.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize("dropout", [0.5, 0.3])
def test_gradients_with_dropout_equal_autograd_under_the_same_masks(dropout, monkeypatch):
    """One micro-batch draws the bytes of all layers at once; autograd's masks are made of the same bytes."""
    monkeypatch.setattr(cpu_worker, "MICRO_BATCH", 5 * 77)
    monkeypatch.setattr(cpu_step, "worker_count", lambda: 1)
    model = make_model({}, dropout=dropout).train()
    users, candidates = make_batch()
    loss = CpuGradients(model, torch.float64)(users, candidates, None, torch.Generator().manual_seed(4))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    random = RandomBytes(5 * 77 * (256 + 128 + 64))
    random.seed(int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(4))))
    random.advance()
    layers = iter(random.bytes.split([5 * 77 * width for width in (256, 128, 64)]))
    keep = keep_of_256(dropout)
    monkeypatch.setattr(
        "ncf.model.dropout.drop_mask", lambda shape, *_: (next(layers) >= 128 - keep).double().view(shape)
    )
    model.zero_grad()
    expected = loss_sum(model, users, candidates, None, torch.float64)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_gradients_with_dropout_of_several_micro_batches_and_cores_equal_autograd(monkeypatch):
    """The bytes that each micro-batch drew, the shorter last ones too, are kept and make autograd's masks."""
    drawn, advance = [], RandomBytes.advance

    def kept(random: RandomBytes) -> None:
        advance(random)
        drawn.append(random.bytes.numpy().copy())

    monkeypatch.setattr(RandomBytes, "advance", kept)
    monkeypatch.setattr(cpu_step, "worker_count", lambda: 3)
    monkeypatch.setattr(cpu_step, "spread", lambda work, pieces: [work(piece) for piece in pieces])  # in order
    model = make_model({}, dropout=0.3).train()
    users, candidates = make_batch()
    loss = CpuGradients(model, torch.float64)(users, candidates, None, torch.Generator().manual_seed(4))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected, masks = torch.zeros((), dtype=torch.float64), iter(drawn)
    for part in cut_by_user(users, 3):
        for some in zip(users[part].split(64 // 5), candidates[part].split(64 // 5), strict=True):
            layers = iter(torch.from_numpy(next(masks)).split([some[1].numel() * width for width in (256, 128, 64)]))
            monkeypatch.setattr(
                "ncf.model.dropout.drop_mask",
                lambda shape, *_, layers=layers: (next(layers) >= 128 - keep_of_256(0.3)).double().view(shape),
            )
            expected = expected + loss_sum(model, *some, None, torch.float64)
    expected.backward()
    assert next(masks, None) is None
    assert len({one.tobytes()[:64] for one in drawn}) == len(drawn) > 6
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_micro_batches_and_cores_drop_different_activations():
    """Each interaction occurs twice, far apart: with the same masks their gradients would be equal."""
    model = make_model({}, dropout=0.5).train()
    users, items = torch.arange(30).repeat_interleave(26), torch.zeros(30 * 26, 5, dtype=torch.int64)
    model.user_embedding.data[:] = model.user_embedding.data[0]
    CpuGradients(model, torch.float64)(users, items, None, torch.Generator().manual_seed(0))
    assert len(model.user_embedding.grad.unique(dim=0)) == 30


def test_one_user_on_three_cores_leaves_two_without_work(monkeypatch):
    monkeypatch.setattr(cpu_step, "worker_count", lambda: 3)
    monkeypatch.setattr(workers, "worker_count", lambda: 3)
    model = make_model({}, dropout=0.0)
    users, candidates = torch.full((77,), 4), make_batch()[1]
    CpuGradients(model, torch.float64)(users, candidates, None, None)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss_sum(model, users, candidates, None, torch.float64).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_batches_may_have_another_number_of_candidates():
    model = make_model({}, dropout=0.0)
    gradients = CpuGradients(model, torch.float64)
    users, candidates = make_batch()
    gradients(users, candidates, None, None)
    gradients(users, candidates[:, :3], None, None)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    loss_sum(model, users, candidates[:, :3], None, torch.float64).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def test_without_a_generator_masks_are_still_drawn_anew():
    model = make_model({}, dropout=0.5).train()
    gradients = CpuGradients(model, torch.float64)
    assert gradients(*make_batch(), None, None) != gradients(*make_batch(), None, None)


def test_bf16_gradients_are_close_to_fp32s():
    model = make_model({}, dropout=0.0).float()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        CpuGradients(model, dtype)(*make_batch(), None, None)
        found[dtype] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    exact, rounded = found[torch.float32], found[torch.bfloat16]
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.999


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 5))
def test_ranges_cover_the_batch_and_divide_no_user(users, pieces):
    users = torch.tensor(sorted(users), dtype=torch.int64)
    parts = cut_by_user(users, pieces)
    assert len(parts) == pieces
    assert torch.cat([users[part] for part in parts]).tolist() == users.tolist()
    owners = [set(users[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set(users.tolist()))
