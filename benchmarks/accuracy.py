"""HR@10 and NDCG@10 of trained runs beside popularity, EASE and ALS, on one dataset and one evaluation set.

    ncf train --data data/ml1m --checkpoint-dir runs/ml1m-0 --seed 0      # and further seeds
    python benchmarks/accuracy.py runs/ml1m-0 runs/ml1m-1 runs/ml1m-2
    python benchmarks/accuracy.py runs/ml1m-0 --valid-negative all

ALS needs implicit and scipy (`peers/als.txt` has the versions); without implicit it is left out.

EASE (Steck 2019) and ALS (Hu, Koren and Volinsky 2008) fit the training rows. Their options are those of the grids
below with the best NDCG@10 on validation. At test each reads the validation item as well, as the runs do: EASE in the
user's row, ALS by computing the user's factors again. `ahead` is the runs' mean less the baseline, paired by user: the
standard error is over users, each with its mean over the runs.
"""

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncf.data.interactions import Interactions
from ncf.device import configure_cpu
from ncf.ranking.eval_set import EvalSet, make_eval_set
from ncf.ranking.evaluate import rank_batch
from ncf.ranking.scorer import NeuralScorer, PopularityScorer, Scorer
from ncf.runs.run import BEST, RunDirectory

K = 10
USERS = 500  # scored at a time
LARGEST_EASE = 20_000  # items: 3 GiB in float64, and as much again for the inverse
EASE_PENALTIES = (30, 100, 300, 1000, 3000)
ALS_GRID = {"factors": (32, 64, 128), "regularization": (0.05, 1.0, 10.0), "alpha": (1.0, 5.0, 20.0)}


