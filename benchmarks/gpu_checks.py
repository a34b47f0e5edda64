"""Whether the training step is right on a device: `gpu.py` runs these before it measures. Needs torch alone."""

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ncf.config import TrainConfig
from ncf.cpu.gradients import CpuGradients
from ncf.data.interactions import Sequence
from ncf.errors import InputError
from ncf.model.neumf import NeuMF
from ncf.model.products import DTYPES
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.training.autograd import AutogradGradients, check_compile, wants_compile
from ncf.training.batches import Batches
from ncf.training.step import Step

GRADIENT_ERRORS = {"fp32": 1e-4, "bf16": 1e-1, "fp16": 5e-2}  # the most, relative to a parameter's gradient
LOSS_SCALE = 1024.0
EPOCHS = 16  # trained in a check, at a rate that gets far in so few
WAITS = "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave"  # the host awaits these

failures: list[str] = []


def check(name: str, function: Callable[[], str]) -> None:
    """Run a check and print its figure; it fails by raising."""
    begin = time.perf_counter()
    try:
        verdict, figure = "ok", function()
    except Exception as error:  # noqa: BLE001 - one failure must not keep the rest from being seen
        verdict, figure = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
        failures.append(name)
    print(f"{verdict:<7}{name}: {figure}  [{time.perf_counter() - begin:.1f} s]", flush=True)


def require(condition: bool, figure: str) -> str:
    """The figure, where the condition holds."""
    if not condition:
        raise AssertionError(figure)
    return figure


# a small problem, with an answer planted in it


class Planted:
    """Users who like every eighth of 256 items and have seen 20 of those; the last user has seen them all."""

    items = 256

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # a GPU's check is of the real widths, at which the products go to the tensor cores; a CPU's is a trial
        on_gpu = device.type == "cuda"
        self.users, self.batch_size = (512, 8_192) if on_gpu else (128, 2_048)
        self.widths: dict[str, Any] = {} if on_gpu else {"factors": 8, "layers": (16, 16, 8)}
        generator = torch.Generator().manual_seed(0)
        liked = torch.stack([torch.randperm(32, generator=generator)[:20].sort().values for _ in range(self.users - 1)])
        who = torch.arange(self.users - 1).unsqueeze(1)
        users = torch.cat([who.expand(-1, 20).flatten(), torch.full((self.items,), self.users - 1)])
        items = torch.cat([(liked * 8 + who % 8).flatten(), torch.arange(self.items)])
        self.pairs = users.int().to(device), items.int().to(device)

    def config(self, precision: str, dropout: float = 0.0, **options: Any) -> TrainConfig:
        """Options of a run on it."""
        return TrainConfig(
            batch_size=self.batch_size,
            learning_rate=0.01,
            precision=precision,
            dropout=dropout,
            **self.widths,
            **options,
        )

    def batches(self, config: TrainConfig) -> Batches:
        """Its batches."""
        return Batches(Sequence(*self.pairs), self.users, self.items, config, pad=wants_compile(config, self.device))

    def step(self, config: TrainConfig, group: ProcessGroup = SINGLE, spread: float = 1) -> Step:
        """A step on a new model, of embeddings so many times wider than usual; by autograd on a CPU too."""
        model = NeuMF(self.users, self.items, dropout=config.dropout, **self.widths).to(self.device)
        with torch.no_grad():
            model.user_embedding.mul_(spread)
            model.item_embedding.mul_(spread)
        step = Step(model.train(), config, group, samples=self.batches(config).samples)
        if isinstance(step.gradients, CpuGradients):
            dtype = DTYPES[config.precision]
            step.gradients = AutogradGradients(step.model, step.loss, dtype, config, step.scaler, step.divisor)
        return step

    def generator(self, seed: int) -> torch.Generator:
        """A random stream on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def train(self, step: Step, batches: Batches, epochs: Iterable[int]) -> Tensor:
        """The mean loss of a sample in each epoch, left on the device."""
        means = []
        for epoch in epochs:
            generator = self.generator(epoch)
            total, samples = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
            for batch in batches.epoch(generator):
                total = total + step(batch, generator)
                samples = samples + batch.samples
            means.append(total / samples)
        return torch.stack(means)


# the checks


def gradient_error(planted: Planted, precision: str, group: ProcessGroup = SINGLE, **options: Any) -> str:
    """The largest error of a parameter's gradient, against autograd in float64 on the CPU."""
    step = planted.step(planted.config(precision, loss_scale=LOSS_SCALE, **options), group, spread=20)
    reference = copy.deepcopy(step.model).cpu().double()
    batch = next(planted.batches(planted.config(precision)).epoch(planted.generator(0)))
    step(batch, None)
    weights = None if batch.weights is None else batch.weights.cpu().double()
    logits = reference(batch.users.cpu(), batch.candidates.cpu(), torch.float64)
    torch.autograd.backward(step.loss.value(logits, weights) / int(batch.samples))
    error = 0.0
    for ours, theirs in zip(step.model.parameters(), reference.parameters(), strict=True):
        found, expected = ours.grad.cpu().double(), theirs.grad
        if precision == "fp16" and found.norm() > LOSS_SCALE / 4 * expected.norm():  # which the fused Adam may leave
            found /= LOSS_SCALE
        error = max(error, float((found - expected).norm() / expected.norm()))
    return require(error < GRADIENT_ERRORS[precision], f"relative error {error:.1e} of {GRADIENT_ERRORS[precision]:g}")


