"""Train a network on a dataset: epochs, selection, stopping, resume.

ncf train --data data/ml-1m --checkpoint-dir runs/ml-1m
"""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncf.config import RunConfig, TrainConfig
from ncf.data.dataset import Dataset
from ncf.device import check_fits, pick_device
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError, RunError
from ncf.files import locked
from ncf.model.checkpoint import BEST, DEPLOY, DEPLOY_LAST, LAST, LOCK, METRICS, Run, options_of
from ncf.model.neumf import check_widths
from ncf.model.start import make_directory, run_directory, start_run
from ncf.ranking.evaluate import Evaluation, evaluate, protocol_line, warn_if_odd
from ncf.ranking.exam import Exam, make_exam
from ncf.ranking.scoring import NeuralScorer, PopularityScorer
from ncf.report import (
    EpochRecord,
    MetricsLog,
    TensorBoard,
    best_of,
    closing_block,
    epoch_line,
    import_summary_writer,
    test_line,
)
from ncf.training.step import check_compile, check_precision
from ncf.training.trainer import Trainer, needed_bytes

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainResult:
    """What a finished run found."""

    checkpoint_dir: Path
    history: list[EpochRecord]
    best_epoch: int
    test: dict[str, Any] | None  # as `ncf evaluate --json`; None where no user has a test item


def train(
    dataset: Dataset,
    config: TrainConfig | None = None,
    run: RunConfig | None = None,
    *,
    progress: bool = False,
    log: Log = lambda _: None,
    ranks: Ranks = ALONE,
) -> TrainResult:
    """Train on `dataset` into the run's directory; `log` gets the lines for standard output.

    Of several ranks each brings its own part of the dataset (`ncf.data.part.load_dataset`); the first writes the
    run's files and its `log` gets the lines.

    Without a `config` its defaults serve or, with `resume`, the run's own options. The epoch is chosen on the
    validation split (or as `select_on` says), and the test split is looked at once, at the end. SIGKILL at any moment
    loses at most the running epoch; a resumed run is bit-equal on the same device and thread count.

    Raises InputError for options that cannot work with this dataset, device or directory; RunError for a run that
    fails (a loss that is not finite, a full disk), which leaves the best epoch so far untouched.
    """
    if not isinstance(dataset, Dataset):
        raise InputError(f"train takes a Dataset: make one with ncf.prepare(log): got {type(dataset).__name__}")
    run = run or RunConfig()
    path = run_directory(run, dataset.name)
    config = config or (run.resume and options_of(path)) or TrainConfig()
    device = pick_device(run.device, ranks)
    _check(config, run, dataset, device, ranks)  # before anything is written
    exam = None if config.select_on == "last" else make_exam(dataset, config.select_on, config.valid_negative, ranks)
    if ranks.first:
        make_directory(path, run)
    with locked(path / LOCK, "another `ncf train`") if ranks.first else nullcontext():
        stored = start_run(path, config, dataset, resume=run.resume, overwrite=run.overwrite, ranks=ranks)
        return _Session(stored, config, run, device, exam, progress and ranks.first, log).go()


def _check(config: TrainConfig, run: RunConfig, dataset: Dataset, device: torch.device, ranks: Ranks) -> None:
    """Raise InputError for options that cannot work together, or not with this dataset or device."""
    ranks.check_same({"set of options": [asdict(config), asdict(run)], "dataset": dataset.fingerprint})
    if run.resume and run.overwrite:
        raise InputError("--resume and --overwrite exclude each other: go on with the run, or start anew")
    if config.eval_after >= config.epochs:
        raise InputError(f"--eval-after must be below --epochs ({config.epochs}): got {config.eval_after}")
    if config.select_on == "last" and (config.target is not None or config.patience):
        raise InputError("--target and --patience need epochs that are evaluated: they do not go with --select-on last")
    if run.tensorboard:
        import_summary_writer()
    check_widths(config.factors, config.layers)
    check_precision(config.precision, device)
    check_compile(config, device)
    sizes = dataset.n_users, dataset.n_items, dataset.n_train
    needed = max(ranks.every(needed_bytes(*sizes, config, device, ranks.world)))
    together = ranks.local_world if device.type == "cpu" else 1  # that share the device's memory
    check_fits(device, needed * together, f"training on {dataset.whole_train} interactions")


