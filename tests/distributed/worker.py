"""What three ranks do together; each rank runs this file, and the first writes what they found to a JSON file."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from ncf.config import RunConfig, TrainConfig
from ncf.data.part import load_dataset
from ncf.distributed import LostRankError, Ranks
from ncf.errors import InputError
from ncf.launch import place_here
from ncf.meeting import join
from ncf.model.checkpoint import BEST, DEPLOY, LAST, Run
from ncf.model.neumf import NeuMF
from ncf.model.start import start_run
from ncf.ranking.evaluate import evaluate
from ncf.ranking.exam import make_exam
from ncf.ranking.scoring import NeuralScorer
from ncf.recommender import Recommender
from ncf.training.cpu_step import CpuGradients
from ncf.training.reduction import Reduction
from ncf.training.step import Step
from ncf.training.train import train
from ncf.training.trainer import Trainer

USERS, ITEMS = 12, 9
BORDERS = {  # name: where each rank's users begin, and the end
    "two": [0, 4, 12],
    "three": [0, 5, 9, 12],
    "one without users": [0, 5, 5, 12],
    "one without rows": [0, 1, 7, 12],  # user 0 is not in the batch
}


def whole_model(shape: dict) -> NeuMF:
    model = NeuMF(USERS, ITEMS, dropout=0.0, **shape).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def make_step(model: NeuMF, config: TrainConfig, ranks: Ranks, by_hand: bool) -> Step:
    step = Step(model, config, ranks, 150)
    step.dtype = torch.float64
    step.cpu = CpuGradients(model, torch.float64) if by_hand else None
    return step


def gradient_error(ranks: Ranks, borders: list[int], shape: dict, *, weighted: bool, by_hand: bool) -> float:
    """How far the ranks' gradients are from one process's on the same batch, at most."""
    generator = torch.Generator().manual_seed(5)
    users = torch.randint(1, USERS, (31,), generator=generator, dtype=torch.int32).sort().values
    candidates = torch.randint(ITEMS, (31, 5), generator=generator, dtype=torch.int32)
    weights = (torch.rand(31, 5, generator=generator) > 0.3).double() if weighted else torch.ones(31, 5).double()
    config = TrainConfig(dropout=0.0)
    single = whole_model(shape)
    make_step(single, config, Ranks(), True)(users, candidates, weights, int(weights.sum()), None)
    first, end = borders[ranks.rank], borders[ranks.rank + 1]
    model = NeuMF(end - first, ITEMS, dropout=0.0, first_user=first, **shape).double()
    state = whole_model(shape).state_dict()
    model.load_state_dict({**state, "user_embedding": state["user_embedding"][first:end]})
    own = (users >= first) & (users < end)
    step = make_step(model, config, ranks, by_hand)
    step(users[own] - first, candidates[own], weights[own], int(weights[own].sum()), None)
    errors = [0.0]
    for (name, ours), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        expected = theirs.grad[first:end] if name == "user_embedding" else theirs.grad
        assert expected.shape == ours.grad.shape
        errors += (expected - ours.grad).abs().flatten().tolist()
    return max(errors)


def gradients(ranks: Ranks, two: Ranks | None) -> dict[str, float]:
    found = {}
    for name, borders in BORDERS.items():
        group = ranks if len(borders) == 4 else two
        for shape in ({"factors": 5, "layers": (8, 6, 4)}, {"factors": 0, "layers": (8, 6)}, {"layers": ()}):
            for weighted in (False, True):
                for by_hand in (False, True):
                    key = f"{name} {shape} weighted={weighted} by_hand={by_hand}"
                    if group is not None:
                        found[key] = gradient_error(group, borders, shape, weighted=weighted, by_hand=by_hand)
    return found


def overflow(ranks: Ranks) -> dict[str, object]:
    """fp16 scaling, where one rank's own gradients overflow in the first of two steps."""
    model = NeuMF(4, ITEMS, factors=4, layers=(8, 6), dropout=0.0)
    step = Step(model, TrainConfig(dropout=0.0, precision="fp16"), ranks, 60)
    step.cpu, step.dtype = None, torch.float32
    users, candidates = torch.arange(4), torch.randint(ITEMS, (4, 5))
    before = [parameter.clone() for parameter in model.parameters()]
    spoil = model.user_embedding.register_hook(lambda grad: grad * (torch.inf if ranks.rank == 1 else 1))
    step(users, candidates, None, 20, None)
    skipped = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    scale = step.scaler.get_scale()
    spoil.remove()
    step(users, candidates, None, 20, None)
    went_on = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return {"skipped": skipped, "scale": scale, "went_on": went_on}


def count(ranks: Ranks) -> float:
    """A count that fp32 cannot hold."""
    model = NeuMF(1, 1, factors=1, layers=())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return float(Reduction(model, ranks)(2**24 + 1, check_overflow=False)) - 3 * (2**24 + 1)


def scores(ranks: Ranks, path: Path) -> list[dict]:
    run = Run.open(path, ranks)
    model, _ = run.load_model(BEST)
    found = []
    for split in ("test", "validation"):
        for negatives in (12, "all"):
            exam = make_exam(run.dataset, split, negatives, ranks)
            found.append(evaluate(NeuralScorer(model), exam, k=5, ranks=ranks).to_dict() | {"pairs": exam.pairs})
    return found


