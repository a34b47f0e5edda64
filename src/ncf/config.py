"""Every option once: its name, unit, default, range and where the default comes from.

A new option is one line in its class here, and one in the `TypedDict` below the class, from which editors complete
keyword arguments. A test keeps the two alike.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from ncf.options import Options, option

GROUPS = ("data and run", "model", "optimisation", "evaluation", "hardware", "advanced")  # in the order of `--help`
_data, _model, _optimisation, _evaluation, _hardware, _advanced = (partial(option, group) for group in GROUPS)


@dataclass(frozen=True)
class PrepareConfig(Options):
    """How a log becomes a dataset (`ncf prepare`)."""

    min_ratings: int = _data(20, "drop users with fewer distinct items (1 keeps all); 20 as the NVIDIA recipe", low=1)
    min_value: float | None = _data(None, "drop rows whose rating or weight is below this; they still count as seen")
    validation: bool = _data(True, "hold out each user's last but one interaction, to select the epoch on")
    user_column: str | None = _data(None, "the column that holds the user: a name, or a number from 1")
    item_column: str | None = _data(None, "the column that holds the item: a name, or a number from 1")
    value_column: str | None = _data(None, "the column that holds the rating or weight: a name, or a number from 1")
    time_column: str | None = _data(None, "the column that holds the time: a name, or a number from 1")
    item_names: str | None = _data(None, "a file with each item's id and title")
    delimiter: str | None = _advanced(
        None, "what separates the columns of a text file: characters, `tab` or `space` (default: detected)"
    )
    header: bool | None = _advanced(None, "whether the first line of a text file names the columns (default: detected)")
    ties: str = _advanced(
        "draw",
        "the order of a user's rows without a time or with equal ones: draw it, or take the file's",
        choices=("draw", "file"),
    )
    on_bad_rows: str = _advanced(
        "error", "a row that cannot be read: stop, or skip and count", choices=("error", "skip")
    )
    seed: int = _advanced(
        0, "fixes the evaluation negatives, the order of ties, and a synthetic log", low=0, high=2**32 - 1
    )
    users: int = _advanced(2000, "users of a `synthetic` log", low=1)
    items: int = _advanced(1000, "items of a `synthetic` log", low=2)
    interactions: int = _advanced(120_000, "interactions of a `synthetic` log, to a few", low=1)


class PrepareOptions(TypedDict, total=False):
    """The fields of PrepareConfig as keyword arguments."""

    min_ratings: int
    min_value: float | None
    validation: bool
    user_column: str | int | None
    item_column: str | int | None
    value_column: str | int | None
    time_column: str | int | None
    item_names: Any
    delimiter: str | None
    header: bool | None
    ties: str
    on_bad_rows: str
    seed: int
    users: int
    items: int
    interactions: int


@dataclass(frozen=True)
class TrainConfig(Options):
    """What defines a trained model: the network, the optimisation and the evaluation (`ncf train`).

    Defaults are neutral: those of NVIDIA's NCF for TensorFlow (README and `ncf.py`), with what came later off. What
    `ncf train` and `Recommender` use unless told otherwise is a recipe, by `from_recipe`.
    """

    recipe: str = _model(
        "nvidia",
        "the set of defaults: history, found by measurement, or nvidia, those of NVIDIA's recipe",
        choices=("history", "nvidia"),
    )
    factors: int = _model(64, "width of GMF, the product of user and item; 0 leaves MLP alone", "-f", low=0)
    layers: tuple[int, ...] = _model(
        (256, 256, 128, 64), "widths of MLP, the first that of the concatenated embeddings; `none` leaves GMF", low=1
    )
    dropout: float = _model(0.5, "share of hidden activations dropped in training; 0 is off", low=0, below=1)
    history: int = _model(0, "how many of a user's last items the network reads beside the user's row; 0 is off", low=0)
    item_bias: bool = _model(False, "give each item a bias, which learns its popularity")

    epochs: int = _optimisation(40, "passes over the interactions", "-e", low=1, resumable=True)
    batch_size: int | None = _optimisation(
        None, "positives and negatives per step (default: by --steps-per-epoch and --smallest-batch)", "-b", low=1
    )
    negative_samples: int = _optimisation(4, "negatives per interaction, drawn anew every epoch", "-n", low=0)
    shared_negatives: int = _optimisation(
        0, "negatives that all rows of a step share, where there is no MLP (`--layers none`)", low=0
    )
    loss: str = _optimisation(
        "bce",
        "binary cross-entropy of each sample, or softmax: cross-entropy of the positive among its negatives",
        choices=("bce", "softmax"),
    )
    learning_rate: float = _optimisation(0.0045, "Adam's step size", "-l", above=0)
    schedule: str = _optimisation(
        "constant", "the learning rate: constant, or falling to 0 at the last epoch", choices=("constant", "linear")
    )
    weight_decay: float | str = _optimisation(
        0.0,
        "each step shrinks parameters by this times the learning rate (AdamW); 0 is off; `auto` is more for a log with "
        "few interactions per user and item",
        low=0,
        words=("auto",),
    )
    user_dropout: float = _optimisation(
        0.0,
        "share of the interactions in training that hide the user's row, so that --history serves alone",
        low=0,
        below=1,
    )
    target: float | None = _optimisation(None, "stop at this HR (default: off)", "-t", above=0, high=1, resumable=True)
    patience: int = _optimisation(
        0, "stop after this many epochs without a better one; 0 is off", low=0, resumable=True
    )
    fit_all: bool = _optimisation(False, "after selection, train again on every interaction, for the model to deploy")
    seed: int = _optimisation(0, "fixes initial weights, negatives, order and dropout", "-s", low=0, high=2**32 - 1)

    select_on: str = _evaluation(
        "validation",
        "what picks the epoch to keep; `test` is the recipe's habit, `last` keeps the last epoch",
        choices=("validation", "test", "last"),
    )
    eval_after: int = _evaluation(0, "epochs before the first that is evaluated; 0 evaluates every one", low=0)
    topk: int = _evaluation(10, "cutoff of HR and NDCG", "-k", low=1)
    valid_negative: int | str = _evaluation(
        99,
        "items without an interaction of the user that the held-out one is ranked with; `all` is the whole catalogue",
        low=1,
        words=("all",),
    )

    precision: str = _hardware(
        "fp32", "number format of matrix products; parameters stay fp32", choices=("fp32", "bf16", "fp16")
    )
    compile: bool | None = _hardware(None, "compile the step (default: on a GPU with a C compiler at hand)")
    valid_users_per_batch: int = _hardware(5000, "users scored at a time in evaluation", low=1)

    steps_per_epoch: int = _advanced(100, "about how many steps an epoch has, where --batch-size is not given", low=1)
    smallest_batch: int = _advanced(1, "interactions that a step has at least, where --batch-size is not given", low=1)
    beta1: float = _advanced(0.25, "Adam's decay of the gradient's mean", "-b1", low=0, below=1)
    beta2: float = _advanced(0.5, "Adam's decay of the gradient's square", "-b2", low=0, below=1)
    eps: float = _advanced(1e-8, "Adam's guard against division by zero", above=0)
    neg_trick: bool = _advanced(False, "draw negatives unchecked, so that a few are positives (the recipe's shortcut)")
    loss_scale: float | str = _advanced("dynamic", "fp16's loss scale", above=0, words=("dynamic",))

    @classmethod
    def from_recipe(cls, recipe: str = "history", **options: Any) -> "TrainConfig":
        """The options of a recipe, with some given ones over them. Raises InputError for an unknown name or value."""
        return cls.from_dict({**RECIPES.get(recipe, {}), **options, "recipe": recipe})

    def for_log(self, n_users: int, n_items: int, n_train: int) -> "TrainConfig":
        """The same with what is left to the log's size decided.

        An automatic weight decay is 2 / (interactions per user and item), at most 0.5, after a search on six logs
        (docs/algorithms.md, section 13).
        """
        if self.weight_decay != "auto":
            return self
        return self.replaced(weight_decay=round(min(0.5, 2 * (n_users + n_items) / max(1, n_train)), 3))


class TrainOptions(TypedDict, total=False):
    """The fields of TrainConfig as keyword arguments."""

    recipe: str
    factors: int
    layers: tuple[int, ...]
    dropout: float
    history: int
    item_bias: bool
    epochs: int
    batch_size: int | None
    negative_samples: int
    shared_negatives: int
    loss: str
    learning_rate: float
    schedule: str
    weight_decay: float | str
    user_dropout: float
    target: float | None
    patience: int
    fit_all: bool
    seed: int
    select_on: str
    eval_after: int
    topk: int
    valid_negative: int | str
    precision: str
    compile: bool | None
    valid_users_per_batch: int
    steps_per_epoch: int
    smallest_batch: int
    beta1: float
    beta2: float
    eps: float
    neg_trick: bool
    loss_scale: float | str


# docs/algorithms.md, section 13, explains these values.
RECIPES: dict[str, TrainOptions] = {
    "nvidia": {},
    "history": {
        "factors": 128,
        "layers": (),
        "history": 30,
        "item_bias": True,
        "loss": "softmax",
        "negative_samples": 0,
        "shared_negatives": 1024,
        "user_dropout": 0.2,
        "learning_rate": 0.002,
        "schedule": "linear",
        "weight_decay": "auto",
        "epochs": 5,
        "steps_per_epoch": 500,
        "smallest_batch": 64,
        "beta1": 0.9,
        "beta2": 0.999,
    },
}


@dataclass(frozen=True)
class RunConfig(Options):
    """Where and how a run goes; none of it changes the model (beyond a device's rounding)."""

    checkpoint_dir: str | None = _data(None, "the run's directory (default: runs/<dataset>)")
    resume: bool = _data(False, "continue after the last finished epoch; omitted options keep the run's values")
    overwrite: bool = _data(False, "replace an existing run, which is deleted when training begins")
    verbose: bool = _data(False, "print a line after every epoch, not only after a new best")
    tensorboard: bool = _data(False, "write TensorBoard events into the run's directory")
    device: str = _hardware("auto", "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class BenchmarkConfig(Options):
    """The size of the random log that `ncf benchmark` makes; MovieLens 20M's by default."""

    users: int = _data(138_493, "users of the log", low=1)
    items: int = _data(26_744, "items of the log", low=2)
    interactions: int = _data(20_000_263, "interactions per epoch", low=1)


@dataclass(frozen=True)
class LaunchConfig(Options):
    """How many processes compute; each has a range of the users."""

    devices: int = _hardware(1, "processes on this machine, each on its own GPU or its share of the CPU's cores", low=1)
