"""The arm of `usual.py`: the PyTorch NeuMF that ratios are taken against."""

import torch
from arm import DROPOUT, FACTORS, LAYERS, Arm, Job, on_pairs, serve
from usual import UsualNeuMF, UsualStep


def build(job: Job) -> Arm:
    """Steps with `UsualStep`, under autocast below fp32."""
    torch.manual_seed(0)
    model = UsualNeuMF(job.users, job.items, FACTORS, LAYERS, DROPOUT)
    step = UsualStep(model, {"fp32": torch.float32, "bf16": torch.bfloat16}[job.precision])
    return on_pairs(job, torch.from_numpy, step)


if __name__ == "__main__":
    serve(build, lambda: f"torch {torch.__version__}, {torch.get_num_threads()} threads")
