"""The public face: fit, evaluate, recommend, save, load; raw ids in, raw ids out.

recommender = Recommender(epochs=20).fit("clicks.csv")
items, scores = recommender.recommend([7, 8], k=10)
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch

from ncf.config import PrepareOptions, RunConfig, TrainConfig, TrainOptions
from ncf.data.dataset import Dataset
from ncf.data.history import Histories
from ncf.data.ids import shortened
from ncf.data.interactions import SPLITS
from ncf.data.shard import AnyDataset
from ncf.data.unseen import UnseenItems
from ncf.device import configured, pick_device
from ncf.errors import InputError, NcfWarning
from ncf.ingest.prepare import prepare
from ncf.lists import Row, make_rows, make_table
from ncf.model.neumf import NeuMF
from ncf.model.products import DTYPES
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.ranking.eval_set import make_eval_set
from ncf.ranking.evaluate import MAX_SCORES, Evaluation, evaluate, protocol_line, warn_if_odd
from ncf.ranking.scorer import NeuralScorer
from ncf.ranking.topk import top_items
from ncf.runs.run import BEST, DEPLOY, RunDirectory
from ncf.runs.start import new_run
from ncf.training.step import check_precision
from ncf.training.train import TrainResult, train

USERS_AT_A_TIME = 256  # at most: no more scores at a time than evaluation holds


class Recommender:
    """A trained network with the dataset it learned from.

    Options are those of `TrainConfig`, as keyword arguments over those of `recipe` ("history" unless told otherwise),
    or as one `config`. Raises InputError for one that is unknown or out of its range.
    """

    result: TrainResult | None = None
    """What `fit` found: the epochs, and the test score."""

    def __init__(self, config: TrainConfig | None = None, **options: Unpack[TrainOptions]) -> None:
        if config is not None and options:
            raise InputError(f"give a TrainConfig or options, not both: got {', '.join(options)} beside it")
        self.config = config or TrainConfig.from_recipe(**options)
        self.device = torch.device("cpu")
        self.weights = BEST
        self._group = SINGLE
        self._state: dict[str, Any] = {}
        self._scorers: dict[str, NeuralScorer] = {}
        self._model: NeuMF | None = None
        self._dataset: AnyDataset | None = None

    def fit(
        self,
        data: Any,
        *,
        checkpoint_dir: str | Path | None = None,
        overwrite: bool = False,
        device: str = "auto",
        progress: bool = False,
        log: Callable[[str], None] = lambda _: None,
        **options: Unpack[PrepareOptions],
    ) -> Self:
        """Train as `ncf train` does, and keep the best epoch (or, with `fit_all`, the model to deploy).

        `data` is a Dataset, or a log: whatever `ncf.prepare` takes, such as a path or a data frame, with `options` for
        its preparation. Without `checkpoint_dir` the run's files are temporary; `save` keeps the model. With
        `overwrite` a run that is there is replaced. `log` gets the lines that `ncf train` prints. Raises what
        `ncf.prepare` and `ncf.train` raise.
        """
        if not isinstance(data, Dataset):
            data = prepare(data, progress=progress, **options)
        elif options:
            raise InputError(f"a Dataset is prepared already: {', '.join(options)} can no longer be applied")
        with tempfile.TemporaryDirectory(prefix="ncf-run-") as temporary:
            run = RunConfig(checkpoint_dir=str(checkpoint_dir or temporary), overwrite=overwrite, device=device)
            self.result = train(data, self.config, run, progress=progress, log=log)
            self._take(RunDirectory.open(self.result.checkpoint_dir, dataset=data), device, None)
        return self

    @classmethod
    def load(cls, directory: str | Path, *, device: str = "auto", weights: str | None = None) -> Self:
        """Read a run's directory (of `ncf train` or `save`); nothing else is needed.

        `weights` is `best` or `deploy`; by default the model to deploy where there is one (`--fit-all`). Raises
        InputError where the directory is no run, or is damaged, of another version, or a mix of two runs.
        """
        return cls._load(directory, device, weights, SINGLE)

    @classmethod
    def _load(cls, directory: str | Path, device: str, weights: str | None, group: ProcessGroup) -> Self:
        """`load` for several processes, each with its own users: they can `evaluate` together, and no more."""
        run = RunDirectory.open(Path(directory), group)
        recommender = cls(run.config)
        recommender._group = group
        recommender._take(run, device, weights)
        return recommender

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write a run's directory that `load`, `ncf evaluate` and `ncf recommend` read.

        The directory is whole or not there; one that is replaced is kept until the new one is written. Raises
        InputError where it holds something (a run, without `overwrite`) or is in use, RunError where it cannot be
        written.
        """
        with new_run(Path(directory), self.config, self.dataset, overwrite=overwrite) as run:
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
        dataset, group = self._trained()[1], self._group
        if group.connected:
            options = [config.to_dict(), precision, split]
            group.check_same({"set of options": options, "dataset": dataset.fingerprint})
        with configured(self.device, group):
            scorer = self._scorer(precision)
            eval_set = make_eval_set(dataset, split, config.valid_negative, group, history=config.history)
            eval_set = eval_set.to(self.device)
            found = evaluate(
                scorer,
                eval_set,
                k=config.topk,
                users_per_batch=config.valid_users_per_batch,
                progress=progress and group.is_main,
                group=group,
            )
        warn_if_odd(found, eval_set)
        return found

    def describe(self, found: Evaluation) -> str:
        """The protocol of an evaluation in one line."""
        return protocol_line(found, select_on=self.config.select_on, epoch=int(self._state.get("epoch", 0)))

    def recommend(
        self,
        users: Iterable[Any],
        k: int = 10,
        *,
        filter_seen: bool = True,
        precision: str = "fp32",
        unknown: str = "error",
        as_table: bool = False,
    ) -> Any:
        """The `k` best items of each of `users`, by raw ids.

        Returns items and scores (logits), two lists with an array per user, best first; or with `as_table` a data
        frame with the columns user_id, item_id, title, score and rank (pandas, else Arrow or polars). With
        `filter_seen`, items that the user has interacted with are left out, and a list may be shorter than `k`.

        Ids that are not in the model raise InputError, which names all of them; with `unknown="skip"` a warning does,
        and their lists are empty. An id is known by its spelling: `7` and `"7"` are one.
        """
        if unknown not in ("error", "skip"):
            raise InputError(f"unknown must be error or skip: got {unknown!r}")
        _check_k(k)
        found, missing = self.dataset.users.find(users)
        if missing and unknown == "error":
            self.dataset.users.indices(missing)  # raises, with all of them
        if missing:
            warnings.warn(f"unknown users are skipped: {shortened(missing)}", NcfWarning, stacklevel=2)
        known = [index for index in found if index is not None]
        lists = self._lists(known, k, filter_seen, precision)
        if as_table:
            return make_table(row for index, one in zip(known, lists, strict=True) for row in self._rows(index, *one))
        none = np.empty(0, np.int64), np.empty(0, np.float32)
        all_lists = [none if index is None else next(lists) for index in found]
        return [self.dataset.item_ids[items] for items, _ in all_lists], [scores for _, scores in all_lists]

    def recommend_rows(
        self, users: Iterable[Any], k: int = 10, *, filter_seen: bool = True, precision: str = "fp32"
    ) -> Iterator[Row]:
        """`recommend` as rows (user_id, item_id, title, score, rank), for lists too many to hold at once.

        Raises InputError for unknown users before the first row. Warns of users who have no item left.
        """
        index = self.dataset.users.indices(users)
        _check_k(k)
        lists = self._lists(index, k, filter_seen, precision)
        return (row for user, one in zip(index, lists, strict=True) for row in self._rows(user, *one))

    def score(self, users: Iterable[Any], items: Iterable[Any], *, precision: str = "fp32") -> np.ndarray:
        """The scores (logits) [B] of pairs: `users` [B] and `items` [B], by raw ids.

        Raises InputError for ids that are not in the model, which it names, and for lists of two lengths.
        """
        index = [
            torch.tensor(ids.indices(raw), dtype=torch.int64, device=self.device)
            for ids, raw in ((self.dataset.users, users), (self.dataset.items, items))
        ]
        if len(index[0]) != len(index[1]):
            raise InputError(f"score takes pairs: got {len(index[0])} users and {len(index[1])} items")
        with configured(self.device):
            scorer = self._scorer(precision)
            return scorer.score(self._user_rows(scorer, index[0]), index[1].unsqueeze(1)).squeeze(1).cpu().numpy()

    @property
    def dataset(self) -> Dataset:
        """The dataset that the network learned from."""
        dataset = self._trained()[1]
        assert isinstance(dataset, Dataset)  # noqa: S101 -- a shard serves evaluation alone
        return dataset

    @property
    def model(self) -> NeuMF:
        """The network."""
        return self._trained()[0]

    def _trained(self) -> tuple[NeuMF, AnyDataset]:
        if self._model is None or self._dataset is None:
            raise InputError("this Recommender is not trained yet: call fit or load first")
        return self._model, self._dataset

    def _take(self, run: RunDirectory, device: str, weights: str | None) -> None:
        if weights not in (None, BEST, DEPLOY):
            raise InputError(f"weights must be {BEST} or {DEPLOY}: got {weights!r}")
        self.device = pick_device(device, self._group)
        self.weights = weights or (DEPLOY if run.has(DEPLOY) else BEST)
        model, self._state = run.load_model(self.weights)
        self._model, self._dataset = model.to(self.device).eval(), run.dataset
        self._scorers = {}
        self.__dict__.pop("_seen", None)
        self.__dict__.pop("_histories", None)

    def _scorer(self, precision: str) -> NeuralScorer:
        """The scorer of a precision, which projects the catalogue once."""
        if precision not in self._scorers:
            check_precision(precision, self.device)
            self._scorers[precision] = NeuralScorer(self.model, DTYPES[precision])
        return self._scorers[precision]

    def _lists(
        self, users: Sequence[int], k: int, filter_seen: bool, precision: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The best items of each of `users`, all by index, and their scores."""
        scorer = self._scorer(precision)
        step = max(1, min(USERS_AT_A_TIME, MAX_SCORES // self.dataset.n_items))
        for at in range(0, len(users), step):
            index = torch.tensor(users[at : at + step], dtype=torch.int64, device=self.device)
            with configured(self.device):
                scores = scorer.score_all(self._user_rows(scorer, index))
                best = top_items(scores, int(k), self._seen.seen(index) if filter_seen else None)
            for row, score in zip(*(tensor.cpu().numpy() for tensor in best), strict=True):
                left = score > -np.inf
                yield row[left], score[left]

    def _user_rows(self, scorer: NeuralScorer, users: torch.Tensor) -> torch.Tensor:
        return scorer.user_rows(users, None if self._histories is None else self._histories.of_users(users))

    def _rows(self, user: int, items: np.ndarray, scores: np.ndarray) -> Iterator[Row]:
        dataset = self.dataset
        raw = dataset.user_ids[user : user + 1].tolist()[0]
        if not len(items):
            warnings.warn(f"user {raw} has seen every item: none is left to list", NcfWarning, stacklevel=2)
        titles = itertools.repeat("") if dataset.titles is None else map(str, dataset.titles[items])
        return make_rows(raw, dataset.item_ids[items].tolist(), titles, scores.tolist())

    @cached_property
    def _histories(self) -> Histories | None:
        mine, length = self._trained()[1].interactions, self.model.history
        sequence = mine.sequence(*SPLITS).to(self.device)
        return Histories(sequence, mine.n_users, length, ordered=mine.ordered) if length else None

    @cached_property
    def _seen(self) -> UnseenItems:
        mine = self._trained()[1].interactions
        return UnseenItems(*mine.seen_pairs(), mine.n_users, mine.n_items).to(self.device)


def _check_k(k: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise InputError(f"k must be a whole number, at least 1: got {k!r}")
