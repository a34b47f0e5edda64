"""The rules of the preparation, one by one, and what users of other tools reported."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from ncf.config import PrepareConfig
from ncf.data.unseen import PAD
from ncf.errors import InputError, NcfWarning
from ncf.ingest.prepare import default_output, prepare
from ncf.ingest.summary import format_summary

pytestmark = pytest.mark.filterwarnings("ignore:.*users have no test item:ncf.errors.NcfWarning")


def write(path, rows, header="userId,movieId,rating,timestamp", delimiter=","):
    lines = [header.replace(",", delimiter)] if header else []
    path.write_text("\n".join([*lines, *(delimiter.join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def raw_pairs(dataset, users, items):
    return [(str(dataset.user_ids[u]), str(dataset.item_ids[i])) for u, i in zip(users, items, strict=True)]


def train_pairs(dataset):
    return raw_pairs(dataset, dataset.interactions.train_users.tolist(), dataset.interactions.train_items.tolist())


def held(dataset, split):
    return {
        str(user): str(dataset.item_ids[item])
        for user, item in zip(dataset.user_ids, dataset.interactions.heldout(split).tolist(), strict=True)
        if item != PAD
    }


def is_canonical(text):
    return bool(re.fullmatch(r"0|-?[1-9]\d*", text)) and -(2**63) <= int(text) < 2**63


@pytest.mark.parametrize("times", [[3, 1, 2], [0.75, 0.25, 0.5], [2**60 + 3, 2**60 + 1, 2**60 + 2], [-1, -3, -2]])
def test_time_orders_whatever_its_unit(tmp_path, times):
    path = write(tmp_path / "log.csv", [(1, item, 1, time) for item, time in zip("abc", times, strict=True)])
    dataset = prepare(path, min_ratings=1)
    assert train_pairs(dataset) == [("1", "b")]
    assert (held(dataset, "validation"), held(dataset, "test")) == ({"1": "c"}, {"1": "a"})


@pytest.mark.parametrize(
    "times",
    [
        ["2020-01-02", "2019-12-31", "2020-01-01"],
        ["2020-01-01T10:00:00", "2020-01-01 08:00", "2020-01-01T09:59:59.5"],
        ["2020-01-01T10:00:00Z", "2020-01-01T11:00:00+02:00", "2020-01-01T05:30:00-04:00"],
        [" 2020-01-03 ", "2020-01-01", "2020-01-02"],
    ],
)
def test_dates_order_as_instants(tmp_path, times):
    path = write(tmp_path / "log.csv", [(1, item, 1, time) for item, time in zip("abc", times, strict=True)])
    dataset = prepare(path, min_ratings=1)
    assert train_pairs(dataset) == [("1", "b")]
    assert (held(dataset, "validation"), held(dataset, "test")) == ({"1": "c"}, {"1": "a"})


@pytest.mark.parametrize(
    ("times", "first", "last"),
    [
        ([1_000_000_000, 1_000_000_060], "2001-09-09T01:46:40Z", "2001-09-09T01:47:40Z"),
        ([1_000_000_000_000, 1_000_000_060_000], "2001-09-09T01:46:40Z", "2001-09-09T01:47:40Z"),
        (["2001-09-09", "2001-09-10T12:00:00Z"], "2001-09-09T00:00:00Z", "2001-09-10T12:00:00Z"),
        ([5, 7], 5, 7),
    ],
)
def test_the_span_of_time_is_in_the_summary(tmp_path, times, first, last):
    path = write(tmp_path / "log.csv", [(1, item, 1, time) for item, time in zip("ab", times, strict=True)])
    facts = prepare(path, min_ratings=1).summary
    assert (facts["first_time"], facts["last_time"]) == (first, last)


# The reports of other tools' users that this part has to answer (O01 to O08), and their like


def test_users_below_the_minimum_leave_no_rows_anywhere(tmp_path):  # O01
    rows = [(user, item, 1, item) for user, count in ((1, 4), (5, 3), (900, 5), (7, 2)) for item in range(count)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=3)
    assert dataset.user_ids.tolist() == [1, 5, 900]
    assert (dataset.interactions.test_items != PAD).sum() == 3 == dataset.n_users
    assert dataset.summary["users_dropped"] == 1
    assert dataset.summary["rows_of_dropped_users"] == 2


def test_ids_with_gaps_become_dense(tmp_path):  # O02
    rows = [(7, 193609, 1, 3), (7, 10, 1, 1), (7, 500, 1, 2)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1)
    assert dataset.item_ids.tolist() == [10, 500, 193609]
    assert dataset.item_ids.dtype == np.int64
    assert dataset.interactions.train_items.tolist() == [0]


def test_text_ids_are_kept(tmp_path):  # O03
    rows = [("AMEVO2LY6VEJA", "0000013714", 1, 1), ("AMEVO2LY6VEJA", "B00", 1, 2)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1)
    assert dataset.user_ids.tolist() == ["AMEVO2LY6VEJA"]
    assert dataset.item_ids.tolist() == ["0000013714", "B00"]


@pytest.mark.parametrize(
    ("spelled", "stored"),
    [
        (["0104257", "7"], ["0104257", "7"]),
        (["10", "9"], [9, 10]),
        (["9148955329465708066", "3"], [3, 9148955329465708066]),
        (["9223372036854775808", "30"], ["30", "9223372036854775808"]),
        (["-5", "-40"], [-40, -5]),
        (["+7", "7"], ["+7", "7"]),
        (["1e2", "100"], ["100", "1e2"]),
        (["7.0", "7"], ["7", "7.0"]),
        ([" 7 ", "5"], [5, 7]),
        (["2147483648", "1"], [1, 2147483648]),
    ],
)
def test_ids_are_exact(tmp_path, spelled, stored):
    rows = [(1, item, 1, number) for number, item in enumerate(spelled)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1)
    assert dataset.item_ids.tolist() == stored


@pytest.mark.parametrize("late", ["007", "x", "9148955329465708066", "-2147483649", "9223372036854775808"])
def test_an_unlike_id_beyond_the_sample_is_exact_too(tmp_path, late):
    rows = [(1, item, 1, item) for item in range(1000)] + [(1, late, 1, 1001)]
    dataset = prepare(write(tmp_path / "log.csv", rows))
    assert sorted(map(str, dataset.item_ids)) == sorted([*map(str, range(1000)), late])
    assert held(dataset, "test") == {"1": late}
    assert (dataset.item_ids.dtype == np.int64) == is_canonical(late)


@pytest.mark.parametrize("delimiter", ["\t", ";", "|", "::", " ", ","])
def test_delimiters_are_found(tmp_path, delimiter):  # O04
    rows = [(user, item, 1, 100 * user + item) for user in range(5) for item in range(4)]
    expected = prepare(write(tmp_path / "comma.csv", rows), min_ratings=1).fingerprint
    dataset = prepare(write(tmp_path / "log.txt", rows, delimiter=delimiter), min_ratings=1)
    assert dataset.summary["delimiter"] == delimiter
    assert dataset.fingerprint == expected
    assert prepare(write(tmp_path / "bare.txt", rows, None, delimiter), min_ratings=1).fingerprint == expected


def test_a_repeated_pair_keeps_its_earliest(tmp_path):  # O06
    rows = [(1, 10, 1, 50), (1, 20, 1, 40), (1, 10, 1, 10), (1, 10, 1, 60), (1, 30, 1, 20)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1)
    assert train_pairs(dataset) == [("1", "10")]
    assert (held(dataset, "validation"), held(dataset, "test")) == ({"1": "30"}, {"1": "20"})
    assert dataset.summary["repeated_pairs"] == 2
    assert any(re.search(r"repeated pairs dropped: +2$", line) for line in format_summary(dataset))


def test_without_a_time_held_out_items_are_drawn(tmp_path):  # O07
    rows = [(user, item) for user in range(200) for item in (10, 20, 30)]
    dataset = prepare(write(tmp_path / "log.csv", rows, "user_id,item_id"), min_ratings=1)
    counts = Counter(held(dataset, "test").values())
    assert sorted(counts) == ["10", "20", "30"]
    assert min(counts.values()) > 40  # each item is drawn as often; the file's order would hold out 30 alone
    assert not dataset.interactions.ordered
    lines = format_summary(dataset)
    assert any("held-out items are drawn (--ties file takes the file's order)" in line for line in lines)


def test_ties_file_takes_the_order_of_the_rows(tmp_path):
    path = write(tmp_path / "log.csv", [(1, 30), (1, 10), (1, 20)], "user_id,item_id")
    dataset = prepare(path, min_ratings=1, ties="file")
    assert (train_pairs(dataset), held(dataset, "test")) == ([("1", "30")], {"1": "20"})
    assert "first_time" not in dataset.summary
    assert any("as in the file" in line for line in format_summary(dataset))


def test_simultaneous_rows_are_counted_and_drawn(tmp_path):
    rows = [(1, 10, 1, 5), (1, 20, 1, 7), (1, 30, 1, 7), (1, 40, 1, 7), (1, 50, 1, 8)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1)
    assert dataset.summary["tied_rows"] == 3
    assert dataset.interactions.earlier is not None
    assert [counts.tolist() for counts in dataset.interactions.earlier] == [[0, 1, 1], [1], [4]]
    assert any("60% of the rows tie" in line for line in format_summary(dataset))
    last = {held(prepare(tmp_path / "log.csv", min_ratings=1, seed=seed), "validation")["1"] for seed in range(40)}
    assert last == {"20", "30", "40"}


def test_a_user_with_one_or_two_interactions(tmp_path):  # O08
    rows = [(1, 10, 1, 1), (2, 10, 1, 1), (2, 20, 1, 2), (3, 10, 1, 1), (3, 20, 1, 2), (3, 30, 1, 3)]
    path = write(tmp_path / "log.csv", rows)
    with pytest.warns(NcfWarning, match="1 of 3 users have no test item"):
        dataset = prepare(path, min_ratings=1)
    assert train_pairs(dataset) == [("1", "10"), ("2", "10"), ("3", "10")]
    assert held(dataset, "validation") == {"3": "20"}
    assert held(dataset, "test") == {"2": "20", "3": "30"}
    facts = dataset.summary
    assert (facts["users_without_validation"], facts["users_without_test"]) == (2, 1)


def test_ratings_of_zero_can_be_dropped_and_still_count_as_seen(tmp_path):
    rows = [(1, 10, 0, 1), (1, 20, 5, 2), (1, 30, 4, 3), (2, 10, 3, 1), (2, 20, 3, 2), (3, 10, 0, 1), (1, 99, 0, 9)]
    rows += [(2, 10, 0, 5), (2, 20, 1, 9)]  # a pair that is also kept; a value at the bound
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1, min_value=1)
    assert dataset.summary["rows_below_min_value"] == 4
    assert raw_pairs(dataset, dataset.interactions.dropped_users, dataset.interactions.dropped_items) == [("1", "10")]
    assert dataset.user_ids.tolist() == [1, 2]
    assert dataset.item_ids.tolist() == [10, 20, 30]
    assert (dataset.summary["dropped_pairs"], dataset.summary["repeated_pairs"]) == (1, 1)


def test_no_validation_leaves_the_last_but_one_in_training(tmp_path):
    path = write(tmp_path / "log.csv", [(1, item, 1, item) for item in range(5)])
    dataset = prepare(path, min_ratings=1, validation=False)
    assert (dataset.n_train, held(dataset, "validation"), held(dataset, "test")) == (4, {}, {"1": "4"})


def test_config_and_options(tmp_path):
    path = write(tmp_path / "log.csv", [(1, item, 1, item) for item in range(5)])
    dataset = prepare(path, config=PrepareConfig(min_ratings=2, seed=7), validation=False)
    assert dataset.seed == 7
    assert dataset.summary["rules"] == {"min_ratings": 2, "min_value": None, "validation": False, "ties": "draw"}
    with pytest.raises(InputError, match=r"unknown option minimum: choose among min_ratings, .*seed"):
        prepare(path, minimum=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="--min-ratings must be at least 1: got 0"):
        prepare(path, min_ratings=0)


def test_synthetic_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = prepare("synthetic", "out", users=40, items=60, interactions=1200, min_ratings=1, seed=3)
    assert dataset.summary["rows_read"] == 1200
    assert (dataset.name, dataset.seed, dataset.n_users) == ("out", 3, 40)
    assert dataset.titles is not None
    assert all(dataset.titles)
    assert dataset.summary["files"] == ["synthetic"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    sizes: dict[str, Any] = {"users": 40, "items": 60, "interactions": 1200}
    again, other = (prepare("synthetic", **sizes, min_ratings=1, seed=seed) for seed in (3, 4))
    assert again.fingerprint == dataset.fingerprint != other.fingerprint


def test_a_path_wins_over_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "synthetic", [(1, item, 1, item) for item in range(5)])
    assert prepare("synthetic", min_ratings=1).n_items == 5


def test_names_of_outputs(tmp_path):
    (tmp_path / "ml-1m").mkdir()
    log = write(tmp_path / "ml-1m" / "ratings.dat", [(1, item, 1, item) for item in range(5)])
    assert str(default_output(log)) == "data/ml-1m"
    assert str(default_output("ml-20m")) == "data/ml-20m"
    assert str(default_output("x/mine.csv.gz")) == "data/mine"
    assert prepare(log, min_ratings=1).name == "ml-1m"


def test_the_summary_counts_every_drop_even_zero(tmp_path):
    path = write(tmp_path / "log.csv", [(1, item, 1, item) for item in range(5)])
    lines = format_summary(prepare(path, tmp_path / "out", min_ratings=1))
    text = "\n".join(lines)
    for label in ("bad rows skipped", "rows under --min-value", "repeated pairs", "users under", "items left"):
        assert re.search(rf"{label}.*: +0", text)
    assert "user = userId, item = movieId, value = rating (not used), time = timestamp" in text
    assert re.search(r"rows read: +5\n", text)
    assert "3 train, 1 validation, 1 test" in text
    assert str(tmp_path / "out") in text
    assert Counter(line.index(line.split(":", 1)[1].strip()) for line in lines).most_common(1)[0][1] == len(lines)


def test_seen_pairs_and_sequence(tmp_path):
    rows = [(1, 10, 5, 1), (1, 20, 5, 2), (1, 30, 5, 3), (1, 40, 0, 4), (2, 40, 5, 1), (2, 10, 5, 2)]
    dataset = prepare(write(tmp_path / "log.csv", rows), min_ratings=1, min_value=1)
    users, items = dataset.interactions.seen_pairs()
    assert users.dtype == items.dtype == torch.int32
    expected = [("1", "10"), ("1", "20"), ("1", "30"), ("1", "40"), ("2", "10"), ("2", "40")]
    assert raw_pairs(dataset, users, items) == expected
    users, items, _ = dataset.interactions.sequence("validation", "test")
    assert users.dtype == items.dtype == torch.int32
    assert raw_pairs(dataset, users, items) == [("1", "10"), ("1", "20"), ("1", "30"), ("2", "40"), ("2", "10")]


def test_progress_goes_to_stderr(tmp_path, capsys):
    path = write(tmp_path / "log.csv", [(1, item, 1, item) for item in range(5)])
    prepare(path, min_ratings=1)
    assert capsys.readouterr() == ("", "")
    prepare(path, min_ratings=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading" in err
    assert "100%" in err


def test_inputs_are_not_modified(tmp_path):
    path = write(tmp_path / "log.csv", [(1, item, 1, item) for item in range(5)])
    before = path.read_bytes(), sorted(tmp_path.iterdir())
    prepare(path, min_ratings=1)
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == before
