"""What three ranks compute together. Each writes to a JSON file what it found, or the traceback, under a name.

    WORLD_SIZE=3 RANK=... python worker.py DATA RUN OUTPUT

A computation has collectives of its own, which wait for seconds alone: one that fails spoils no other.
"""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from ncf.config import RunConfig, TrainConfig
from ncf.cpu.gradients import CpuGradients
from ncf.cpu.user_side import grad_of
from ncf.data.shard import Shard, load_dataset
from ncf.errors import InputError
from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.parallel.environment import process_env
from ncf.parallel.group import SINGLE, ProcessGroup, join
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer
from ncf.recommender import Recommender
from ncf.runs.run import BEST, DEPLOY, LAST, RunDirectory
from ncf.runs.start import start_run
from ncf.training.allreduce import AllReduce
from ncf.training.autograd import AutogradGradients
from ncf.training.step import Step, make_loss
from ncf.training.train import train
from ncf.training.trainer import Trainer

DATA, RUN, OUTPUT = map(Path, sys.argv[1:])
WAIT = timedelta(seconds=20)  # for a rank that failed
USERS, ITEMS = 12, 9
NEGATIVES: list[int | str] = [12, "all"]
BORDERS = {  # number of ranks -> name -> borders of the ranks' users
    2: {"two": [0, 4, 12]},
    3: {
        "three": [0, 5, 9, 12],
        "one without users": [0, 5, 5, 12],
        "one without rows": [0, 1, 7, 12],  # user 0 is not in the batch
    },
}
SHAPES: list[dict[str, Any]] = [
    {"factors": 5, "layers": (8, 6, 4)},
    {"factors": 0, "layers": (8, 6)},
    {"layers": ()},
    {"factors": 5, "layers": (8, 6), "history": 4, "item_bias": True},
]
SHARED: dict[str, Any] = {"layers": (), "history": 4, "ordered": False, "item_bias": True}  # with shared negatives


def whole_model(shape: dict[str, Any]) -> NeuMF:
    model = NeuMF(USERS, ITEMS, dropout=0.0, **shape).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


def gradients_of(
    model: NeuMF, group: ProcessGroup, batch: Batch, rows: slice = slice(None), *, by_hand: bool = True
) -> list[Tensor]:
    """The gradients after a step; of the user table its `rows` alone."""
    shared = 0 if batch.shared is None else len(batch.shared)
    config = TrainConfig(dropout=0.0, loss="softmax" if shared else "bce", shared_negatives=shared)
    loss, scaler = make_loss(config, ITEMS), torch.amp.GradScaler("cpu", enabled=False)
    on_cpu = CpuGradients(model, loss, torch.float64)
    compute = on_cpu if by_hand else AutogradGradients(model, loss, torch.float64, config, scaler)
    Step(model, config, group, gradients=compute)(batch, None)
    return [grad_of(one)[rows if name in model.BY_USER else ...] for name, one in model.named_parameters()]


def gradient_error(
    group: ProcessGroup, borders: list[int], shape: dict[str, Any], weighted: bool, by_hand: bool
) -> float:
    """How far the ranks' gradients are from one process's on the same batch, at most."""
    generator = torch.Generator().manual_seed(5)
    users = torch.randint(1, USERS, (31,), generator=generator, dtype=torch.int32).sort().values
    candidates = torch.randint(ITEMS, (31, 5), generator=generator, dtype=torch.int32)
    weights = (torch.rand(31, 5, generator=generator) > 0.3).double() if weighted else torch.ones(31, 5).double()
    first, end = borders[group.rank : group.rank + 2]
    batch = Batch(users, candidates, weights, int(weights.sum()))
    if "history" in shape:
        history = torch.randint(-1, ITEMS, (31, 4), generator=generator)
        batch = batch._replace(history=history, hidden=torch.rand(31, generator=generator) < 0.3)
    if shape is SHARED:
        seen = torch.rand(31, 6, generator=generator) < 0.2
        batch = batch._replace(shared=torch.arange(6), shared_seen=seen)
    expected = gradients_of(whole_model(shape), SINGLE, batch, slice(first, end))
    model = NeuMF(end - first, ITEMS, dropout=0.0, user_offset=first, **shape).double()
    state = whole_model(shape).state_dict()
    model.load_state_dict({**state, "user_embedding": state["user_embedding"][first:end]})
    mine = slice(*torch.searchsorted(users, torch.tensor([first, end], dtype=users.dtype)).tolist())
    batch = batch.rows(mine)._replace(users=users[mine] - first, samples=int(weights[mine].sum()))
    found = gradients_of(model, group, batch, by_hand=by_hand)
    differences = [(ours - theirs).flatten() for ours, theirs in zip(found, expected, strict=True)]
    return float(torch.cat(differences).abs().max())


