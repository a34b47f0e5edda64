"""The hand-written gradients equal autograd's on the reference network, in float64."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ncf import threads
from ncf.cpu import forward, gradients, worker
from ncf.cpu.gradients import CpuGradients, cut_by_user
from ncf.model.batch import Batch
from ncf.model.dropout import RandomBytes, keep_of_256
from ncf.model.losses import BinaryCrossEntropy, Loss, SampledSoftmax
from ncf.model.neumf import NeuMF
from ncf.training.autograd import loss_sum

SHAPES = [{}, {"factors": 0}, {"layers": ()}, {"factors": 5, "layers": (8, 6)}]
WIDTHS = (256, 128, 64)  # of the default hidden layers
N_USERS, N_ITEMS, ROWS, CANDIDATES = 30, 25, 77, 5
LOSS = BinaryCrossEntropy()


def make_model(shape: dict, *, dropout: float = 0.0) -> NeuMF:
    model = NeuMF(N_USERS, N_ITEMS, dropout=dropout, **shape).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make_batch(*, weighted: bool = False, history: int = 0, shared: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(3)
    users = torch.randint(N_USERS, (ROWS,), generator=generator, dtype=torch.int32).sort().values
    candidates = torch.randint(N_ITEMS, (ROWS, CANDIDATES), generator=generator, dtype=torch.int32)
    weights = (torch.rand(ROWS, CANDIDATES, generator=generator) > 0.2).double() if weighted else None
    batch = Batch(users, candidates, weights, ROWS * CANDIDATES)
    if history:
        items = torch.randint(N_ITEMS, (ROWS, history), generator=generator, dtype=torch.int32)
        lengths = torch.randint(history + 1, (ROWS, 1), generator=generator)
        items = items.masked_fill(torch.arange(history) >= lengths, -1)
        batch = batch._replace(history=items, hidden=torch.rand(ROWS, generator=generator) < 0.3)
    if shared:
        seen = torch.rand(ROWS, shared, generator=generator) < 0.2
        batch = batch._replace(shared=torch.randperm(N_ITEMS, generator=generator)[:shared], shared_seen=seen)
    return batch


def loss_of(model: NeuMF, batch: Batch, loss: Loss = LOSS) -> Tensor:
    return loss_sum(model, loss, batch, torch.float64)


def grads_of(model: NeuMF) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_equals_autograd(model: NeuMF, loss: Tensor, expected: Tensor) -> None:
    """The loss, and the gradients that the model has, equal those of the differentiable `expected`."""
    found = grads_of(model)
    model.zero_grad()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    assert len(found) == len(list(model.parameters()))
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


@pytest.fixture(autouse=True)
def small_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "PAIRS", 64)  # so that a batch is several, the last one shorter
    monkeypatch.setattr(gradients, "SMALLEST_PIECE", 1)


@pytest.fixture
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count = int(getattr(request, "param", 3))
    for module in (gradients, threads):
        monkeypatch.setattr(module, "thread_count", lambda: count)
    return count


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cores", [1, 2, 3], indirect=True)
def test_gradients_equal_autograd(shape: dict, weighted: bool, cores: int) -> None:
    model, batch = make_model(shape), make_batch(weighted=weighted)
    loss = CpuGradients(model, LOSS, torch.float64)(batch, None)
    assert_equals_autograd(model, loss, loss_of(model, batch))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, {"item_bias": True}])
@pytest.mark.parametrize("cores", [1, 3], indirect=True)
def test_gradients_with_a_history_equal_autograd(shape: dict, ordered: bool, cores: int) -> None:
    model, batch = make_model({"history": 6, "ordered": ordered, **shape}), make_batch(history=6)
    loss = CpuGradients(model, LOSS, torch.float64)(batch, None)
    assert_equals_autograd(model, loss, loss_of(model, batch))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("history", [0, 6])
@pytest.mark.parametrize("shared", [0, 11])
@pytest.mark.parametrize("cores", [1, 3], indirect=True)
def test_gradients_of_softmax_equal_autograd(weighted: bool, history: int, shared: int, cores: int) -> None:
    shape = {"layers": (), "history": history, "item_bias": bool(history)}
    model, batch = make_model(shape), make_batch(weighted=weighted, history=history, shared=shared)
    softmax = SampledSoftmax(N_ITEMS, CANDIDATES - 1 + shared)
    loss = CpuGradients(model, softmax, torch.float64)(batch, None)
    assert_equals_autograd(model, loss, loss_of(model, batch, softmax))


def test_shared_negatives_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SHARED_LOGITS", 100)  # so that a batch is several micro-batches
    model, batch = make_model({"layers": (), "history": 3}), make_batch(history=3, shared=20)
    batch = batch._replace(candidates=batch.candidates[:, :1])
    softmax = SampledSoftmax(N_ITEMS, 20)
    loss = CpuGradients(model, softmax, torch.float64)(batch, None)
    assert_equals_autograd(model, loss, loss_of(model, batch, softmax))


def test_a_second_batch_starts_from_zero() -> None:
    model = make_model({})
    compute = CpuGradients(model, LOSS, torch.float64)
    compute(make_batch(), None)
    first = grads_of(model)
    compute(make_batch(), None)
    assert all(map(torch.equal, first, grads_of(model)))


def use_masks(monkeypatch: pytest.MonkeyPatch, drawn: Tensor, samples: int, keep: int) -> None:
    """Autograd's next dropout masks come from the bytes that a micro-batch drew, layer after layer."""
    rows = len(drawn) // sum(WIDTHS)
    layers = iter(drawn.split([rows * width for width in WIDTHS]))

    def mask(shape: torch.Size, *_: object) -> Tensor:
        kept = next(layers).view(rows, -1)[:samples] >= 128 - keep
        return kept.double().view(shape)

    monkeypatch.setattr("ncf.model.dropout.drop_mask", mask)


