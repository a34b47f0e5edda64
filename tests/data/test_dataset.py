"""The dataset's directory: written whole, read back equal, and refused where it is not as it was written."""

import json
import re
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncf.data.dataset import Dataset
from ncf.data.duckdb_session import connect
from ncf.data.parquet import read_parquet, read_parquet_metadata, write_parquet
from ncf.data.storage import FILES
from ncf.data.unseen import PAD
from ncf.errors import InputError, RunError


@pytest.fixture(scope="session")
def small(make_dataset):
    """Three users and four items, with everything that a dataset can hold; `changes` replace fields."""

    def build(**changes):
        values = {
            "name": "small",
            "user_ids": np.array(["a", "ü", "z\n'\""], dtype=object),
            "item_ids": np.array([3, 50, 9148955329465708066, 2**63 - 1]),
            "train_users": int32(0, 0, 1, 2),
            "train_items": int32(3, 1, 0, 2),
            "validation_items": int32(2, PAD, PAD),
            "test_items": int32(0, 1, PAD),
            "dropped_users": int32(1),
            "dropped_items": int32(3),
            "seed": 5,
            "titles": np.array(["Ä", "", "c,d", "e"], dtype=object),
            "negatives": int32([1, 1, PAD], [2, 3, 1], [PAD, PAD, PAD]),
            "summary": {"users": 3, "text": "é"},
        } | changes
        return make_dataset([[]] * len(values["user_ids"]), len(values["item_ids"]), **values)

    return build


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def content(dataset):
    """Every field but where the dataset lies, arrays as type and list, so that `==` compares two datasets."""
    parts = [(part, field.name) for part in (dataset, dataset.interactions) for field in fields(part)]
    values = {name: getattr(part, name) for part, name in parts if name not in ("interactions", "directory")}
    return {name: (v.dtype, v.tolist()) if hasattr(v, "dtype") else v for name, v in values.items()}


@pytest.mark.parametrize("changes", [{}, {"titles": None}, {"negatives": None}, {"titles": None, "negatives": None}])
def test_round_trip(tmp_path, small, changes):
    dataset = small(**changes)
    dataset.save(tmp_path / "out")
    loaded = Dataset.load(tmp_path / "out")
    assert content(loaded) == content(dataset)
    assert loaded.fingerprint == dataset.fingerprint
    assert {entry.name for entry in (tmp_path / "out").iterdir()} <= FILES
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=15, deadline=None)
@given(
    ids=st.lists(words, min_size=2, max_size=6, unique=True),
    histories=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=5),
    titled=st.booleans(),
)
def test_round_trip_of_any_text(tmp_path_factory, make_dataset, ids, histories, titled):
    titles = np.array(ids[::-1], dtype=object) if titled else None
    dataset = make_dataset(histories, len(ids), item_ids=np.array(ids, dtype=object), titles=titles)
    path = tmp_path_factory.mktemp("data") / "out"
    dataset.save(path)
    assert content(Dataset.load(path)) == content(dataset)


def test_sizes_and_views(small):
    dataset = small()
    interactions = dataset.interactions
    assert (dataset.n_users, dataset.n_items, dataset.n_train) == (3, 4, 4)
    users, items, _ = interactions.sequence("validation", "test")
    assert (users.tolist(), items.tolist()) == ([0, 0, 0, 0, 1, 1, 2], [3, 1, 2, 0, 0, 1, 2])
    users, items = interactions.seen_pairs()
    assert (users.tolist(), items.tolist()) == ([0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 0, 1, 3, 2])
    assert interactions.heldout("test") is interactions.test_items
    assert interactions.heldout("validation") is interactions.validation_items
    with pytest.raises(InputError, match="--split .*'train'"):
        interactions.heldout("train")


def test_the_fingerprint_covers_all_but_name_and_summary(small):
    first = small().fingerprint
    assert small().fingerprint == first
    assert small(name="other", summary={}).fingerprint == first
    changed = [
        {"user_ids": np.array(["a", "ü", "y"], dtype=object)},
        {"user_ids": np.array(["aü", "", "z\n'\""], dtype=object)},
        {"item_ids": np.array(["3", "50", "9148955329465708066", str(2**63 - 1)], dtype=object)},
        {"train_users": int32(0, 0, 1, 1)},
        {"train_items": int32(1, 3, 0, 2)},
        {"validation_items": int32(PAD, PAD, PAD)},
        {"test_items": int32(0, 2, PAD)},
        {"dropped_items": int32(2)},
        {"seed": 6},
        {"titles": None},
        {"titles": np.array(["Ä", "x", "c,d", "e"], dtype=object)},
        {"negatives": None},
        {"negatives": int32([1, 2, PAD], [2, 3, 1], [PAD, PAD, PAD])},
    ]
    assert len({first, *(small(**changes).fingerprint for changes in changed)}) == len(changed) + 1


# What was changed or cut off is refused


@pytest.fixture
def saved(tmp_path, small):
    small().save(tmp_path / "out")
    return tmp_path / "out"


def refused(path, match):
    with pytest.raises(InputError, match=match) as caught:
        Dataset.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_truncated_files(saved, name, share):
    file = saved / name
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    refused(saved, "is damaged|ncf prepare")


