"""Neural Collaborative Filtering: from a log of interactions to a trained NeuMF, a score and recommendations.

    dataset = ncf.prepare("clicks.csv", min_ratings=5)
    recommender = ncf.Recommender(epochs=20).fit(dataset)
    print(recommender.evaluate())
    items, scores = recommender.recommend([7, 8], k=10)

Names are imported when they are first used, so that a part needs only its own libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ncf.version import VERSION

if TYPE_CHECKING:
    from ncf.config import PrepareConfig, RunConfig, TrainConfig
    from ncf.data.dataset import Dataset
    from ncf.errors import InputError, NcfWarning, RunError
    from ncf.ingest.prepare import prepare
    from ncf.model.neumf import NeuMF
    from ncf.recommender import Recommender
    from ncf.training.train import train

__version__ = VERSION

__all__ = [
    "Dataset",
    "InputError",
    "NcfWarning",
    "NeuMF",
    "PrepareConfig",
    "Recommender",
    "RunConfig",
    "RunError",
    "TrainConfig",
    "prepare",
    "train",
]

_HOMES = {
    "Dataset": "ncf.data.dataset",
    "InputError": "ncf.errors",
    "NcfWarning": "ncf.errors",
    "NeuMF": "ncf.model.neumf",
    "PrepareConfig": "ncf.config",
    "Recommender": "ncf.recommender",
    "RunConfig": "ncf.config",
    "RunError": "ncf.errors",
    "TrainConfig": "ncf.config",
    "prepare": "ncf.ingest.prepare",
    "train": "ncf.training.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ncf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
