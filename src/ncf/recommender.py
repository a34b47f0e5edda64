"""The public face: fit, evaluate, recommend, save, load; raw ids in, raw ids out.

recommender = Recommender(epochs=20).fit(ncf.prepare("clicks.csv"))
items, scores = recommender.recommend([7, 8], k=10)
"""

import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from ncf.config import RunConfig, TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.directory import replace_directory
from ncf.data.negatives import Untouched
from ncf.device import pick_device
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError
from ncf.files import locked
from ncf.model.checkpoint import BEST, DEPLOY, LOCK, Run
from ncf.model.neumf import NeuMF
from ncf.model.start import check_free
from ncf.ranking.evaluate import CELLS, Evaluation, evaluate, protocol_line, warn_if_odd
from ncf.ranking.exam import make_exam
from ncf.ranking.scoring import NeuralScorer
from ncf.ranking.topk import top_items
from ncf.training.step import DTYPES, check_precision
from ncf.training.train import TrainResult, train

USERS_AT_A_TIME = 256  # at most: no more scores at a time than evaluation holds


class Recommender:
    """A trained network with the dataset it learned from; options are those of `TrainConfig`.

    Raises InputError for an unknown option or a value out of its range.
    """

    def __init__(self, config: TrainConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise InputError(f"give a TrainConfig or options, not both: got {', '.join(options)} beside it")
        self.config = config or TrainConfig.from_options(options)
        self.device = torch.device("cpu")
        self.weights = BEST
        self.ranks = ALONE
        self.result: TrainResult | None = None  # of `fit`
        self._state: dict[str, Any] = {}
        self._model: NeuMF | None = None
        self._dataset: Dataset | None = None

    def fit(
        self,
        dataset: Dataset,
        *,
        checkpoint_dir: str | Path | None = None,
        overwrite: bool = False,
        device: str = "auto",
        progress: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Train on `dataset`, as `ncf train` does, and keep the best epoch (or, with `fit_all`, the model to deploy).

        Without `checkpoint_dir` the run's files are temporary; `save` keeps the model. With `overwrite` a run that is
        there is replaced. `log` gets the lines that `ncf train` prints, and `result` keeps what they say: the epochs,
        and the test score. Raises what `ncf.train` raises.
        """
        if not isinstance(dataset, Dataset):
            raise InputError(f"fit takes a Dataset: make one with ncf.prepare(log): got {type(dataset).__name__}")
        with tempfile.TemporaryDirectory(prefix="ncf-run-") as temporary:
            run = RunConfig(checkpoint_dir=str(checkpoint_dir or temporary), overwrite=overwrite, device=device)
            self.result = train(dataset, self.config, run, progress=progress, log=log)
            self._take(Run.open(self.result.checkpoint_dir), device, None)
        return self

    @classmethod
    def load(
        cls, directory: str | Path, *, device: str = "auto", weights: str | None = None, ranks: Ranks = ALONE
    ) -> Self:
        """Read a run's directory (of `ncf train` or `save`); nothing else is needed.

        Of several ranks each reads its own users, and they can `evaluate` together, and no more. `weights` is
        `best` or `deploy`; by default the model to deploy where there is one (`--fit-all`). Raises InputError where the
        directory is no run, or is damaged, of another version, or a mix of two runs.
        """
        run = Run.open(Path(directory), ranks)
        recommender = cls(run.config)
        recommender.ranks = ranks
        recommender._take(run, device, weights)
        return recommender

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write a run's directory that `load`, `ncf evaluate` and `ncf recommend` read.

        The directory is whole or not there; one that is replaced is kept until the new one is written. Raises
        InputError where it holds something (a run, without `overwrite`) or is in use, RunError where it cannot be
        written.
        """
        path = Path(directory)
        if path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file: choose another directory")
        with locked(path / LOCK, "`ncf train`") if path.exists() else nullcontext():
            if path.exists():
                check_free(path, overwrite=overwrite)
            with replace_directory(path) as folder:
                run = Run.create(folder, self.config, self.dataset)
                run.save(self.weights, self.model.state_dict(), self._state)

    def evaluate(
        self,
        split: str = "test",
        *,
        topk: int | None = None,
        valid_negative: int | str | None = None,
        valid_users_per_batch: int | None = None,
        precision: str = "fp32",
        progress: bool = False,
    ) -> Evaluation:
        """HR@k, NDCG@k and MRR on the `test` or `validation` split; the protocol is the run's unless told otherwise.

        Raises InputError for a split without items, and for the weights of `fit_all`, which have seen them all.
        """
        if self.weights == DEPLOY:
            raise InputError("the model to deploy was trained on the held-out items too: load the `best` weights")
        given = {"topk": topk, "valid_negative": valid_negative, "valid_users_per_batch": valid_users_per_batch}
        config = self.config.replaced(**{name: value for name, value in given.items() if value is not None})
        if self.ranks.joined:
            options = [config.to_dict(), precision, split]
            self.ranks.check_same({"set of options": options, "dataset": self.dataset.fingerprint})
        check_precision(precision, self.device)
        exam = make_exam(self.dataset, split, config.valid_negative, self.ranks).to(self.device)
        scorer = NeuralScorer(self.model, DTYPES[precision])
        found = evaluate(
            scorer,
            exam,
            k=config.topk,
            users_per_batch=config.valid_users_per_batch,
            progress=progress and self.ranks.first,
            ranks=self.ranks,
        )
        warn_if_odd(found, exam)
        return found

    def describe(self, found: Evaluation) -> str:
        """The protocol of an evaluation in one line."""
        return protocol_line(found, select_on=self.config.select_on, epoch=int(self._state.get("epoch", 0)))

    def recommend(
        self, users: Iterable[Any], k: int = 10, *, filter_seen: bool = True, precision: str = "fp32"
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The `k` best items of each of `users`, by raw ids: items and scores (logits), an array a user, best first.

        Items that the user has touched, held-out and dropped ones too, are left out unless `filter_seen` is false;
        where fewer than `k` remain, an array is shorter. Raises InputError for an unknown user.
        """
        if not isinstance(k, int) or k < 1:
            raise InputError(f"k must be a whole number, at least 1: got {k!r}")
        if isinstance(users, str) or not isinstance(users, Iterable):
            raise InputError(f"users must be a list of ids, such as [7, 8]: got {users!r}")
        check_precision(precision, self.device)
        index = torch.tensor([self.user_index(user) for user in users], dtype=torch.int64, device=self.device)
        scorer = NeuralScorer(self.model, DTYPES[precision])
        seen = self._seen if filter_seen else None
        items: list[np.ndarray] = []
        scores: list[np.ndarray] = []
        step = max(1, min(USERS_AT_A_TIME, CELLS // self.dataset.n_items))
        for at in range(0, len(index), step):
            best = top_items(scorer, index[at : at + step], k, seen)
            found, value = (tensor.cpu().numpy() for tensor in best)
            for row, score in zip(found, value, strict=True):
                left = score > -np.inf
                items.append(self.dataset.item_ids[row[left]])
                scores.append(score[left])
        return items, scores

    def titles(self, items: np.ndarray) -> list[str]:
        """Titles of items given by raw id, "" where there is none."""
        if self.dataset.titles is None:
            return [""] * len(items)
        return [str(self.dataset.titles[self._item_index[item]]) for item in items.tolist()]

    def user_index(self, user: Any) -> int:
        """The dense index of a raw user id; `7` and `"7"` are one id. Raises InputError where it is unknown."""
        index = self._user_index.get(str(user))
        if index is None:
            raise InputError(
                f"user {user} is not among the {self.dataset.n_users} users that the model was trained on "
                "(in the log they may have had too few interactions); give a known id"
            )
        return index

    @property
    def dataset(self) -> Dataset:
        """The dataset that the network learned from."""
        if self._dataset is None:
            raise InputError("this Recommender is not trained yet: call fit or load first")
        return self._dataset

    @property
    def model(self) -> NeuMF:
        """The network."""
        if self._model is None:
            raise InputError("this Recommender is not trained yet: call fit or load first")
        return self._model

    def _take(self, run: Run, device: str, weights: str | None) -> None:
        if weights not in (None, BEST, DEPLOY):
            raise InputError(f"weights must be {BEST} or {DEPLOY}: got {weights!r}")
        self.device = pick_device(device, self.ranks)
        self.weights = weights or (DEPLOY if run.has(DEPLOY) else BEST)
        model, self._state = run.load_model(self.weights)
        self._model, self._dataset = model.to(self.device).eval(), run.dataset
        for cached in ("_user_index", "_item_index", "_seen"):
            self.__dict__.pop(cached, None)

    @cached_property
    def _user_index(self) -> dict[str, int]:
        return {str(user): index for index, user in enumerate(self.dataset.user_ids.tolist())}

    @cached_property
    def _item_index(self) -> dict[Any, int]:
        return {item: index for index, item in enumerate(self.dataset.item_ids.tolist())}

    @cached_property
    def _seen(self) -> Untouched:
        dataset = self.dataset
        return Untouched(*dataset.touched(), dataset.n_users, dataset.n_items).to(self.device)
