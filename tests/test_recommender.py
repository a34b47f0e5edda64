import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ncf
from ncf import recommender as recommender_module
from ncf.files import locked
from ncf.ranking.topk import top_items
from ncf.runs.run import RunDirectory

OPTIONS: dict[str, Any] = {"recipe": "nvidia", "factors": 8, "layers": (32, 16), "epochs": 3, "valid_negative": 20}


@pytest.fixture(scope="module")
def fitted(tiny):
    return ncf.Recommender(**OPTIONS).fit(tiny, device="cpu")


def test_fit_evaluate_recommend(fitted):
    found = fitted.evaluate()
    assert (found.users, found.negatives, found.split) == (40, 20, "test")
    assert found.hr == fitted.evaluate("test", valid_users_per_batch=7).hr
    items, scores = fitted.recommend([7, "8"], k=5)
    assert [len(row) for row in items] == [5, 5]
    assert (np.diff(scores[0]) <= 0).all()
    assert set(items[0].tolist()) <= set(fitted.dataset.item_ids.tolist())


def test_one_user_and_many_agree(fitted):
    items, scores = fitted.recommend(fitted.dataset.user_ids, k=60)
    for user in (1, 17, 40):
        one, score = fitted.recommend([user], k=60)
        assert one[0].tolist() == items[user - 1].tolist()
        np.testing.assert_allclose(score[0], scores[user - 1], atol=1e-5)


def test_unknown_users_can_be_skipped(fitted):
    with pytest.warns(ncf.NcfWarning, match="unknown users are skipped: 999"):
        items, scores = fitted.recommend([7, 999, 8.0], k=5, unknown="skip")
    expected, _ = fitted.recommend(["7", np.int64(8)], k=5)
    assert [row.tolist() for row in items] == [expected[0].tolist(), [], expected[1].tolist()]
    assert [len(row) for row in scores] == [5, 0, 5]


def test_a_table_has_the_columns_of_csv(fitted):
    table = fitted.recommend([7, 8], k=3, as_table=True)
    items, scores = fitted.recommend([7, 8], k=3)
    assert list(table.columns) == ["user_id", "item_id", "title", "score", "rank"]
    assert table["user_id"].tolist() == [7, 7, 7, 8, 8, 8]
    assert table["item_id"].tolist() == np.concatenate(items).tolist()
    assert table["score"].tolist() == pytest.approx(np.concatenate(scores).tolist())
    assert table["rank"].tolist() == [1, 2, 3, 1, 2, 3]
    assert list(fitted.recommend([], as_table=True).columns) == list(table.columns)


def test_pairs_score_as_in_lists(fitted):
    items, scores = fitted.recommend([7], k=60, filter_seen=False)
    found = fitted.score([7] * 60, items[0])
    np.testing.assert_allclose(found, scores[0], atol=1e-5)


def test_seen_items_are_left_out_held_out_ones_too(fitted, tiny):
    users, items = tiny.interactions.seen_pairs()
    recommended, _ = fitted.recommend([1], k=60)
    seen = {100 + item for item in items[users == 0].tolist()}
    assert len(seen) == 8
    assert set(recommended[0].tolist()) == set(range(100, 160)) - seen
    everything, _ = fitted.recommend([1], k=60, filter_seen=False)
    assert set(everything[0].tolist()) == set(range(100, 160))