@pytest.mark.parametrize("name", sorted(FILES))
def test_missing_files(saved, name):
    (saved / name).unlink()
    refused(saved, "is not a dataset" if name == "dataset.json" else rf"{name} is missing")


@pytest.mark.parametrize("name", sorted(FILES - {"dataset.json"}))
def test_files_of_another_dataset(saved, tmp_path, small, name):
    small(seed=6).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / name, saved / name)
    refused(saved, f"{name} belongs to another dataset")


EDITS = [
    lambda column: np.roll(column, 1),
    lambda column: column[:0],
    lambda column: np.repeat(column, 2),
    lambda column: np.full(len(column), 10**6, dtype=np.int32),
    lambda column: np.full(len(column), -7, dtype=np.int32),
    lambda column: column.astype(np.float64) if column.dtype != object else np.arange(len(column)),
]


@pytest.fixture
def con():
    with connect() as connection:
        yield connection


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", sorted(FILES - {"dataset.json"}))
def test_edited_files(con, saved, small, name, edit):
    """An edit is refused, unless it says the same in another way, such as the rows in another order."""
    file = saved / name
    columns, fingerprint = read_parquet(con, file), read_parquet_metadata(con, file)
    for edited in columns:
        changed = columns | {edited: edit(columns[edited])}
        if len({len(column) for column in changed.values()}) > 1:
            changed = {key: edit(column) for key, column in columns.items()}
        write_parquet(con, file, changed, fingerprint)
        try:
            assert content(Dataset.load(saved)) == content(small())
        except InputError as error:
            assert re.search("damaged|changed after|empty cells", str(error))  # noqa: PT017


@pytest.mark.parametrize("name", sorted(FILES - {"dataset.json"}))
def test_a_table_with_other_columns(con, saved, name):
    file = saved / name
    columns, fingerprint = read_parquet(con, file), read_parquet_metadata(con, file)
    write_parquet(con, file, {"unlike": next(iter(columns.values()))}, fingerprint)
    refused(saved, "damaged")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("format_version", 2, "format version 2 and this ncf reads 1: prepare it again"),
        ("kind", "something else", "damaged, or not of an ncf dataset"),
        ("users", 4, r"damaged"),
        ("users", -1, "damaged"),
        ("seed", 6, "changed after it was prepared"),
        ("seed", "x", "seed is 'x'"),
        ("fingerprint", "0" * 64, "another dataset"),
        ("summary", None, "summary is None"),
        ("negatives", None, "changed after"),
        ("negatives", 7, "damaged"),
        ("negatives", "x", "damaged"),
    ],
)
def test_edited_manifest(saved, key, value, match):
    manifest = json.loads((saved / "dataset.json").read_text())
    (saved / "dataset.json").write_text(json.dumps(manifest | {key: value}))
    refused(saved, match)


def test_what_is_no_dataset(tmp_path):
    refused(tmp_path / "nowhere", "nowhere is not a directory that exists: make a dataset with `ncf prepare")
    refused(tmp_path, r"is not a dataset .*: make a dataset with `ncf prepare")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", r"file is a file, not a dataset: make one of it with `ncf prepare .*file -o data/file`")
    (tmp_path / "dataset.json").write_text('["x"]')
    refused(tmp_path, "damaged, or not of an ncf dataset")


def test_parquet_helpers(con, tmp_path):
    path = tmp_path / "a'[1].parquet"
    columns = {
        "n": np.arange(3, dtype=np.int32),
        "x": np.array([0.5, 1, -2]),
        "s": np.array(["", "é", "1"], dtype=object),
    }
    write_parquet(con, path, columns, {"fingerprint": "ab'c\"", "with space": "{}"})
    found = read_parquet(con, path)
    assert {name: (column.dtype, column.tolist()) for name, column in found.items()} == {
        name: (column.dtype, column.tolist()) for name, column in columns.items()
    }
    assert read_parquet_metadata(con, path) == {"fingerprint": "ab'c\"", "with space": "{}"}
    write_parquet(con, path, {"n": np.zeros(0, dtype=np.int32), "s": np.zeros(0, dtype=object)}, {})
    assert {name: column.dtype for name, column in read_parquet(con, path).items()} == {"n": np.int32, "s": object}
    assert read_parquet_metadata(con, path) == {}
    with pytest.raises(InputError, match=r"nowhere\.parquet is missing"):
        read_parquet(con, tmp_path / "nowhere.parquet")
    with pytest.raises(RunError, match="cannot write"):
        write_parquet(con, tmp_path / "nowhere" / "x.parquet", columns, {})


def test_the_order_of_many_rows_survives(tmp_path, small):
    items = torch.from_numpy(np.random.default_rng(0).integers(0, 4, 300_000, dtype=np.int32))
    dataset = small(train_users=torch.zeros(300_000, dtype=torch.int32), train_items=items)
    dataset.save(tmp_path / "out")
    assert torch.equal(Dataset.load(tmp_path / "out").interactions.train_items, items)


def test_a_dataset_without_what_came_later_has_the_fingerprint_it_always_had(tiny):
    assert tiny.fingerprint == "ec0b0c8056ab0f1a57db277123ae0063b77696e4bf185692e7f2741bdc311df7"
