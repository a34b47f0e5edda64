"""What a GPU's epoch must be: queued without a look at a result, one shape, one graph. Shown on a CPU by autograd."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ncf.config import TrainConfig
from ncf.data.interactions import Sequence
from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.model.products import DTYPES
from ncf.training.autograd import AutogradGradients, wants_compile
from ncf.training.batches import Batches
from ncf.training.step import Step

USERS, ITEMS = 30, 20
SHAPE: dict[str, Any] = {"factors": 4, "layers": (8, 6)}
PRECISIONS = ["fp32", "bf16", "fp16"]
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave"}


class Watch(TorchDispatchMode):
    """Fails on operations whose result the host would wait for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if masks or name in WAITS:
            raise AssertionError(f"the host waits for {function}")
        return function(*args, **(kwargs or {}))


def planted(device, config, **shape):
    """Batches with a short last one and a user who has every item; a step by autograd on a CPU too."""
    pairs = torch.cat([torch.arange(ITEMS), torch.arange(ITEMS, USERS * ITEMS, 3)]).to(device)
    pad = wants_compile(config, device)
    batches = Batches(Sequence((pairs // ITEMS).int(), (pairs % ITEMS).int()), USERS, ITEMS, config, pad=pad)
    step = Step(NeuMF(USERS, ITEMS, **(SHAPE | shape)).to(device).train(), config)
    step.gradients = AutogradGradients(step.model, step.loss, DTYPES[config.precision], config, step.scaler)
    return batches, step


def run_epoch(batches, step, seed):
    generator = torch.Generator(step.device).manual_seed(seed)
    found = [(step(batch, generator), batch.samples) for batch in batches.epoch(generator)]
    return torch.stack([loss for loss, _ in found]).sum(), sum(count for _, count in found)


def test_the_watch_sees_what_waits():
    for wait in (torch.Tensor.item, int, lambda x: x.reshape(1)[x.reshape(1) > 0], torch.nonzero):
        with pytest.raises(AssertionError, match="the host waits"), Watch():
            wait(torch.ones(()))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_waits_for_nothing_in_an_epoch(precision):
    config = TrainConfig(batch_size=100, precision=precision, compile=False, **SHAPE)
    batches, step = planted(torch.device("cpu"), config)
    assert batches.saturated
    with Watch():
        loss, samples = run_epoch(batches, step, 0)
    assert samples == 5 * len(batches.users) - 4 * ITEMS
    assert 0.6 < loss / samples < 0.8


def test_the_host_waits_for_nothing_with_a_history():
    config = TrainConfig(batch_size=100, compile=False, history=3, user_dropout=0.3, **SHAPE)
    batches, step = planted(torch.device("cpu"), config, history=3, item_bias=True)
    with Watch():
        loss, samples = run_epoch(batches, step, 0)
    assert 0.6 < loss / samples < 0.8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:Synchronization debug mode")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_waits_for_nothing_with_shared_negatives_on_a_gpu(compiled):
    recipe = {"factors": 4, "history": 3, "shared_negatives": 5, "batch_size": 20, "compile": compiled}
    shape = {"layers": (), "history": 3, "item_bias": True}
    batches, step = planted(torch.device("cuda"), TrainConfig.from_recipe(**recipe), **shape)
    run_epoch(batches, step, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_epoch(batches, step, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_waits_for_nothing_in_an_epoch_on_a_gpu(precision, compiled):
    config = TrainConfig(batch_size=100, precision=precision, compile=compiled, **SHAPE)
    batches, step = planted(torch.device("cuda"), config)
    run_epoch(batches, step, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, samples = run_epoch(batches, step, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0.5 < loss.item() / int(samples) < 0.8


@pytest.mark.parametrize("loss_scale", ["dynamic", 8192.0])
def test_a_step_that_overflows_changes_nothing_but_the_scale(loss_scale):
    batches, step = planted(torch.device("cpu"), TrainConfig(precision="fp16", loss_scale=loss_scale, **SHAPE))
    assert step.optimizer._step_supports_amp_scaling  # or the scaler would look at the overflow on the host
    run_epoch(batches, step, 0)
    step.scaler.update(2.0**60)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    batch = next(batches.epoch(torch.Generator().manual_seed(1)))
    step(batch, None)
    assert all(map(torch.equal, before, step.model.parameters()))
    assert step.scaler.get_scale() == (2.0**59 if loss_scale == "dynamic" else loss_scale)
    step.scaler.update(8192.0)
    step(batch, None)
    assert not any(map(torch.equal, before, step.model.parameters()))


def test_a_rank_may_begin_with_an_empty_batch_in_fp16():
    _, step = planted(torch.device("cpu"), TrainConfig(precision="fp16", **SHAPE))
    nothing = torch.zeros(0, dtype=torch.int32)
    assert step.gradients(Batch(nothing, nothing.reshape(0, 5), None, 0), None) == 0
    assert step.scaler.get_scale() == 65536


@pytest.mark.parametrize(("batch_size", "weighted"), [(25, False), (35, True)])
def test_padded_batches_are_all_weighted_or_none_so_that_they_are_one_graph(batch_size, weighted):
    users = torch.arange(20, dtype=torch.int32)
    batches = Batches(Sequence(users, users % 9), 20, 9, TrainConfig(batch_size=batch_size), pad=True)
    found = list(batches.epoch(torch.Generator().manual_seed(0)))
    assert {batch.weights is not None for batch in found} == {weighted}
    assert {batch.candidates.shape for batch in found} == {(batch_size // 5, 5)}
    assert sum(int(batch.samples) for batch in found) == 100


@pytest.mark.slow
def test_a_compiled_epoch_is_one_graph_and_stays_it(monkeypatch):
    monkeypatch.setattr("ncf.model.neumf.drop", lambda x, dropout, _: functional.dropout(x, dropout))  # a GPU's
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = TrainConfig(batch_size=100, compile=True, **SHAPE)
    batches, step = planted(torch.device("cpu"), config)
    own = step.gradients.forward
    step.gradients.forward = lambda *given: own(*given[:-1], None)  # a GPU's step is given no generator
    for seed in range(3):
        run_epoch(batches, step, seed)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
