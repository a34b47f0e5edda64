"""Train a network on a dataset: epochs, selection, stopping, resume.

ncf train --data data/ml-1m --checkpoint-dir runs/ml-1m
"""

import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ncf.config import RunConfig, TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.interactions import SPLITS, Sequence
from ncf.data.shard import AnyDataset, Shard
from ncf.device import check_fits, configured, pick_device
from ncf.errors import InputError, RunError
from ncf.files import locked
from ncf.model.neumf import check_widths
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.ranking.eval_set import EvalSet, make_eval_set
from ncf.ranking.evaluate import evaluate, protocol_line, warn_if_odd
from ncf.ranking.scorer import NeuralScorer, PopularityScorer, Scorer
from ncf.report import closing_block, epoch_line, import_summary_writer, recipe_line, test_line, write_events
from ncf.runs.metrics_log import EpochRecord, MetricsLog, best_of
from ncf.runs.run import BEST, DEPLOY, DEPLOY_LAST, LAST, LOCK, METRICS, RunDirectory
from ncf.runs.start import make_directory, resolve_config, run_directory, start_run
from ncf.training.autograd import check_compile
from ncf.training.step import check_loss, check_precision
from ncf.training.trainer import Trainer, needed_bytes


@dataclass(frozen=True)
class TrainResult:
    """What a finished run found."""

    checkpoint_dir: Path
    history: list[EpochRecord]
    best_epoch: int
    test: dict[str, Any] | None  # as `ncf evaluate --json`; None where no user has a test item


def train(
    dataset: AnyDataset,
    config: TrainConfig | None = None,
    run: RunConfig | None = None,
    *,
    progress: bool = False,
    log: Callable[[str], None] = lambda _: None,
    group: ProcessGroup = SINGLE,
) -> TrainResult:
    """Train on `dataset` into the run's directory; `log` gets the lines for standard output.

    Of several processes each brings its own shard (`ncf.data.shard.load_dataset`); rank 0 writes files and lines.

    Without a `config` the default recipe serves or, with `resume`, the run's own options. The test split is used once,
    at the end. SIGKILL at any moment loses at most the running epoch; a resumed run is bit-equal on the same CPU and
    threads.

    Raises InputError for options that cannot work with this dataset, device or directory; RunError for a run that
    fails (a loss that is not finite, a full disk), which leaves the best epoch so far as it is.
    """
    if not isinstance(dataset, (Dataset, Shard)):
        raise InputError(f"train takes a Dataset: make one with ncf.prepare(log): got {type(dataset).__name__}")
    run = run or RunConfig()
    path = run_directory(run, dataset.name)
    config = config or resolve_config(run, dataset.name)
    config = config.for_log(dataset.n_users, dataset.n_items, dataset.n_train)
    device = pick_device(run.device, group)
    with configured(device, group):
        _check(config, run, dataset, device, group)  # before anything is written
        split = config.select_on
        eval_set = None if split == "last" else _eval_set(dataset, split, config, group)
        if group.is_main:
            make_directory(path, run)
        with locked(path / LOCK, "another `ncf train`") if group.is_main else nullcontext():
            stored = start_run(path, config, dataset, resume=run.resume, overwrite=run.overwrite, group=group)
            return _Session(stored, config, run, device, eval_set, progress and group.is_main, log).go()


def _eval_set(dataset: AnyDataset, split: str, config: TrainConfig, group: ProcessGroup) -> EvalSet:
    return make_eval_set(dataset, split, config.valid_negative, group, history=config.history)


def _check(config: TrainConfig, run: RunConfig, dataset: AnyDataset, device: torch.device, group: ProcessGroup) -> None:
    """Raise InputError for options that cannot work together, or not with this dataset or device."""
    group.check_same({"set of options": [asdict(config), asdict(run)], "dataset": dataset.fingerprint})
    if run.resume and run.overwrite:
        raise InputError("--resume and --overwrite exclude each other: go on with the run, or start anew")
    if config.eval_after >= config.epochs:
        raise InputError(f"--eval-after must be below --epochs ({config.epochs}): got {config.eval_after}")
    if config.select_on == "last" and (config.target is not None or config.patience):
        raise InputError("--target and --patience need epochs that are evaluated: they do not go with --select-on last")
    if run.tensorboard:
        import_summary_writer()
    check_widths(config.factors, config.layers)
    check_loss(config)
    check_precision(config.precision, device)
    check_compile(config, device)
    mine = dataset.interactions
    needed = max(group.all_gather(needed_bytes(mine.n_users, mine.n_items, mine.n_train, config, device, group.world)))
    together = group.local_world if device.type == "cpu" else 1  # that share the device's memory
    check_fits(device, needed * together, f"training on {dataset.n_train} interactions")


