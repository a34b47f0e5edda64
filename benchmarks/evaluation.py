"""Evaluation and one user's list against the usual way, in one run.

    python benchmarks/evaluation.py            # sampled at ml-20m's size, the whole catalogue at ml-1m's, latency
    python benchmarks/evaluation.py --rounds 5

The usual way is the usual model (peers/usual.py) on user-item pairs, in batches of the recipe's 1,048,576 pairs and in
smaller ones (of the whole catalogue, user by user); then a comparison with the positive's score. Ours is
`ncf.ranking.evaluate`, all that it does included. Sides take turns; ratios are taken within a round. Weights are
random: time does not depend on them.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ncf.data.unseen import UnseenItems, evaluation_negatives
from ncf.device import configure_cpu, device_name
from ncf.model.neumf import NeuMF
from ncf.ranking.eval_set import EvalSet
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer
from ncf.ranking.topk import top_items

sys.path.insert(0, str(Path(__file__).parent))
from peers.usual import UsualNeuMF

PAIRS = 1_048_576  # the recipe's batch
FEW_PAIRS = 16_384  # nearer to what a CPU's cache holds
ML_20M = 138_493, 26_744, 20_000_263
ML_1M = 6_040, 3_706, 1_000_209


def random_eval_set(users: int, items: int, interactions: int, negatives: int | None, evaluated: int) -> EvalSet:
    """An evaluation set on random pairs: the first `evaluated` users, each with a random positive."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(n, (interactions,), generator=generator) for n in (users, items)]
    unseen = UnseenItems(*pairs, users, items)
    who = torch.arange(evaluated)
    positives = unseen.item_at(who, torch.zeros(evaluated, 1, dtype=torch.int64)).squeeze(1)
    drawn = None if negatives is None else evaluation_negatives(unseen, who, negatives, 0).int()
    candidates = items if negatives is None else 1 + negatives
    pairs_scored = evaluated * candidates
    return EvalSet("test", who, positives, unseen, drawn, "random pairs", 0, evaluated, candidates, pairs_scored)


@torch.no_grad()
def usual_sampled(model: UsualNeuMF, eval_set: EvalSet, pairs: int) -> Tensor:
    """The rank of each user's positive among the negatives, in batches of about so many pairs."""
    candidates = torch.cat([eval_set.positives.unsqueeze(1), eval_set.negatives.long()], 1)
    ranks, step = [], pairs // candidates.shape[1]
    for at in range(0, len(eval_set.users), step):
        items = candidates[at : at + step]
        users = eval_set.users[at : at + step].unsqueeze(1).expand_as(items)
        scores = model(users.flatten(), items.flatten()).view(items.shape)
        ranks.append((scores[:, 1:] >= scores[:, :1]).sum(1) + 1)
    return torch.cat(ranks)


@torch.no_grad()
def usual_full(model: UsualNeuMF, eval_set: EvalSet, pairs: int) -> Tensor:
    """The rank of each user's positive among all items that the user has not seen."""
    n_items = eval_set.unseen.n_items
    ranks, step = [], max(1, pairs // n_items)
    for at in range(0, len(eval_set.users), step):
        users = eval_set.users[at : at + step]
        items = torch.arange(n_items).repeat(len(users))
        scores = model(users.repeat_interleave(n_items), items).view(len(users), n_items)
        positive = scores.gather(1, eval_set.positives[at : at + step].unsqueeze(1))
        scores[eval_set.unseen.seen(users)] = -torch.inf
        ranks.append((scores >= positive).sum(1) + 1)
    return torch.cat(ranks)


def compare(title: str, sides: dict[str, Callable[[], object]], pairs: dict[str, int], rounds: int) -> None:
    """Run the sides in turn; print pairs/s and the ratio to each of the others of the last side, ours."""
    for run in sides.values():
        run()
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            speeds[name].append(pairs[name] / (time.perf_counter() - begin))
    print(f"\n{title}")
    ours = list(sides)[-1]
    for name, found in speeds.items():
        ratios = [b / a for a, b in zip(found, speeds[ours], strict=True)]
        line = f"{name:<44} {statistics.median(found):>10,.0f} pairs/s [{min(found):,.0f} to {max(found):,.0f}]"
        if name != ours:
            line += f"   ncf is {statistics.median(ratios):.2f} times as fast [{min(ratios):.2f} to {max(ratios):.2f}]"
        print(line, flush=True)


def sampled(rounds: int) -> None:
    """99 negatives a user at ml-20m's size."""
    users, items, interactions = ML_20M
    few, many = (random_eval_set(users, items, interactions, 99, n) for n in (users // 7, users))
    usual, scorer = UsualNeuMF(users, items).eval(), NeuralScorer(NeuMF(users, items))
    compare(
        f"sampled evaluation, {users:,} users x 100 candidates (the usual way: {len(few.users):,} users)",
        {
            f"usual, {PAIRS:,} pairs at a time": lambda: usual_sampled(usual, few, PAIRS),
            f"usual, {FEW_PAIRS:,} pairs at a time": lambda: usual_sampled(usual, few, FEW_PAIRS),
            "ncf": lambda: evaluate(scorer, many, k=10),
        },
        {
            f"usual, {PAIRS:,} pairs at a time": few.pairs,
            f"usual, {FEW_PAIRS:,} pairs at a time": few.pairs,
            "ncf": many.pairs,
        },
        rounds,
    )


def full(rounds: int) -> None:
    """The whole catalogue at ml-1m's size."""
    users, items, interactions = ML_1M
    few, many = (random_eval_set(users, items, interactions, None, n) for n in (users // 10, users))
    usual, scorer = UsualNeuMF(users, items).eval(), NeuralScorer(NeuMF(users, items))
    compare(
        f"the whole catalogue, {items:,} items (ml-1m's), {len(few.users)} users as usual, {len(many.users)} ours",
        {
            f"usual, {PAIRS:,} pairs at a time": lambda: usual_full(usual, few, PAIRS),
            "usual, user by user": lambda: usual_full(usual, few, items),
            "ncf": lambda: evaluate(scorer, many, k=10),
        },
        {f"usual, {PAIRS:,} pairs at a time": few.pairs, "usual, user by user": few.pairs, "ncf": many.pairs},
        rounds,
    )


def latency(requests: int) -> None:
    """One user's best 10 of ml-20m's items, those seen left out, on one core."""
    users, items, interactions = ML_20M
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    eval_set = random_eval_set(users, items, interactions, None, 1)
    scorer = NeuralScorer(NeuMF(users, items))
    taken = []
    for user in torch.randint(users, (requests + 10,), generator=torch.Generator().manual_seed(1)).split(1):
        begin = time.perf_counter()
        top_items(scorer.score_all(scorer.user_rows(user)), 10, eval_set.unseen.seen(user))
        taken.append(1000 * (time.perf_counter() - begin))
    taken = sorted(taken[10:])
    print(f"\none user's top 10 of {items:,} items, one core, {requests} requests")
    p99 = taken[math.ceil(0.99 * requests) - 1]
    print(f"p50 {statistics.median(taken):.1f} ms   p99 {p99:.1f} ms   least {taken[0]:.1f} ms")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that each side runs (default: 3)")
    parser.add_argument("--requests", type=int, default=300, help="requests for the latency (default: 300)")
    arguments = parser.parse_args()
    configure_cpu()
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, fp32")
    print(f"load at the start {os.getloadavg()[0]:.1f}")
    sampled(arguments.rounds)
    full(arguments.rounds)
    latency(arguments.requests)


if __name__ == "__main__":
    main()