def gradients(group: ProcessGroup) -> dict[str, float]:
    cases = product(BORDERS[group.world].items(), [*SHAPES, SHARED], (False, True), (False, True))
    return {
        f"{name} {shape} weighted={weighted} by_hand={by_hand}": gradient_error(
            group, borders, shape, weighted, by_hand
        )
        for (name, borders), shape, weighted, by_hand in cases
    }


def overflow(group: ProcessGroup) -> dict[str, object]:
    """fp16 scaling, where one rank's own gradients overflow in the first of two steps."""
    model, config = NeuMF(4, ITEMS, factors=4, layers=(8, 6), dropout=0.0), TrainConfig(dropout=0.0, precision="fp16")
    step = Step(model, config, group, samples=60)
    step.gradients = AutogradGradients(model, step.loss, torch.float32, config, step.scaler, step.divisor)
    batch = Batch(torch.arange(4), torch.randint(ITEMS, (4, 5)), None, 20)
    before = [parameter.clone() for parameter in model.parameters()]
    spoil = model.user_embedding.register_hook(lambda grad: grad * (torch.inf if group.rank == 1 else 1))
    step(batch, None)
    skipped = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scale = step.scaler.get_scale()
    spoil.remove()
    step(batch, None)
    went_on = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return {"skipped": skipped, "scale": scale, "went_on": went_on}


def count(group: ProcessGroup) -> float:
    """The sum of counts that fp32 cannot hold."""
    model = NeuMF(1, 1, factors=1, layers=())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return float(AllReduce(model, group)(2**24 + 1, check_overflow=False))


def sent(group: ProcessGroup) -> int:
    """The bytes that a rank gives in a step."""
    step, before = Step(NeuMF(4, ITEMS, factors=4, layers=(8, 6)), TrainConfig(), group), group.sent
    step(Batch(torch.arange(4), torch.randint(ITEMS, (4, 5)), None, 20), torch.Generator())
    return group.sent - before


def scores(group: ProcessGroup) -> list[dict[str, Any]]:
    run = RunDirectory.open(RUN, group)
    model, _ = run.load_model(BEST)
    eval_sets = [make_eval_set(run.dataset, split, n, group) for split in ("test", "validation") for n in NEGATIVES]
    scorer = NeuralScorer(model)
    return [evaluate(scorer, one, k=5, group=group).to_dict() | {"pairs": one.pairs} for one in eval_sets]


def shard(group: ProcessGroup) -> list[int]:
    """The range of users, and the user of each interaction."""
    mine = load_dataset(DATA, group).interactions
    return [mine.user_offset, mine.user_offset + mine.n_users, *mine.train_users.tolist()]


def files(group: ProcessGroup) -> None:
    """What the run holds, written again."""
    run = RunDirectory.open(RUN, group)
    model, state = run.load_model(BEST)
    run.save(DEPLOY, model.state_dict(), state)
    copy = RUN.parent / "copy"
    if group.is_main:
        copy.mkdir()
    start_run(copy, run.config, load_dataset(DATA, group), resume=False, overwrite=False, group=group)