def learns_alike(planted: Planted, precision: str, expected: list[float]) -> str:
    """Whether training ends where those in fp32 end."""
    found = curve(planted, precision)
    ends = statistics.mean(expected[-5:]), statistics.mean(found[-5:])
    figure = f"loss {found[0]:.4f} to {ends[1]:.4f}, in fp32 {expected[0]:.4f} to {ends[0]:.4f}"
    return require(abs(ends[1] / ends[0] - 1) < 0.1 and ends[0] < 0.6 * expected[0], figure)


def curve(planted: Planted, precision: str) -> list[float]:
    """The loss of each epoch."""
    config = planted.config(precision)
    losses: list[float] = planted.train(planted.step(config), planted.batches(config), range(EPOCHS)).tolist()
    return losses


def draws_are_unseen(planted: Planted) -> str:
    """Whether an epoch visits each pair once, and draws no negative that its user has touched."""
    users, items = planted.pairs
    touched = (users.long() * planted.items + items).sort().values
    seen, drawn = [], 0
    for batch in planted.batches(planted.config("fp32")).epoch(planted.generator(1)):
        keys = batch.users.long().unsqueeze(1) * planted.items + batch.candidates
        there = torch.ones_like(keys, dtype=torch.bool) if batch.weights is None else batch.weights > 0
        seen.append(keys[:, 0][there[:, 0]])
        negatives = keys[:, 1:][there[:, 1:]]
        drawn += len(negatives)
        require(not torch.isin(negatives, touched).any(), "a negative was touched")
    require(torch.equal(torch.cat(seen).sort().values, touched), "an epoch is not each pair once")
    return require(drawn == 4 * (planted.users - 1) * 20, f"{drawn:,} negatives, all unseen, of every pair once")