@pytest.mark.parametrize("dropout", [0.5, 0.3])
@pytest.mark.parametrize("cores", [1, 3], indirect=True)
def test_gradients_with_dropout_equal_autograd_under_the_same_masks(
    dropout: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that each micro-batch drew, the shorter last ones too, are kept and make autograd's masks."""
    drawn, advance = [], RandomBytes.advance

    def kept(random: RandomBytes) -> None:
        advance(random)
        drawn.append(random.bytes.clone())

    monkeypatch.setattr(RandomBytes, "advance", kept)
    monkeypatch.setattr(gradients, "parallel_map", lambda work, pieces: [work(piece) for piece in pieces])  # in order
    model, batch = make_model({}, dropout=dropout).train(), make_batch()
    loss = CpuGradients(model, LOSS, torch.float64)(batch, torch.Generator().manual_seed(4))
    found = grads_of(model)
    model.zero_grad()
    expected, masks = torch.zeros((), dtype=torch.float64), iter(drawn)
    for piece in micro_batches(batch, cores):
        use_masks(monkeypatch, next(masks), piece.candidates.numel(), keep_of_256(dropout))
        expected = expected + loss_of(model, piece)
    expected.backward()
    assert next(masks, None) is None
    assert len({one.numpy().tobytes()[:64] for one in drawn}) == len(drawn) > 6
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-10)


def micro_batches(batch: Batch, cores: int) -> Iterator[Batch]:
    rows = forward.PAIRS // CANDIDATES
    for part in cut_by_user(batch.users, cores):
        for users, candidates in zip(batch.users[part].split(rows), batch.candidates[part].split(rows), strict=True):
            yield Batch(users, candidates, None, candidates.numel())


def test_micro_batches_and_cores_drop_different_activations() -> None:
    """Each interaction occurs twice, far apart: with the same masks their gradients would be equal."""
    model = make_model({}, dropout=0.5).train()
    users, items = torch.arange(30).repeat_interleave(26), torch.zeros(30 * 26, 5, dtype=torch.int64)
    model.user_embedding.data[:] = model.user_embedding.data[0]
    CpuGradients(model, LOSS, torch.float64)(Batch(users, items, None, items.numel()), torch.Generator().manual_seed(0))
    assert model.user_embedding.grad is not None
    assert len(model.user_embedding.grad.unique(dim=0)) == 30


@pytest.mark.usefixtures("cores")
def test_one_user_on_three_cores_leaves_two_without_work() -> None:
    model, batch = make_model({}), make_batch()._replace(users=torch.full((ROWS,), 4))
    loss = CpuGradients(model, LOSS, torch.float64)(batch, None)
    assert_equals_autograd(model, loss, loss_of(model, batch))


def test_batches_may_have_another_number_of_candidates() -> None:
    model, batch = make_model({}), make_batch()
    compute = CpuGradients(model, LOSS, torch.float64)
    compute(batch, None)
    fewer = batch._replace(candidates=batch.candidates[:, :3])
    loss = compute(fewer, None)
    assert_equals_autograd(model, loss, loss_of(model, fewer))


def test_without_a_generator_masks_are_still_drawn_anew() -> None:
    compute = CpuGradients(make_model({}, dropout=0.5).train(), LOSS, torch.float64)
    assert compute(make_batch(), None) != compute(make_batch(), None)


def test_bf16_gradients_are_close_to_fp32s() -> None:
    model = make_model({}).float()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        CpuGradients(model, LOSS, dtype)(make_batch(), None)
        found[dtype] = torch.cat([gradient.flatten() for gradient in grads_of(model)])
    exact, rounded = found[torch.float32], found[torch.bfloat16]
    assert not torch.equal(exact, rounded)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.999


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 5))
def test_ranges_cover_the_batch_and_divide_no_user(raw_users: list[int], pieces: int) -> None:
    users = torch.tensor(sorted(raw_users), dtype=torch.int64)
    parts = cut_by_user(users, pieces)
    assert len(parts) == pieces
    assert torch.cat([users[part] for part in parts]).tolist() == users.tolist()
    owners = [set(users[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set(users.tolist()))