class _Session:
    """A run in progress."""

    def __init__(
        self,
        stored: Run,
        config: TrainConfig,
        run: RunConfig,
        device: torch.device,
        exam: Exam | None,
        progress: bool,
        log: Log,
    ) -> None:
        self.stored, self.dataset, self.config, self.run = stored, stored.dataset, config, run
        self.ranks = stored.ranks
        self.device, self.progress, self.log = device, progress, log
        self.exam = exam and exam.to(device)
        self.metrics = MetricsLog(stored.path / METRICS, config.topk, stored.fingerprint)

    def go(self) -> TrainResult:
        """Train what is left to train, and close."""
        trainer = self._trainer(self.dataset.train_users, self.dataset.train_items, "train")
        history = self._resume(trainer)
        if not self._over(history):
            self.stored.forget_result()
            self.stored.remove(DEPLOY)  # of an earlier choice of epochs
            self._train(trainer, history)
        best = best_of(history, self.config.select_on)
        if best is None:
            raise RunError("no epoch was evaluated: --eval-after is not below the epochs of this run")
        del trainer  # its memory serves what follows
        if self.config.fit_all:
            self._deploy(best.epoch)
        return self._close(history, best)

    def _trainer(self, users: Tensor, items: Tensor, purpose: str) -> Trainer:
        return Trainer(self.stored.new_model(), users, items, self.config, self.device, purpose, self.ranks)

    def _resume(self, trainer: Trainer) -> list[EpochRecord]:
        if not self.stored.has(LAST):
            return self._history(0, None)
        tensors, state = self.stored.load(LAST)
        history = self._history(state["epoch"], state["metrics"])
        trainer.load_state(tensors, state)
        best = best_of(history, self.config.select_on)
        if best and best.epoch == state["epoch"] != self.stored.epoch_of(BEST):  # stopped between last and best
            self._keep_best(trainer, best)
        return history

    def _history(self, epochs: int, digest: str | None) -> list[EpochRecord]:
        """The first epochs' records, rank 0's on all: what is decided from them is decided alike."""
        lines = self.ranks.from_first(lambda: [asdict(one) for one in self.metrics.cut_back(epochs, digest)])
        return [EpochRecord(**line) for line in lines]

    def _over(self, history: list[EpochRecord]) -> bool:
        """Whether the last epoch was reached, the target met, or patience lost."""
        if len(history) >= self.config.epochs:
            return True
        best = best_of(history, self.config.select_on)
        if best is None or best.hr is None:
            return False
        if self.config.target is not None and best.hr >= self.config.target:
            return True
        return bool(self.config.patience) and len(history) - best.epoch >= self.config.patience

    def _train(self, trainer: Trainer, history: list[EpochRecord]) -> None:
        shown = self.run.tensorboard and self.ranks.first
        board = TensorBoard(self.stored.path, len(history) + 1, self.config.topk) if shown else None
        with closing(board) if board else nullcontext():
            try:
                while not self._over(history):
                    self._epoch(trainer, history)
                    if board:
                        board.add(history[-1])
            except KeyboardInterrupt:
                done = f"epochs 1 to {len(history)} are saved" if history else "no epoch was finished yet"
                raise KeyboardInterrupt(f"{done} in {self.stored.path}: go on with --resume") from None

    def _epoch(self, trainer: Trainer, history: list[EpochRecord]) -> None:
        """Train an epoch, judge it, keep it: the line in metrics.jsonl, then last, then best (`_resume` mends it)."""
        number = len(history) + 1
        start = time.perf_counter()
        loss = trainer.epoch(number, of=self.config.epochs, progress=self.progress)
        seconds = time.perf_counter() - start
        record = EpochRecord(number, loss, seconds, trainer.samples / seconds)
        if self.exam is not None and number > self.config.eval_after:
            start = time.perf_counter()
            found = self._evaluate(NeuralScorer(trainer.model), self.exam, f"epoch {number}: ")
            eval_time = time.perf_counter() - start
            record = EpochRecord(number, loss, seconds, record.samples_per_s, eval_time, found.hr, found.ndcg)
            if not any(one.hr is not None for one in history):
                warn_if_odd(found, self.exam)
        tensors, values = trainer.state()
        if self.ranks.first:
            self.metrics.append(record)
            values |= {"epoch": number, "metrics": self.metrics.digest()}
        self.stored.save(LAST, tensors, values)
        history.append(record)
        new_best = best_of(history, self.config.select_on) is record
        if new_best:
            self._keep_best(trainer, record)
        if self.run.verbose:
            self.log(epoch_line(record))
        if new_best and self.config.select_on != "last":
            self.log(epoch_line(record, new_best=True))

    def _keep_best(self, trainer: Trainer, record: EpochRecord) -> None:
        state = {"epoch": record.epoch, "hr": record.hr, "ndcg": record.ndcg, "select_on": self.config.select_on}
        self.stored.save(BEST, trainer.model.state_dict(), state)

    def _evaluate(self, scorer: NeuralScorer | PopularityScorer, exam: Exam, where: str = "") -> Evaluation:
        batch = self.config.valid_users_per_batch
        try:
            return evaluate(
                scorer,
                exam,
                k=self.config.topk,
                users_per_batch=batch,
                progress=self.progress,
                ranks=self.ranks,
            )
        except RunError as error:
            raise type(error)(f"{where}{error}") from None  # a lost rank stays one

    def _deploy(self, epochs: int) -> None:
        """Train the model to deploy: as many epochs as were chosen, on every interaction, held-out ones too."""
        if self.stored.epoch_of(DEPLOY) == epochs:
            return
        users, items = self.dataset.everything()
        trainer = self._trainer(users, items, "deploy")
        done = 0
        if self.stored.has(DEPLOY_LAST):
            tensors, state = self.stored.load(DEPLOY_LAST)
            if state["epoch"] <= epochs:
                trainer.load_state(tensors, state)
                done = state["epoch"]
        for number in range(done + 1, epochs + 1):
            trainer.epoch(number, of=epochs, progress=self.progress)
            tensors, values = trainer.state()
            self.stored.save(DEPLOY_LAST, tensors, {"epoch": number, **values})
        self.stored.save(DEPLOY, trainer.model.state_dict(), {"epoch": epochs})
        self.stored.remove(DEPLOY_LAST)
        total = self.ranks.sums(len(users))[0]
        self.log(f"Deploy: trained on all {total} interactions for {epochs} epochs; `ncf recommend` uses this model")

    def _close(self, history: list[EpochRecord], best: EpochRecord) -> TrainResult:
        """Print the closing block, the test line and what they mean; the same again on a finished run."""
        about = {"epochs": len(history), "target": self.config.target}
        result = self.stored.load_result(about)
        if result is None:
            lines, test = self._judge(history, best)
            result = {**about, "best_epoch": best.epoch, "test": test, "lines": lines}
            self.stored.save_result(result)
        for line in result["lines"]:
            self.log(line)
        return TrainResult(self.stored.path, history, best.epoch, result["test"])

    def _judge(self, history: list[EpochRecord], best: EpochRecord) -> tuple[list[str], dict[str, Any] | None]:
        popularity = PopularityScorer(self.dataset.train_items.to(self.device), self.dataset.n_items)
        self.ranks.sum_(popularity.counts)
        baseline = self.exam and self._evaluate(popularity, self.exam)
        lines = [
            "",
            *closing_block(
                history,
                select_on=self.config.select_on,
                target=self.config.target,
                eval_pairs=self.exam.pairs if self.exam else 0,
                popularity=(baseline.hr, baseline.ndcg) if baseline else None,
            ),
            "",
        ]
        try:
            exam = make_exam(self.dataset, "test", self.config.valid_negative, self.ranks).to(self.device)
        except InputError as error:  # nothing to test on, which is no reason to lose what was trained
            return [*lines, f"No test score: {error}", f"Model: {self.stored.path}"], None
        model, state = self.stored.load_model(BEST)
        if state["epoch"] != best.epoch:
            raise InputError(
                f"{self.stored.path} is damaged: its best weights are of epoch {state['epoch']}, and by its metrics "
                f"epoch {best.epoch} is the best; train the run again"
            )
        start = time.perf_counter()
        found = self._evaluate(NeuralScorer(model.to(self.device)), exam)
        seconds = time.perf_counter() - start
        warn_if_odd(found, exam)
        baseline = self._evaluate(popularity, exam)
        k = self.config.topk
        lines += [
            test_line(seconds, k, found.hr, found.ndcg),
            f"Popularity on the same test: HR@{k} = {baseline.hr:.4f}, NDCG@{k} = {baseline.ndcg:.4f}",
            protocol_line(found, select_on=self.config.select_on, epoch=best.epoch),
            f"Model: {self.stored.path}",
        ]
        return lines, found.to_dict()