class Watch(TorchDispatchMode):
    """Fails on operations whose result the host would wait for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the operation pass, unless it is one of those."""
        masks = function.overloadpacket.__name__ == "index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if masks or function.overloadpacket.__name__ in WAITS:
            raise AssertionError(f"the host waits for {function}")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Within, a host that waits for the device is an error; on a CPU one that would."""
    if device.type == "cpu":
        with Watch():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def host_never_waits(planted: Planted, precision: str) -> str:
    """Whether epochs are queued without a look at a result; with dropout, and in fp16 with a dynamic loss scale."""
    config = planted.config(precision, dropout=0.5)
    step, batches = planted.step(config), planted.batches(config)
    first = planted.train(step, batches, range(1)).tolist()
    with no_waiting(planted.device):
        losses = planted.train(step, batches, range(1, EPOCHS))
    last = losses[-5:].mean().item()
    return require(
        last < 0.9 * first[0], f"{EPOCHS - 1} epochs without a wait, dropout on, loss {first[0]:.4f} to {last:.4f}"
    )


def one_graph(planted: Planted) -> str:
    """Whether two epochs of a compiled step, short last batches among them, are one graph without a break."""
    try:
        check_compile(TrainConfig(compile=True), planted.device)
    except InputError as error:
        return f"left out: {error}"
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    dropout = 0.5 if planted.device.type == "cuda" else 0.0  # a CPU's draws its own masks, outside a graph
    config = planted.config("fp32", dropout, compile=True)
    step, batches = planted.step(config), planted.batches(config)
    own = step.gradients.forward
    step.gradients.forward = lambda *given: own(*given[:-1], None)  # a GPU's step is given no generator
    losses = planted.train(step, batches, range(2)).tolist()
    graphs, breaks = torch._dynamo.utils.counters["stats"]["unique_graphs"], torch._dynamo.utils.counters["graph_break"]
    return require(graphs == 1 and not breaks, f"{graphs} graph, breaks {dict(breaks)}, loss {losses[-1]:.4f}")


def overflow_skips(planted: Planted, loss_scale: float | str) -> str:
    """Whether a step that overflows changes the parameters of nobody, and the next ones go on."""
    config = planted.config("fp16", loss_scale=loss_scale)
    step, batches = planted.step(config, spread=20), planted.batches(config)
    planted.train(step, batches, range(1))
    step.scaler.update(2.0**40)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step(next(batches.epoch(planted.generator(0))), None)
    same = all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    scale = step.scaler.get_scale()
    require(same and scale == (2.0**39 if loss_scale == "dynamic" else loss_scale), f"skipped {same}, scale {scale:g}")
    losses = planted.train(step, batches, range(EPOCHS)).tolist()
    figure = f"scale 2^40 skipped, then {scale:g}, at the end {step.scaler.get_scale():g}; loss to {losses[-1]:.4f}"
    return require(losses[-1] < losses[0] and torch.isfinite(torch.tensor(losses)).all().item() is True, figure)


def joined_is_alone(planted: Planted, precisions: Iterable[str]) -> str:
    """The gradient error of the path that several processes take, with a process group of one."""
    backend = "cpu:gloo,cuda:nccl" if planted.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = ProcessGroup(connected=True)
        found = [f"{precision} {gradient_error(planted, precision, group)}" for precision in precisions]
        backend = "nccl" if planted.device.type == "cuda" else "gloo"
        return f"{backend}, {'; '.join(found)}; {group.sent:,} bytes given to collectives"
    finally:
        dist.destroy_process_group()


def check_all(device: torch.device, precisions: Iterable[str]) -> None:
    """Every check."""
    planted, expected = Planted(device), list[float]()
    for precision in precisions:
        check(f"gradient, {precision}, against float64", lambda p=precision: gradient_error(planted, p))
        if wants_compile(TrainConfig(), device):
            check(f"the same, not compiled, {precision}", lambda p=precision: gradient_error(planted, p, compile=False))
    check("negatives", lambda: draws_are_unseen(planted))
    check("learning, fp32", lambda: expected.extend(curve(planted, "fp32")) or f"loss {expected[-1]:.4f}")
    for precision in [p for p in precisions if p != "fp32"]:
        check(f"learning, {precision}", lambda p=precision: learns_alike(planted, p, expected))
    for precision in precisions:
        check(f"the host never waits, {precision}", lambda p=precision: host_never_waits(planted, p))
    for scale in ("dynamic", 8192.0):
        check(f"fp16 overflow, loss scale {scale}", lambda s=scale: overflow_skips(planted, s))
    check("several processes' path", lambda: joined_is_alone(planted, precisions))
    check("compiled once", lambda: one_graph(planted))
