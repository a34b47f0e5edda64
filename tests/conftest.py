from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncf.data.dataset import Dataset
from ncf.data.interactions import Interactions
from ncf.data.unseen import PAD


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real logs beside the project; tests that need it skip where it is absent."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real logs are not beside the project (../shared/data)")
    return folder


def build_dataset(histories: list[list[int]], n_items: int, **changes: object) -> Dataset:
    """A dataset from each user's items in order of time: the last is the test item, the one before for validation."""
    users, items = [], []
    validation, test = [], []
    for user, history in enumerate(histories):
        held = min(2, len(history) - 1)
        test.append(history[-1] if held >= 1 else PAD)
        validation.append(history[-2] if held == 2 else PAD)
        kept = history[: len(history) - held]
        users += [user] * len(kept)
        items += kept
    none = torch.zeros(0, dtype=torch.int32)
    arrays: dict[str, Any] = {
        "train_users": torch.tensor(users, dtype=torch.int32),
        "train_items": torch.tensor(items, dtype=torch.int32),
        "validation_items": torch.tensor(validation, dtype=torch.int32),
        "test_items": torch.tensor(test, dtype=torch.int32),
        "dropped_users": none,
        "dropped_items": none,
    }
    about: dict[str, Any] = {"name": "tiny"}
    for name, value in changes.items():
        (arrays if name in Interactions.__dataclass_fields__ else about)[name] = value
    ids = np.arange(1, len(histories) + 1), np.arange(100, 100 + n_items)
    return Dataset(
        user_ids=about.pop("user_ids", ids[0]),
        item_ids=about.pop("item_ids", ids[1]),
        interactions=Interactions(len(histories), n_items, **arrays),
        **about,
    )


@pytest.fixture(scope="session")
def make_dataset() -> Callable[..., Dataset]:
    return build_dataset


@pytest.fixture(scope="session")
def tiny() -> Dataset:
    """40 users with 8 random items of 60 each."""
    rng = np.random.default_rng(0)
    return build_dataset([rng.choice(60, 8, replace=False).tolist() for _ in range(40)], 60)


@pytest.fixture(scope="session")
def planted() -> Dataset:
    """160 users in 4 clusters; user u likes only items of u's cluster, 16 of its 20."""
    rng = np.random.default_rng(0)
    return build_dataset([(20 * (u % 4) + rng.choice(20, 16, replace=False)).tolist() for u in range(160)], 80)
