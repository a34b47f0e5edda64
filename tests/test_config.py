import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncf.config import GROUPS, PrepareConfig, PrepareOptions, RunConfig, TrainConfig, TrainOptions
from ncf.errors import InputError


@pytest.mark.parametrize("group", [PrepareConfig, TrainConfig, RunConfig])
def test_defaults_go_to_json_and_back(group):
    assert group.from_dict(json.loads(json.dumps(group().to_dict()))) == group()


@pytest.mark.parametrize(("config", "keywords"), [(PrepareConfig, PrepareOptions), (TrainConfig, TrainOptions)])
def test_editors_complete_every_option(config, keywords):
    assert list(keywords.__annotations__) == [item.name for item in dataclasses.fields(config)]
    assert {item.metadata["group"] for item in dataclasses.fields(config)} <= set(GROUPS)


def test_a_recipe_is_a_set_of_values_and_given_ones_win():
    assert TrainConfig.from_recipe("nvidia") == TrainConfig()
    history = TrainConfig.from_recipe()
    assert (history.recipe, history.layers, history.loss) == ("history", (), "softmax")
    assert TrainConfig.from_recipe(history=7) == dataclasses.replace(history, history=7)
    assert TrainConfig.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    with pytest.raises(InputError, match="--recipe must be history or nvidia: got 'best'"):
        TrainConfig.from_recipe("best")


@given(
    st.integers(0, 500),
    st.lists(st.integers(1, 500), max_size=5),
    st.floats(0.001, 0.999),
    st.floats(1e-6, 1e6),
    st.one_of(st.integers(1, 10**6), st.just("all")),
)
def test_values_in_range_go_to_json_and_back(factors, layers, dropout, rate, negatives):
    config = TrainConfig(factors=factors, layers=layers, dropout=dropout, learning_rate=rate, valid_negative=negatives)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "--epochs must be at least 1: got 0"),
        ({"epochs": 1.5}, "--epochs must be at least 1: got 1.5"),
        ({"epochs": True}, "--epochs"),
        ({"epochs": None}, "--epochs"),
        ({"dropout": float("nan")}, "--dropout must be at least 0 and below 1: got nan"),
        ({"layers": (8, 0)}, r"--layers must be at least 1: got \(8, 0\)"),
        ({"layers": "8"}, "--layers"),
        ({"fit_all": 1}, "--fit-all has a value of the wrong type: got 1"),
    ],
)
def test_values_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**options)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(InputError, match="unknown option factor: choose among recipe, factors, layers"):
        TrainConfig.from_dict({"factor": 3})


def test_whole_numbers_serve_as_floats():
    assert TrainConfig(learning_rate=1, dropout=0).learning_rate == 1


def test_paths_numbers_of_numpy_and_column_numbers_are_taken():
    assert RunConfig(checkpoint_dir=Path("runs") / "a").checkpoint_dir == "runs/a"  # type: ignore[arg-type]
    config = TrainConfig(epochs=np.int64(3), dropout=np.float32(0.25), layers=np.array([8, 4]))  # type: ignore[arg-type]
    assert json.loads(json.dumps(config.to_dict())) == TrainConfig(epochs=3, dropout=0.25, layers=(8, 4)).to_dict()
    assert PrepareConfig(user_column=1, item_column="2").user_column == "1"  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--epochs must be at least 1: got 0"):
        TrainConfig(epochs=np.int64(0))  # type: ignore[arg-type]


def test_an_automatic_weight_decay_follows_the_logs_density() -> None:
    auto = TrainConfig(weight_decay="auto")
    assert auto.for_log(n_users=60, n_items=40, n_train=1000).weight_decay == 0.2  # 2 / (10 per user and item)
    assert auto.for_log(n_users=60, n_items=40, n_train=300).weight_decay == 0.5  # at most
    assert auto.for_log(n_users=6040, n_items=3706, n_train=994_169).weight_decay == 0.02
    given = TrainConfig(weight_decay=0.3)
    assert given.for_log(n_users=60, n_items=40, n_train=300) is given
    assert TrainConfig.from_recipe("history").weight_decay == "auto"
