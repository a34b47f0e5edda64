"""The arm of `usual.py`: the PyTorch NeuMF that ratios are taken against."""

from typing import Any

import torch
from arm import DROPOUT, FACTORS, LAYERS, Arm, Job, draw_pairs, serve
from usual import UsualNeuMF, UsualStep


def build(job: Job) -> Arm:
    """Steps with `UsualStep`, under autocast below fp32."""
    torch.manual_seed(0)
    model = UsualNeuMF(job.users, job.items, FACTORS, LAYERS, DROPOUT)
    step = UsualStep(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision])

    def load(number: int) -> list[torch.Tensor]:
        return [torch.from_numpy(x) for x in draw_pairs(job, number)]

    def take(batch: Any) -> float:
        return float(step(*batch))

    return load, take


if __name__ == "__main__":
    serve(build, lambda: f"torch {torch.__version__}, {torch.get_num_threads()} threads")
