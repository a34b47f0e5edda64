"""Time to quality: seconds of training to HR@10 >= 0.70 on He et al.'s split of MovieLens 1M, ours and the usual way.

    ncf prepare ml-1m.train.rating -o data/he      # beside it ml-1m.test.rating and ml-1m.test.negative
    python benchmarks/quality.py --data data/he --side ncf
    python benchmarks/quality.py --data data/he --side usual    # four times as long
    python benchmarks/quality.py --data data/he --side both --epochs 2    # the time of an epoch, in turn

Both sides: the recipe's network and hyper-parameters, ncf's automatic batch size, four new negatives an interaction
each epoch, HR@10 against the 99 negatives of the split after each epoch. Seconds are of training, negatives and
shuffling included, evaluation not. The usual side is peers/usual.py on shuffled samples, its negatives unchecked.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.device import configure_cpu, device_name
from ncf.model.neumf import NeuMF
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import evaluate
from ncf.ranking.scorer import NeuralScorer
from ncf.training.batches import batch_size_of
from ncf.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from peers.usual import UsualNeuMF, UsualStep


class UsualScorer:
    """What `evaluate` needs, of the usual model."""

    def __init__(self, model: UsualNeuMF) -> None:
        self.model = model.eval()

    def user_rows(self, users: Tensor) -> Tensor:
        """The users themselves."""
        return users

    @torch.no_grad()
    def score(self, rows: Tensor, items: Tensor) -> Tensor:
        """Scores [B, C] of `items` [B, C] for the users `rows` [B]."""
        return self.model(rows.unsqueeze(1).expand_as(items).flatten(), items.flatten()).view(items.shape)

    def score_all(self, rows: Tensor) -> Tensor:
        """Not needed with 99 negatives."""
        raise NotImplementedError


def usual_epochs(dataset: Dataset, config: TrainConfig) -> Iterator[UsualScorer]:
    """Train an epoch at a time."""
    model = UsualNeuMF(dataset.n_users, dataset.n_items)
    step, size = UsualStep(model), batch_size_of(config, dataset.n_train)
    users, items = dataset.interactions.train_users.long(), dataset.interactions.train_items.long()
    labels = torch.cat([torch.ones(len(users)), torch.zeros(len(users) * config.negative_samples)])
    while True:
        model.train()
        negatives = torch.randint(dataset.n_items, (len(users) * config.negative_samples,))
        all_users, all_items = users.repeat(1 + config.negative_samples), torch.cat([items, negatives])
        for rows in torch.randperm(len(labels)).split(size):
            step(all_users[rows], all_items[rows], labels[rows])
        yield UsualScorer(model)


def ncf_epochs(dataset: Dataset, config: TrainConfig) -> Iterator[NeuralScorer]:
    """Train an epoch at a time."""
    model = NeuMF(dataset.n_users, dataset.n_items, seed=config.seed)
    mine = dataset.interactions
    trainer = Trainer(model, mine.sequence(), config, torch.device("cpu"), "train")
    for number in range(1, sys.maxsize):
        trainer.epoch(number)
        yield NeuralScorer(model)


SIDES: dict[str, Callable] = {"usual": usual_epochs, "ncf": ncf_epochs}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the prepared dataset")
    parser.add_argument("--side", choices=(*SIDES, "both"), default="both", help="(default: both, in turn)")
    parser.add_argument("--target", type=float, default=0.70, help="HR@10 to reach (default: 0.70)")
    parser.add_argument("--epochs", type=int, default=30, help="give up after so many (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    arguments = parser.parse_args()
    configure_cpu()
    torch.manual_seed(arguments.seed)
    dataset, config = Dataset.load(arguments.data), TrainConfig(seed=arguments.seed)
    eval_set = make_eval_set(dataset, "test", 99)
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, fp32")
    print(f"batch {batch_size_of(config, dataset.n_train):,} samples, load at the start {os.getloadavg()[0]:.1f}")
    chosen = [arguments.side] if arguments.side in SIDES else list(SIDES)
    running = {name: SIDES[name](dataset, config) for name in chosen}
    seconds = dict.fromkeys(running, 0.0)
    for epoch in range(1, arguments.epochs + 1):
        for name in list(running):
            begin = time.perf_counter()
            scorer = next(running[name])
            taken = time.perf_counter() - begin
            seconds[name] += taken
            found = evaluate(scorer, eval_set, k=10, users_per_batch=1000)
            print(
                f"{name:<6} epoch {epoch:>2}  {taken:6.1f} s, {seconds[name]:7.1f} s so far  HR@10 {found.hr:.4f}  "
                f"NDCG@10 {found.ndcg:.4f}",
                flush=True,
            )
            if found.hr >= arguments.target:
                print(f"{name} reached HR@10 {arguments.target:.2f} after {seconds[name]:.1f} s, {epoch} epochs")
                del running[name]
        if not running:
            break


if __name__ == "__main__":
    main()
