import pytest
import torch

from ncf.config import TrainConfig
from ncf.errors import InputError, NcfWarning, RunError
from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.model.products import has_fast_bf16
from ncf.training.step import Step, check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_is_adam_on_the_mean_gradient(compiled):
    config = TrainConfig(dropout=0.0, compile=compiled, factors=4, layers=(8, 6))
    model = NeuMF(9, 7, factors=4, layers=(8, 6), dropout=0.0)
    twin = NeuMF(9, 7, factors=4, layers=(8, 6), dropout=0.0)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.0045, betas=(0.25, 0.5), eps=1e-8)
    step = Step(model, config)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        users = torch.randint(9, (8,), generator=generator).sort().values
        candidates = torch.randint(7, (8, 5), generator=generator)
        loss = step(Batch(users, candidates, None, 40), None)
        optimizer.zero_grad()
        mean = torch.nn.functional.binary_cross_entropy_with_logits(
            twin(users, candidates), torch.eye(5)[0].expand(8, 5)
        )
        mean.backward()
        optimizer.step()
        assert loss.item() / 40 == pytest.approx(mean.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # what torch.compile asks of a graph's inputs
def test_a_compiled_step_on_a_cpu_has_dropout_too():
    model = NeuMF(90, 70, factors=4, layers=(8, 6))
    step = Step(model, TrainConfig(compile=True, factors=4, layers=(8, 6), learning_rate=0.02))
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(90, (64,)).sort().values, torch.randint(70, (64, 5)), None, 320)
    losses = [step(batch, generator).item() for _ in range(40)]
    assert min(losses[-10:]) < 0.8 * losses[0]
    before = generator.get_state()
    step(batch, generator)
    assert not torch.equal(before, generator.get_state())


def test_fp16_needs_a_gpu():
    with pytest.raises(InputError, match="fp16.*CUDA"):
        check_precision("fp16", CPU)


@pytest.mark.skipif(has_fast_bf16(), reason="this CPU has bf16 products")
def test_bf16_without_hardware_is_warned_of():
    with pytest.warns(NcfWarning, match="bf16"):
        check_precision("bf16", CPU)


@pytest.mark.parametrize("asked", [None, True])
def test_a_step_that_cannot_be_compiled(monkeypatch, asked):
    def broken(function, **_):
        def fail(*_):
            raise OSError("Python.h: no such file\nmore")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    for module in ("step", "autograd"):
        monkeypatch.setattr(f"ncf.training.{module}.wants_compile", lambda *_: True)
    step = Step(NeuMF(9, 7), TrainConfig(compile=asked))
    batch = Batch(torch.arange(9), torch.randint(7, (9, 5)), None, 45), None
    if asked:
        with pytest.raises(RunError, match=r"cannot be compiled \(OSError: Python.h: no such file\): leave --compile"):
            step(*batch)
        return
    with pytest.warns(NcfWarning, match=r"cannot be compiled \(OSError: Python.h: no such file\), so it is slower"):
        loss = step(*batch)
    assert step(*batch) < loss


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_trains_as_the_cpu_does(precision, compiled):
    config = TrainConfig(dropout=0.0, precision=precision, compile=compiled)
    model = NeuMF(90, 70, dropout=0.0)
    reference = Step(NeuMF(90, 70, dropout=0.0), TrainConfig(dropout=0.0))
    step = Step(model.cuda(), config)
    users, candidates = torch.randint(90, (64,)).sort().values, torch.randint(70, (64, 5))
    for _ in range(20):
        ours = step(Batch(users.cuda(), candidates.cuda(), None, 320), None).item()
        theirs = reference(Batch(users, candidates, None, 320), None).item()
    assert ours == pytest.approx(theirs, rel=0.05)
