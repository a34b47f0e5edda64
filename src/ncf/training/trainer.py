"""Epochs: a network, its optimizer and its batches, from one epoch to the next.

Nothing random is stored: every epoch seeds its generators anew from (seed, epoch, rank), so a run that resumes from a
finished epoch is the run that was never stopped.
"""

import hashlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ncf.config import TrainConfig
from ncf.cpu.forward import PAIRS
from ncf.data.interactions import Sequence
from ncf.errors import RunError
from ncf.model.neumf import NeuMF
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.threads import thread_count
from ncf.training.autograd import wants_compile
from ncf.training.batches import Batches, batch_size_of
from ncf.training.step import Step


def stream(seed: int, epoch: int, rank: int, purpose: str) -> int:
    """The seed of a random stream: different for each epoch, process and purpose, the same in every run."""
    text = f"{seed} {epoch} {rank} {purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def learning_rate(config: TrainConfig, progress: float) -> float:
    """The step size at a share `progress` of all steps, from 0 to below 1."""
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate


class Trainer:
    """Trains `model`, in place, on a sequence of this process's interactions.

    `ordered` says whether the log has a time; `purpose` names the random streams.
    """

    def __init__(
        self,
        model: NeuMF,
        sequence: Sequence,
        config: TrainConfig,
        device: torch.device,
        purpose: str,
        group: ProcessGroup = SINGLE,
        *,
        ordered: bool = True,
    ) -> None:
        self.model, self.config, self.device, self.purpose = model.to(device), config, device, purpose
        self.group = group
        self.batches = Batches(
            sequence.to(device),
            model.n_users,
            model.n_items,
            config,
            ordered=ordered,
            pad=wants_compile(config, device),
            counts=group.all_gather(len(sequence.users)),
        )
        self.step = Step(self.model, config, group, samples=self.batches.samples)
        self.samples = 0  # of the last epoch, over all processes: interactions and their negatives

    def epoch(self, number: int, *, of: int | None = None, progress: bool = False) -> float:
        """Train epoch `number` (from 1, the bar says `of` how many); the mean loss of a sample.

        Raises RunError where a loss is not finite, naming the first bad step; the model is then beyond repair.
        """
        seed = stream(self.config.seed, number, self.group.rank, self.purpose)
        generator = torch.Generator(self.device).manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)  # torch's own dropout draws from the device's generator
        self.model.train()
        losses: list[Tensor] = []
        samples: int | Tensor = 0
        bar = tqdm(
            self.batches.epoch(generator),
            total=len(self.batches),
            desc=f"epoch {number}/{of or self.config.epochs}",
            unit="batch",
            leave=False,
            disable=not progress,
        )
        first = (number - 1) * len(self.batches)
        for at, batch in enumerate(bar, first):
            self.step.set_learning_rate(learning_rate(self.config, at / (self.config.epochs * len(self.batches))))
            losses.append(self.step(batch, generator))
            samples = samples + batch.samples
        found = torch.stack([*losses, torch.as_tensor(samples, dtype=torch.float64, device=self.device)])
        steps, total = torch.split(self.group.all_reduce_(found), [len(losses), 1])  # the device is asked once, here
        bad = torch.nonzero(~torch.isfinite(steps))
        if len(bad):
            raise RunError(
                f"the loss is not finite in epoch {number}, step {int(bad[0]) + 1} of {len(steps)}: "
                f"try a lower --learning-rate than {self.config.learning_rate:g}"
            )
        self.samples = int(total)
        return float(steps.sum()) / self.samples

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next epoch depends on: tensors, and values that JSON can hold."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        steps = 0.0
        for name, parameter in self.model.named_parameters():
            adam = self.step.optimizer.state[parameter]
            tensors[f"adam.mean.{name}"], tensors[f"adam.square.{name}"] = adam["exp_avg"], adam["exp_avg_sq"]
            steps = float(adam["step"])
        return tensors, {"adam_steps": steps, "loss_scaler": self.step.scaler.state_dict()}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        model = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(model)
        for name, parameter in self.model.named_parameters():
            self.step.optimizer.state[parameter] = {
                "step": torch.tensor(values["adam_steps"], device=self.device),
                "exp_avg": tensors[f"adam.mean.{name}"].to(self.device),
                "exp_avg_sq": tensors[f"adam.square.{name}"].to(self.device),
            }
        self.step.scaler.load_state_dict(values["loss_scaler"])


def needed_bytes(
    n_users: int, n_items: int, n_train: int, config: TrainConfig, device: torch.device, processes: int = 1
) -> int:
    """About how much memory training takes, in bytes, of one of `processes` with `n_users` and `n_train`.

    Parameters, their gradients and Adam's two moments; of several processes the buffer that their gradients are summed
    in; the item table and its gradients, one per core; the pairs with the keys of the negatives' search; a batch and
    its activations.
    """
    concatenated = config.layers[0] if config.layers else 0
    width = config.factors + concatenated // 2
    tables = (n_users + n_items * (2 if config.history else 1)) * width
    network = sum(a * b for a, b in itertools.pairwise(config.layers))
    item_side = n_items * width * (2 if config.history else 1)
    summed = item_side + network if processes > 1 else 0
    by_hand = device.type == "cpu" and not wants_compile(config, device)
    item_tables = n_items * (config.factors + (config.layers[1] if config.layers else 0)) * (1 + thread_count())
    item_tables += n_items * width * thread_count() if config.history else 0
    batch = math.ceil(batch_size_of(config, n_train * processes) / processes)
    samples = min(batch, PAIRS * thread_count()) if by_hand else batch
    activations = samples * (config.factors + sum(config.layers)) * 4 * (4 if config.precision == "fp32" else 2)
    rows = batch // (1 + config.negative_samples)
    extra = rows * (8 * config.history + 2 * config.shared_negatives)
    return 16 * (tables + network) + 4 * (summed + item_tables) + 24 * n_train + 32 * batch + activations + extra