@dataclass
class MatrixScorer:
    """Scores `left[u] @ right.T`; the rows of users are those of `left`."""

    left: Tensor  # [U, D], may be sparse
    right: Tensor  # [I, D]

    def user_rows(self, users: Tensor, history: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as a Scorer
        """Scores [B, I]: `score` takes some of them."""
        rows = self.left.index_select(0, users)
        return (rows.to_dense() if rows.is_sparse else rows) @ self.right.T

    def score(self, rows: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C]."""
        return rows.gather(1, items)

    def score_all(self, rows: Tensor) -> Tensor:
        """Scores [B, I] of the whole catalogue."""
        return rows


Fit = Callable[[str], Scorer]  # a fitted model's scorer, for the `validation` or the `test` split


def read_by(split: str, mine: Interactions) -> tuple[Tensor, Tensor]:
    """The users and items of the rows that a method may read when it ranks a split."""
    rows = mine.sequence() if split == "validation" else mine.sequence("validation")
    return rows.users.long(), rows.items.long()


def popularity(mine: Interactions) -> Iterator[tuple[str, Fit]]:
    """The number of training interactions."""
    yield "popularity", lambda _: PopularityScorer(mine.train_items, mine.n_items)


def ease(mine: Interactions) -> Iterator[tuple[str, Fit]]:
    """EASE in closed form, for each penalty (Steck 2019, equation 8)."""
    if mine.n_items > LARGEST_EASE:
        print(f"EASE is left out: {mine.n_items:,} items are more than {LARGEST_EASE:,}")
        return
    matrices = {split: sparse(*read_by(split, mine), mine) for split in ("validation", "test")}
    train = matrices["validation"]
    gram = torch.sparse.mm(train.T, train.to_dense()).double()
    for penalty in EASE_PENALTIES:
        inverse = torch.linalg.inv(gram + penalty * torch.eye(mine.n_items, dtype=torch.float64))
        weights = (-inverse / inverse.diagonal()).fill_diagonal_(0).float()  # [I, I]: of item i for item j
        yield f"EASE, penalty {penalty}", lambda split, weights=weights: MatrixScorer(matrices[split], weights.T)


def sparse(users: Tensor, items: Tensor, mine: Interactions) -> Tensor:
    """The matrix [U, I] of ones."""
    return torch.sparse_coo_tensor(
        torch.stack([users, items]), torch.ones(len(users)), (mine.n_users, mine.n_items), check_invariants=True
    ).coalesce()


def als(mine: Interactions) -> Iterator[tuple[str, Fit]]:
    """ALS of the package `implicit`, for each point of the grid."""
    if importlib.util.find_spec("implicit") is None:
        print("ALS is left out: it needs `pip install implicit`")
        return
    from implicit.als import AlternatingLeastSquares  # noqa: PLC0415 - see above
    from scipy.sparse import csr_matrix  # noqa: PLC0415

    def matrix(split: str) -> Any:
        users, items = (one.numpy() for one in read_by(split, mine))
        return csr_matrix((torch.ones(len(users)).numpy(), (users, items)), (mine.n_users, mine.n_items))

    matrices = {split: matrix(split) for split in ("validation", "test")}
    for values in itertools.product(*ALS_GRID.values()):
        options = dict(zip(ALS_GRID, values, strict=True))
        model = AlternatingLeastSquares(**options, iterations=15, use_gpu=False, random_state=0)
        model.fit(matrices["validation"], show_progress=False)

        def scorer(split: str, model: Any = model) -> Scorer:
            users = torch.arange(mine.n_users).numpy()
            factors = model.recalculate_user(users, matrices[split])
            return MatrixScorer(torch.from_numpy(factors).float(), torch.from_numpy(model.item_factors))

        yield "ALS, " + ", ".join(f"{name} {value}" for name, value in options.items()), scorer


def per_user(scorer: Scorer, eval_set: EvalSet) -> Tensor:
    """Hits and NDCG of each user: [E, 2]."""
    starts = range(0, len(eval_set.users), USERS)
    ranks = torch.cat([rank_batch(scorer, eval_set, slice(at, at + USERS))[0] for at in starts]).double()
    return torch.stack([ranks <= K, (ranks <= K) / torch.log2(ranks + 1)], 1).double()


def figure(values: Tensor) -> str:
    """`HR@10 / NDCG@10` of values [E, 2]."""
    hr, ndcg = values.mean(0).tolist()
    return f"{hr:.4f} / {ndcg:.4f}"


def main() -> None:
    """Parse, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="directories of runs on one dataset, which differ in their seeds")
    parser.add_argument("--valid-negative", default="99", help="items ranked with the test item, or all (default: 99)")
    arguments = parser.parse_args()
    negatives = "all" if arguments.valid_negative == "all" else int(arguments.valid_negative)
    configure_cpu()
    runs = [RunDirectory.open(Path(path)) for path in arguments.run]
    dataset = runs[0].dataset
    if len({run.dataset.fingerprint for run in runs}) > 1:
        sys.exit("the runs are of several datasets")
    mine = dataset.interactions
    history = runs[0].config.history
    test = make_eval_set(dataset, "test", negatives, history=history)
    ours = torch.stack([per_user(NeuralScorer(run.load_model(BEST)[0]), test) for run in runs])
    print(f"{dataset.name}: {test.evaluated:,} users, {test.protocol}")
    for run, values in zip(runs, ours, strict=True):
        print(f"  {f'run, seed {run.config.seed}':<52} {figure(values)}")
    mean = ours.mean(0)
    spread = (
        f" (over seeds ± {', '.join(f'{one:.4f}' for one in ours.mean(1).std(0).tolist())})" if len(runs) > 1 else ""
    )
    print(f"  {'mean of runs':<52} {figure(mean)}{spread}")
    validation = make_eval_set(dataset, "validation", negatives)
    for family in (popularity, ease, als):
        # One fit at a time beside the best so far: a fit of EASE holds all pairs of items.
        tried = ((float(per_user(fit("validation"), validation)[:, 1].mean()), name, fit) for name, fit in family(mine))
        best = max(tried, key=lambda one: one[0], default=None)
        if best is None:
            continue
        _, name, fit = best
        values = per_user(fit("test"), test)
        ahead = mean - values
        error = (ahead.std(0) / len(ahead) ** 0.5).tolist()
        text = " / ".join(f"{one:+.4f} ± {of:.4f}" for one, of in zip(ahead.mean(0).tolist(), error, strict=True))
        print(f"  {name:<52} {figure(values)}   ahead {text}", flush=True)


if __name__ == "__main__":
    main()
