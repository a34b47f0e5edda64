"""Training with a history: what it learns, what it must not know, and that resuming changes nothing."""

import dataclasses

import numpy as np
import pytest

from ncf.config import RunConfig, TrainConfig
from ncf.errors import InputError
from ncf.ingest.prepare import prepare
from ncf.recommender import Recommender
from ncf.runs.run import RunDirectory
from ncf.training.train import train

HISTORY = TrainConfig.from_recipe(
    factors=16, history=4, shared_negatives=40, epochs=12, batch_size=64, learning_rate=0.02, valid_negative=20
)
NEUMF = TrainConfig(
    factors=8, layers=(32, 16), history=4, user_dropout=0.2, item_bias=True, epochs=8, batch_size=640, valid_negative=20
)


def train_into(path, dataset, config, **run):
    return train(dataset, config, RunConfig(checkpoint_dir=str(path), device="cpu", **run))


def write_log(path, histories, times=None):
    """Users from 1; `times` of each user's rows, by default 0, 1, 2 ..."""
    rows = [
        (user, item, place if times is None else times[user - 1][place])
        for user, history in enumerate(histories, 1)
        for place, item in enumerate(history)
    ]
    path.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in rows))
    return prepare(path, min_ratings=1)


@pytest.fixture(scope="module")
def walks(make_dataset):
    """Users walk through 60 items from a random start: only the last item tells the next."""
    starts = np.random.default_rng(0).integers(0, 60, 150)
    return make_dataset([[int(start + step) % 60 for step in range(12)] for start in starts], 60)


@pytest.mark.parametrize("config", [HISTORY, dataclasses.replace(NEUMF, epochs=25)], ids=["softmax", "NeuMF"])
def test_what_came_just_before_tells_the_next_item(tmp_path, walks, config):
    result = train_into(tmp_path, walks, config)
    assert result.test is not None
    assert result.test["hr@10"] > 0.95
    assert result.test["ndcg@10"] > 0.85


def test_a_list_goes_on_from_all_that_the_user_did(tmp_path, walks):
    train_into(tmp_path, walks, HISTORY)
    recommender = Recommender.load(tmp_path, device="cpu")
    items, _ = recommender.recommend([1], k=1)
    test_item = walks.item_ids[int(walks.interactions.test_items[0])]
    assert int(items[0][0]) == 100 + (int(test_item) - 100 + 1) % 60


def test_the_test_item_does_not_reach_the_history_of_validation(tmp_path):
    """In training an odd item is always followed by the even one before it. At the end it is the other way round."""
    rng = np.random.default_rng(0)
    histories = []
    for _ in range(400):
        pairs = rng.choice(30, 6, replace=False)
        histories.append([int(item) for pair in pairs[:5] for item in (2 * pair + 1, 2 * pair)])
        histories[-1] += [int(2 * pairs[5]), int(2 * pairs[5] + 1)]
    dataset = write_log(tmp_path / "log.csv", histories)
    result = train_into(tmp_path / "run", dataset, dataclasses.replace(HISTORY, valid_negative=9, topk=1))
    assert max(record.hr or 0 for record in result.history) < 0.25  # of 10 candidates; with the test item it would be 1


@pytest.mark.parametrize("order", ["ascending", "descending"])
@pytest.mark.parametrize("timed", [True, False])
def test_noise_scores_chance_whatever_the_files_order(tmp_path, order, timed):
    rng = np.random.default_rng(1)
    rows = [
        (user, item)
        for user in range(1, 401)
        for item in sorted(rng.choice(100, 12, replace=False).tolist(), reverse=order == "descending")
    ]
    (tmp_path / "log.csv").write_text(
        "user,item,time\n" + "".join(f"{user},{item},{7 if timed else ''}\n" for user, item in rows)
        if timed
        else "user,item\n" + "".join(f"{user},{item}\n" for user, item in rows)
    )
    found = {}
    for ties in ("draw", "file"):
        dataset = prepare(tmp_path / "log.csv", min_ratings=1, ties=ties)
        config = dataclasses.replace(HISTORY, valid_negative=59, topk=6, epochs=6, select_on="last")
        result = train_into(tmp_path / ties, dataset, config)
        assert result.test is not None
        found[ties] = result.test["hr@6"]
    assert found["draw"] < 0.16  # chance is 0.1, and 0.015 its spread over 400 users
    assert found["file"] > 0.25  # the next item in order: what a reader of files must not fall for


@pytest.mark.parametrize("config", [HISTORY, NEUMF], ids=["softmax", "NeuMF"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, tiny, config, monkeypatch):
    config = dataclasses.replace(config, epochs=5)
    train_into(tmp_path / "whole", tiny, config)
    save, saved = RunDirectory.save, []

    def stop_after_two(run, name, *rest):
        save(run, name, *rest)
        saved.append(name)
        if saved.count("last") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            train_into(tmp_path / "stopped", tiny, config)
    train_into(tmp_path / "stopped", tiny, config, resume=True)
    whole, resumed = (RunDirectory.open(tmp_path / name).load("last")[0] for name in ("whole", "stopped"))
    assert all((whole[name] == resumed[name]).all() for name in whole)


def test_a_falling_rate_has_its_length_from_the_start(tmp_path, tiny):
    train_into(tmp_path, tiny, dataclasses.replace(HISTORY, epochs=3))
    with pytest.raises(InputError, match=r"cannot change --epochs where the learning rate falls .* has 3, got 4"):
        train_into(tmp_path, tiny, dataclasses.replace(HISTORY, epochs=4), resume=True)


def test_the_model_to_deploy_follows_the_same_schedule(tmp_path, walks):
    result = train_into(tmp_path, walks, dataclasses.replace(HISTORY, fit_all=True))
    deployed = Recommender.load(tmp_path, device="cpu")
    assert deployed.weights == "deploy"
    assert result.best_epoch <= 12
    items, _ = deployed.recommend([1], k=1, filter_seen=False)
    assert len(items[0]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (16, 8)}, "--layers 16 8 has no place beside --shared-negatives 1024"),
        ({"loss": "bce"}, "--shared-negatives need --loss softmax"),
        ({"shared_negatives": 0}, "--negative-samples 0 leaves no negatives"),
        ({"history": 0}, "--user-dropout hides the user's row"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, tiny, options, message):
    with pytest.raises(InputError, match=message):
        train_into(tmp_path, tiny, TrainConfig.from_recipe(**options))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": -1}, "--history must be at least 0: got -1"),
        ({"user_dropout": 1.0}, "--user-dropout must be at least 0 and below 1: got 1.0"),
        ({"recipe": "fast"}, "--recipe must be history or nvidia: got 'fast'"),
    ],
)
def test_values_out_of_range(options, message):
    with pytest.raises(InputError, match=message):
        TrainConfig.from_recipe(**options)


def test_a_history_longer_than_any_users_is_harmless(tmp_path, tiny):
    result = train_into(tmp_path, tiny, dataclasses.replace(HISTORY, history=500, epochs=1))
    assert result.test is not None


def test_an_automatic_weight_decay_is_decided_once_and_resumes(tmp_path, tiny):
    auto = dataclasses.replace(HISTORY, weight_decay="auto")
    train_into(tmp_path, tiny, auto)
    decay = RunDirectory.open(tmp_path).config.weight_decay
    assert decay == auto.for_log(tiny.n_users, tiny.n_items, tiny.n_train).weight_decay
    assert isinstance(decay, float)
    train_into(tmp_path, tiny, auto, resume=True)
