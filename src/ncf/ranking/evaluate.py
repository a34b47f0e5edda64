"""Score an evaluation set's candidates, rank the held-out items, aggregate: HR@k, NDCG@k, MRR."""

import warnings
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from ncf.errors import NcfWarning, RunError
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.ranking.eval_set import EvalSet
from ncf.ranking.metrics import Metrics, histogram, metrics_of, ranks_of
from ncf.ranking.scorer import Scorer

MAX_SCORES = 16_777_216  # scores held at a time when the whole catalogue is ranked: 64 MiB in fp32
TIES_WARNED = 0.01


@dataclass(frozen=True)
class Evaluation(Metrics):
    """Metrics and the protocol that they were obtained under."""

    split: str
    protocol: str
    negatives: int | str
    ties: float  # share of users whose held-out item ties with another candidate (ties count against it)
    skipped: int  # users who were not evaluated, as they have seen every item

    def to_dict(self) -> dict[str, int | float | str]:
        """What `ncf evaluate --json` prints."""
        values = asdict(self)
        k, hr, ndcg = (values.pop(name) for name in ("k", "hr", "ndcg"))
        return {f"hr@{k}": hr, f"ndcg@{k}": ndcg, **values}


def evaluate(
    scorer: Scorer,
    eval_set: EvalSet,
    *,
    k: int,
    users_per_batch: int = 5000,
    progress: bool = False,
    group: ProcessGroup = SINGLE,
) -> Evaluation:
    """Rank every user's held-out item among its candidates.

    Ties count against it. Of several processes each evaluates its own users, and the histograms of positions are
    summed. Raises RunError where a score is not finite.
    """
    if eval_set.negatives is None:
        users_per_batch = min(users_per_batch, max(1, MAX_SCORES // eval_set.unseen.n_items))
    counts = torch.zeros(eval_set.candidates + 1, dtype=torch.int64, device=eval_set.users.device)
    odd = torch.zeros(2, dtype=torch.int64, device=eval_set.users.device)  # users with a tie, and with a broken score
    starts = range(0, len(eval_set.users), users_per_batch)
    for at in tqdm(starts, desc="evaluate", unit="batch", leave=False, disable=not progress):
        part = slice(at, at + users_per_batch)
        rank, tie, finite = rank_batch(scorer, eval_set, part)
        counts += histogram(rank, eval_set.candidates)
        odd += torch.stack([tie.sum(), (~finite).sum()])
    found = group.all_reduce_(torch.cat([counts, odd]))
    counts, (tied, broken) = found[:-2], found[-2:].tolist()
    if broken:
        raise RunError(f"scores of {broken} of {eval_set.evaluated} users are not finite: try a lower learning rate")
    metrics = metrics_of(counts, k)
    negatives = "all" if eval_set.negatives is None else eval_set.negatives.shape[1]
    ties = tied / eval_set.evaluated
    return Evaluation(
        **vars(metrics),
        split=eval_set.split,
        protocol=eval_set.protocol,
        negatives=negatives,
        ties=ties,
        skipped=eval_set.skipped,
    )


def protocol_line(found: Evaluation, *, select_on: str, epoch: int) -> str:
    """What a score means: no HR stands without it."""
    chosen = {"validation": "the validation split", "test": "the test split itself", "last": "nothing (the last epoch)"}
    skipped = f" ({found.skipped} skipped)" if found.skipped else ""
    return (
        f"Protocol: the {found.split} item of {found.users} users{skipped} ranked with {found.protocol}, "
        f"k = {found.k}, ties count against it; epoch {epoch}, selected on {chosen[select_on]}"
    )


def warn_if_odd(evaluation: Evaluation, eval_set: EvalSet) -> None:
    """Warn of a cutoff that every candidate meets, and of many ties."""
    if evaluation.k >= eval_set.candidates:
        warnings.warn(
            f"k = {evaluation.k} is not below the {eval_set.candidates} candidates, so every held-out item is a hit: "
            "choose a smaller -k or more negatives",
            NcfWarning,
            stacklevel=2,
        )
    if evaluation.ties > TIES_WARNED:
        warnings.warn(
            f"{evaluation.ties:.1%} of the held-out items tie with another candidate, and a tie counts against them",
            NcfWarning,
            stacklevel=2,
        )


def rank_batch(scorer: Scorer, eval_set: EvalSet, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Rank, whether tied, and whether all scores are finite, of the users of a batch: [B] each."""
    users, positives = eval_set.users[part], eval_set.positives[part].unsqueeze(1)
    rows = scorer.user_rows(users, None if eval_set.history is None else eval_set.history[part])
    if eval_set.negatives is None:
        others = scorer.score_all(rows)
        positive = others.gather(1, positives).squeeze(1)
        counted = torch.ones_like(others, dtype=torch.bool)
        counted[eval_set.unseen.seen(users)] = False
    else:
        negatives = eval_set.negatives[part].long()
        scores = scorer.score(rows, torch.cat([positives, negatives.clamp(min=0)], 1))
        positive, others = scores[:, 0], scores[:, 1:]
        counted = negatives >= 0
    tie = ((others == positive.unsqueeze(1)) & counted).any(1)
    finite = torch.isfinite(others).all(1) & torch.isfinite(positive)
    return ranks_of(positive, others, counted), tie, finite