def sent(two: Ranks) -> int:
    """The bytes that a rank of two gives in a real step."""
    model = NeuMF(4, ITEMS, factors=4, layers=(8, 6))
    step, before = Step(model, TrainConfig(), two), two.sent
    step(torch.arange(4), torch.randint(ITEMS, (4, 5)), None, 20, torch.Generator())
    return two.sent - before


def with_empty_ranks(ranks: Ranks, folder: Path) -> dict[str, object]:
    """Train, resume, train for deployment and evaluate where some rank has no users."""
    options = {"factors": 4, "layers": (8, 6), "batch_size": 30, "valid_negative": 6, "topk": 3, "fit_all": True}
    found: dict[str, object] = {}
    for name in ("middle", "first", "few"):
        part, path = load_dataset(folder / name, ranks), str(folder / f"{name} run")
        for epochs in (1, 2):
            run = RunConfig(checkpoint_dir=path, device="cpu", resume=epochs == 2)
            result = train(part, TrainConfig(epochs=epochs, **options), run, ranks=ranks)
        recommender = Recommender.load(path, device="cpu", weights=BEST, ranks=ranks)
        negatives = recommender.dataset.negatives
        found[name] = {
            "users": part.n_users,
            "test": result.test,
            "evaluated": recommender.evaluate().to_dict(),
            "given": None if negatives is None else list(negatives.shape),
        }
    return found


def save_state(ranks: Ranks, path: Path) -> None:
    """An epoch, then weights and moments twice: together, as a run's `last`, and each rank's own in a file."""
    run = Run.open(path, ranks)
    part = run.dataset
    trainer = Trainer(
        run.new_model(), part.train_users, part.train_items, run.config, torch.device("cpu"), "train", ranks
    )
    trainer.epoch(1)
    tensors, values = trainer.state()
    run.save(LAST, tensors, values)
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, path / f"own.{ranks.rank}")


def complaint(call: Callable[[], object]) -> str | None:
    try:
        call()
    except InputError as error:
        return str(error)
    return None


def differing(ranks: Ranks, data: Path, path: Path) -> dict[str, object]:
    """What is said where one rank has other options, another dataset or an earlier file."""
    part = load_dataset(data, ranks)
    run = RunConfig(checkpoint_dir=str(path.parent / "never"), device="cpu")
    recommender = Recommender.load(path, device="cpu", weights=BEST, ranks=ranks)
    other = replace(part, mark="another") if ranks.rank == 1 else part
    here = Run.open(path.parent / "stale" if ranks.rank == 1 else path, ranks)
    return {
        "options": complaint(lambda: train(part, TrainConfig(seed=int(ranks.rank == 2)), run, ranks=ranks)),
        "dataset": complaint(lambda: train(other, TrainConfig(), run, ranks=ranks)),
        "evaluation": complaint(lambda: recommender.evaluate(topk=3 + (ranks.rank == 1))),
        "file": complaint(lambda: here.load(BEST)),
    }


def lost(ranks: Ranks) -> dict[str, object]:
    """Rank 2 dies; what do the others hear of it, after how long, and say?"""
    ranks.wait()
    if ranks.rank == 2:
        os._exit(9)
    start = time.monotonic()
    try:
        ranks.sums(1)
    except LostRankError as error:
        return {"seconds": time.monotonic() - start, "said": ranks.spoken(f"error: {error}", error)}
    raise AssertionError


def work(ranks: Ranks, data: Path, path: Path) -> dict[str, object]:
    group = dist.new_group([0, 1])
    two = Ranks(ranks.rank, 2, joined=True, group=group) if ranks.rank < 2 else None
    found: dict[str, object] = {"gradients": gradients(ranks, two), "overflow": overflow(ranks), "count": count(ranks)}
    found["sent"] = sent(two) if two else None
    found["scores of three"] = scores(ranks, path)
    found["scores of two"] = scores(two, path) if two else None
    part = load_dataset(data, ranks)
    found["part"] = [part.first, part.end, part.n_train, *part.train_users.tolist()]
    run = Run.open(path, ranks)
    assert torch.equal(run.dataset.train_items, part.train_items)
    assert torch.equal(run.dataset.test_items, part.test_items)
    model, state = run.load_model(BEST)
    run.save(DEPLOY, model.state_dict(), state)
    copy = path.parent / "copy"
    if ranks.first:
        copy.mkdir()
    start_run(copy, run.config, part, resume=False, overwrite=False, ranks=ranks)
    found["empty"] = with_empty_ranks(ranks, path.parent)
    save_state(ranks, path.parent / "middle run")
    found["differing"] = differing(ranks, data, path)
    found["all"] = ranks.from_first(lambda: "é" * 70_000) == "é" * 70_000 and ranks.every(ranks.rank) == [0, 1, 2]
    return found


def run_all() -> None:
    data, path, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with join(place_here()) as ranks:
        found = work(ranks, data, path)
        if ranks.rank == 2:
            output.with_suffix(".2").write_text(json.dumps(found))
        found |= lost(ranks)
        output.with_suffix(f".{ranks.rank}").write_text(json.dumps(found))
        os._exit(0)  # there is nobody left to part from


if __name__ == "__main__":
    run_all()
