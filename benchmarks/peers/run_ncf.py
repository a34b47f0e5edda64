"""The arm of `ncf`: the step that `ncf train` takes."""

from typing import Any

import torch
from arm import BETAS, DROPOUT, EPS, FACTORS, LAYERS, LEARNING_RATE, Arm, Job, draw, serve

from ncf.config import TrainConfig
from ncf.device import configure_cpu
from ncf.model.batch import Batch
from ncf.model.neumf import NeuMF
from ncf.training.step import Step


def build(job: Job) -> Arm:
    """Steps with `Step` on batches as `Batches` gives them: by user, the positive first."""
    configure_cpu()
    config = TrainConfig(
        precision=job.precision, learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, compile=False
    )
    model = NeuMF(job.users, job.items, factors=FACTORS, layers=LAYERS, dropout=DROPOUT).train()
    step, generator = Step(model, config), torch.Generator().manual_seed(0)

    def load(number: int) -> list[torch.Tensor]:
        return [torch.from_numpy(x) for x in draw(job, number)]

    def take(batch: Any) -> float:
        users, candidates = batch
        return float(step(Batch(users, candidates, None, job.samples), generator)) / job.samples

    return load, take


if __name__ == "__main__":
    serve(build, lambda: f"torch {torch.__version__}, {torch.get_num_threads()} threads")