def with_empty_ranks(group: ProcessGroup) -> dict[str, object]:
    """Train, resume, train for deployment and evaluate where some rank has no users."""
    config = TrainConfig(factors=4, layers=(8, 6), batch_size=30, valid_negative=6, topk=3, fit_all=True)
    found: dict[str, object] = {}
    for name in ("middle", "first", "few"):
        dataset, path = load_dataset(RUN.parent / name, group), str(RUN.parent / f"{name} run")
        for epochs in (1, 2):
            run = RunConfig(checkpoint_dir=path, device="cpu", resume=epochs == 2)
            result = train(dataset, config.replaced(epochs=epochs), run, group=group)
        evaluated = Recommender._load(path, "cpu", BEST, group).evaluate().to_dict()
        negatives = dataset.interactions.negatives
        found[name] = {
            "users": dataset.interactions.n_users,
            "test": result.test,
            "evaluated": evaluated,
            "given": None if negatives is None else list(negatives.shape),
        }
    return found


def moments(group: ProcessGroup) -> None:
    """An epoch, then weights and moments twice: together, as a run's `last`, and each rank's own in a file."""
    path = RUN.parent / "moments"
    run = RunDirectory.open(path, group)
    mine = run.dataset.interactions
    trainer = Trainer(run.new_model(), mine.sequence(), run.config, torch.device("cpu"), "train", group)
    trainer.epoch(1)
    tensors, values = trainer.state()
    run.save(LAST, tensors, values)
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, path / f"own.{group.rank}")


def complaint(call: Callable[[], object]) -> str | None:
    try:
        call()
    except InputError as error:
        return str(error)
    return None


def differing(group: ProcessGroup) -> dict[str, object]:
    """What is said where one rank has other options, another dataset or an earlier file."""
    dataset = load_dataset(DATA, group)
    assert isinstance(dataset, Shard)
    other = replace(dataset, fingerprint="another") if group.rank == 1 else dataset
    run = RunConfig(checkpoint_dir=str(RUN.parent / "never"), device="cpu")
    recommender = Recommender._load(RUN, "cpu", BEST, group)
    here = RunDirectory.open(RUN.parent / "stale" if group.rank == 1 else RUN, group)
    return {
        "options": complaint(lambda: train(dataset, TrainConfig(seed=int(group.rank == 2)), run, group=group)),
        "dataset": complaint(lambda: train(other, TrainConfig(), run, group=group)),
        "evaluation": complaint(lambda: recommender.evaluate(topk=3 + (group.rank == 1))),
        "file": complaint(lambda: here.load(BEST)),
    }


def words(group: ProcessGroup) -> list[object]:
    return [group.broadcast(lambda: "é" * 70_000) == "é" * 70_000, group.all_gather(group.rank), group.all_sum(1, 2)]


COMPUTATIONS: dict[str, tuple[int, Callable[[ProcessGroup], object]]] = {  # name -> number of ranks, and what they do
    "gradients of two": (2, gradients),
    "gradients of three": (3, gradients),
    "overflow": (3, overflow),
    "count": (3, count),
    "sent": (2, sent),
    "scores of one": (1, scores),
    "scores of two": (2, scores),
    "scores of three": (3, scores),
    "shard": (3, shard),
    "files": (3, files),
    "empty": (3, with_empty_ranks),
    "moments": (3, moments),
    "differing": (3, differing),
    "words": (3, words),
}


def compute_all() -> None:
    env = process_env()
    found: dict[str, dict[str, object]] = {}
    with join(env) as everyone:
        for name, (world, compute) in COMPUTATIONS.items():
            some = dist.new_group(list(range(world)), timeout=WAIT)
            if env.rank < world:
                group = ProcessGroup(replace(env, world=world), connected=True, group=some) if world > 1 else SINGLE
                try:
                    found[name] = {"result": compute(group)}
                except Exception:  # noqa: BLE001 -- the test of that name shows it
                    found[name] = {"traceback": traceback.format_exc()}
            everyone.barrier()
    Path(f"{OUTPUT}.{env.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_all()