class _Session:
    """A run in progress."""

    def __init__(
        self,
        stored: RunDirectory,
        config: TrainConfig,
        run: RunConfig,
        device: torch.device,
        eval_set: EvalSet | None,
        progress: bool,
        log: Callable[[str], None],
    ) -> None:
        self.stored, self.config, self.run = stored, config, run
        self.dataset, self.group = stored.dataset, stored.group
        self.device, self.progress, self.log = device, progress, log
        self.eval_set = eval_set and eval_set.to(device)
        self.evaluate = partial(
            evaluate, k=config.topk, users_per_batch=config.valid_users_per_batch, progress=progress, group=stored.group
        )
        self.metrics = MetricsLog(stored.path / METRICS, config.topk)

    def go(self) -> TrainResult:
        """Train what is left to train, and close."""
        trainer = self._trainer(self.dataset.interactions.sequence(), "train")
        history = self._resume(trainer)
        if not self._over(history):
            self.log(recipe_line(self.config))
            self.stored.forget_result()
            self.stored.remove(DEPLOY)  # of an earlier choice of epochs
            self._train(trainer, history)
        if (best := best_of(history, self.config.select_on)) is None:
            raise RunError("no epoch was evaluated: --eval-after is not below the epochs of this run")
        del trainer  # its memory serves what follows
        if self.config.fit_all:
            self._deploy(best.epoch)
        return self._close(history, best)

    def _trainer(self, sequence: Sequence, purpose: str) -> Trainer:
        model, ordered = self.stored.new_model(), self.dataset.interactions.ordered
        return Trainer(model, sequence, self.config, self.device, purpose, self.group, ordered=ordered)

    def _resume(self, trainer: Trainer) -> list[EpochRecord]:
        if not self.stored.has(LAST):
            return self._history(0)
        tensors, state = self.stored.load(LAST)
        history = self._history(state["epoch"])
        trainer.load_state(tensors, state)
        best = best_of(history, self.config.select_on)
        if best and best.epoch == state["epoch"] != self.stored.epoch_of(BEST):  # stopped between last and best
            self._keep_best(trainer, best)
        return history

    def _history(self, epochs: int) -> list[EpochRecord]:
        """The first epochs' records, rank 0's on all: what is decided from them is decided alike."""
        lines = self.group.broadcast(lambda: [asdict(one) for one in self.metrics.cut_back(epochs)])
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
        shown = self.run.tensorboard and self.group.is_main
        board = import_summary_writer()(str(self.stored.path), purge_step=len(history) + 1) if shown else None
        with closing(board) if board else nullcontext():
            try:
                while not self._over(history):
                    self._epoch(trainer, history)
                    if board:
                        write_events(board, history[-1], self.config.topk)
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
        if self.eval_set is not None and number > self.config.eval_after:
            start = time.perf_counter()
            try:
                found = self.evaluate(NeuralScorer(trainer.model), self.eval_set)
            except RunError as error:
                raise RunError(f"epoch {number}: {error}") from None
            eval_time = time.perf_counter() - start
            record = EpochRecord(number, loss, seconds, record.samples_per_s, eval_time, found.hr, found.ndcg)
            if not any(one.hr is not None for one in history):
                warn_if_odd(found, self.eval_set)
        tensors, values = trainer.state()
        if self.group.is_main:
            self.metrics.append(record)
        self.stored.save(LAST, tensors, values | {"epoch": number})
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

    def _deploy(self, epochs: int) -> None:
        """Train the model to deploy: as many epochs as were chosen, on every interaction, held-out ones too."""
        if self.stored.epoch_of(DEPLOY) == epochs:
            return
        sequence = self.dataset.interactions.sequence(*SPLITS)
        trainer = self._trainer(sequence, "deploy")
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
        total = self.group.all_sum(len(sequence.users))[0]
        self.log(f"Deploy: trained on all {total} interactions for {epochs} epochs; `ncf recommend` uses this model")

    def _close(self, history: list[EpochRecord], best: EpochRecord) -> TrainResult:
        """Print the closing block, the test line and what they mean; the same again on a finished run."""
        about = {"epochs": len(history), "target": self.config.target}
        result = self.stored.load_result(about)
        if result is None:
            popularity = PopularityScorer(self.dataset.interactions.train_items.to(self.device), self.dataset.n_items)
            self.group.all_reduce_(popularity.counts)
            lines, test = self._test(best, popularity)
            lines = [*self._closing_block(history, popularity), *lines, f"Model: {self.stored.path}"]
            result = {**about, "best_epoch": best.epoch, "test": test, "lines": lines}
            self.stored.save_result(result)
        for line in result["lines"]:
            self.log(line)
        return TrainResult(self.stored.path, history, best.epoch, result["test"])

    def _closing_block(self, history: list[EpochRecord], popularity: Scorer) -> list[str]:
        baseline = self.eval_set and self.evaluate(popularity, self.eval_set)
        block = closing_block(
            history,
            select_on=self.config.select_on,
            target=self.config.target,
            eval_pairs=self.eval_set.pairs if self.eval_set else 0,
            popularity=(baseline.hr, baseline.ndcg) if baseline else None,
        )
        return ["", *block, ""]

    def _test(self, best: EpochRecord, popularity: Scorer) -> tuple[list[str], dict[str, Any] | None]:
        """The lines and the scores of the best epoch on the test split, which is looked at here alone."""
        config = self.config
        try:
            eval_set = _eval_set(self.dataset, "test", config, self.group).to(self.device)
        except InputError as error:  # nothing to test on, which is no reason to lose what was trained
            return [f"No test score: {error}"], None
        model, state = self.stored.load_model(BEST)
        if state["epoch"] != best.epoch:
            raise InputError(
                f"{self.stored.path} is damaged: its best weights are of epoch {state['epoch']}, and by its metrics "
                f"epoch {best.epoch} is the best; train the run again"
            )
        start = time.perf_counter()
        found = self.evaluate(NeuralScorer(model.to(self.device)), eval_set)
        seconds = time.perf_counter() - start
        warn_if_odd(found, eval_set)
        baseline, k = self.evaluate(popularity, eval_set), config.topk
        lines = [
            test_line(seconds, k, found.hr, found.ndcg),
            f"Popularity on the same test: HR@{k} = {baseline.hr:.4f}, NDCG@{k} = {baseline.ndcg:.4f}",
            protocol_line(found, select_on=config.select_on, epoch=best.epoch),
        ]
        return lines, found.to_dict()