def test_save_and_load(fitted, tmp_path):
    fitted.save(tmp_path / "run")
    loaded = ncf.Recommender.load(tmp_path / "run", device="cpu")
    assert loaded.evaluate() == fitted.evaluate()
    for ours, theirs in zip(loaded.recommend([3, 9]), fitted.recommend([3, 9]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ncf.InputError, match="holds a run already"):
        fitted.save(tmp_path / "run")
    fitted.save(tmp_path / "run", overwrite=True)
    assert loaded.describe(loaded.evaluate()) == fitted.describe(fitted.evaluate())


def test_save_leaves_a_directory_that_is_in_use_alone(fitted, tmp_path):
    fitted.save(tmp_path / "run")
    with locked(tmp_path / "run" / ".lock", "somebody"), pytest.raises(ncf.InputError, match="in use"):
        fitted.save(tmp_path / "run", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(ncf.InputError, match="thesis.tex"):
        fitted.save(tmp_path / "other", overwrite=True)
    with pytest.raises(ncf.InputError, match="is a file"):
        fitted.save(tmp_path / "other" / "thesis.tex", overwrite=True)


def test_fit_keeps_what_training_found_and_replaces_a_run_when_told(tiny, tmp_path):
    recommender = ncf.Recommender(**OPTIONS, fit_all=True).fit(tiny, checkpoint_dir=tmp_path / "run", device="cpu")
    assert recommender.weights == "deploy"
    assert len(recommender.result.history) == 3
    assert recommender.result.test["hr@10"] == ncf.Recommender.load(tmp_path / "run", weights="best").evaluate().hr
    with pytest.raises(ncf.InputError, match="holds a run already"):
        recommender.fit(tiny, checkpoint_dir=tmp_path / "run", device="cpu")
    recommender.fit(tiny, checkpoint_dir=tmp_path / "run", overwrite=True, device="cpu")


def test_lists_of_many_users_hold_a_bounded_number_of_scores(fitted, monkeypatch):
    expected = fitted.recommend(fitted.dataset.user_ids, k=5)
    shapes = []

    def watched(scores, *rest):
        shapes.append(scores.shape)
        return top_items(scores, *rest)

    monkeypatch.setattr(recommender_module, "MAX_SCORES", 7 * fitted.dataset.n_items)
    monkeypatch.setattr(recommender_module, "top_items", watched)
    found = fitted.recommend(fitted.dataset.user_ids, k=5)
    assert max(shapes) == (7, fitted.dataset.n_items)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.tolist() == theirs.tolist()


def test_a_saved_model_is_not_trained_over_by_resume(fitted, tiny, tmp_path):
    fitted.save(tmp_path / "run")
    run = ncf.RunConfig(checkpoint_dir=str(tmp_path / "run"), resume=True, device="cpu")
    with pytest.raises(ncf.InputError, match="a saved model and no training to go on with"):
        ncf.train(tiny, ncf.TrainConfig(**OPTIONS), run)


def test_fit_can_keep_the_run(tiny, tmp_path):
    lines = []
    recommender = ncf.Recommender(**OPTIONS).fit(tiny, checkpoint_dir=tmp_path / "run", device="cpu", log=lines.append)
    assert RunDirectory.open(tmp_path / "run").has("last")
    assert lines[-1].startswith("Model: ")
    assert recommender.evaluate() == ncf.Recommender.load(tmp_path / "run", device="cpu").evaluate()


def test_fit_from_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"user": ["a", "a", "b", "b", "c"] * 2, "item": [1, 2, 2, 3, 1, 3, 4, 4, 1, 5]})
    recommender = ncf.Recommender(**(OPTIONS | {"select_on": "test", "valid_negative": 1, "topk": 1}))
    recommender.fit(table, device="cpu", min_ratings=2, validation=False)
    items, _ = recommender.recommend(["b"], k=9)
    assert items[0].tolist() == [5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ncf.Recommender(factor=3), "unknown option factor"),  # type: ignore[call-arg]
        (lambda: ncf.Recommender(ncf.TrainConfig(), epochs=3), "not both"),
        (lambda: ncf.Recommender().evaluate(), "not trained yet"),
        (lambda: ncf.Recommender().recommend([1]), "not trained yet"),
        (lambda: ncf.Recommender.load("nowhere"), "does not exist"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ncf.InputError, match=message):
        call()


def test_mistakes_with_a_fitted_one(fitted):
    with pytest.raises(ncf.InputError, match="the 40 users of the model.*: 999, x;"):
        fitted.recommend([999, 1, "x"])
    with pytest.raises(ncf.InputError, match="k must be a whole number, at least 1: got 0"):
        fitted.recommend([1], k=0)
    with pytest.raises(ncf.InputError, match="users must be a list of ids"):
        fitted.recommend("78")
    with pytest.raises(ncf.InputError, match="users must be a list of ids"):
        fitted.recommend(7)
    with pytest.raises(ncf.InputError, match="--precision must be fp32, bf16 or fp16: got 'fp64'"):
        fitted.evaluate(precision="fp64")
    with pytest.raises(ncf.InputError, match="a log is a path"):
        ncf.Recommender().fit([1, 2])
    with pytest.raises(ncf.InputError, match="unknown must be error or skip: got 'drop'"):
        fitted.recommend([1], unknown="drop")
    with pytest.raises(ncf.InputError, match="the 60 items of the model: 5;"):
        fitted.score([1], [5])
    with pytest.raises(ncf.InputError, match="pairs: got 2 users and 1 items"):
        fitted.score([1, 2], [100])
    with pytest.raises(ncf.InputError, match="prepared already: min_ratings"):
        ncf.Recommender().fit(fitted.dataset, min_ratings=3)
    with pytest.raises(ncf.InputError, match="validation or test: got 'train'"):
        fitted.evaluate("train")
    with pytest.raises(ncf.InputError, match="--topk must be at least 1: got 0"):
        fitted.evaluate(topk=0)


def test_import_is_lazy_and_the_network_needs_torch_alone():
    code = """
import sys
import ncf
assert "torch" not in sys.modules and "duckdb" not in sys.modules
import ncf.model.neumf, ncf.training.step
assert not {"duckdb", "safetensors"} & set(sys.modules), sorted(sys.modules)
assert sorted(dir(ncf)) == sorted(ncf.__all__)
for name in ncf.__all__:
    getattr(ncf, name)
try:
    ncf.nothing
except AttributeError:
    pass
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
