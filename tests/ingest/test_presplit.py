"""A split that came ready made, He et al.'s three files, taken as it is; and the real logs, where they are at hand."""

import gzip

import pytest

from ncf.data.dataset import Dataset
from ncf.data.unseen import PAD
from ncf.errors import InputError, NcfWarning
from ncf.ingest.prepare import prepare
from ncf.ingest.summary import format_summary

TRAIN = "0\t3\t5\t9\n0\t1\t4\t7\n1\t0\t3\t1\n2\t5\t1\t1\n"
TEST = "0\t4\t5\t99\n1\t2\t5\t99\n2\t0\t5\t99\n"
NEGATIVE = "(0,4)\t0\t2\t8\n(1,2)\t1\t3\t2\n(2,0)\t1\t1\t4\n"


@pytest.fixture
def split(tmp_path):
    def write(train=TRAIN, test=TEST, negative=NEGATIVE, packed=()):
        for part, content in (("train.rating", train), ("test.rating", test), ("test.negative", negative)):
            if content is not None:
                file = tmp_path / f"x.{part}"
                if part in packed:
                    (tmp_path / f"x.{part}.gz").write_bytes(gzip.compress(content.encode()))
                else:
                    file.write_text(content)
        return tmp_path

    return write


@pytest.mark.parametrize("part", ["train.rating.gz", "test.rating", "test.negative.gz"])
def test_any_of_the_three_files_finds_the_others(split, part):
    folder = split(packed=("train.rating", "test.negative"))
    dataset = prepare(folder / f"x.{part}", folder / "out")
    assert dataset.user_ids.tolist() == [0, 1, 2]
    assert dataset.item_ids.tolist() == [0, 1, 2, 3, 4, 5, 8]  # the union of the three files
    assert dataset.interactions.train_users.tolist() == [0, 0, 1, 2]
    assert dataset.interactions.train_items.tolist() == [1, 3, 0, 5]  # by their own times
    assert dataset.interactions.validation_items.tolist() == [PAD] * 3
    assert dataset.interactions.test_items.tolist() == [4, 2, 0]
    assert dataset.interactions.negatives.tolist() == [
        [0, 2, 6],
        [1, 3, 2],
        [1, 1, 4],
    ]  # the positive and a repeat stay
    assert Dataset.load(folder / "out").fingerprint == dataset.fingerprint
    assert dataset.summary["rows_read"] == 7
    assert any("a ready-made split" in line for line in format_summary(dataset))


def test_rows_in_any_order_and_lists_of_any_length(split):
    folder = split("2 5 1 1\n0 3 5 9\n1 0 3 1\n0 1 4 7\n", TEST, "(2,0) 1\n(0, 4)\t0\t2\t8\n(1,2) 1 3\n")
    dataset = prepare(folder / "x.train.rating")
    assert dataset.interactions.train_users.tolist() == [0, 0, 1, 2]
    assert dataset.interactions.train_items.tolist() == [1, 3, 0, 5]
    assert dataset.interactions.negatives.tolist() == [[0, 2, 6], [1, 3, PAD], [1, PAD, PAD]]


def test_simultaneous_training_rows(split):
    folder = split(train=TRAIN + "0\t2\t5\t9\n", test=TEST, negative=None)
    dataset = prepare(folder / "x.train.rating")
    assert dataset.interactions.earlier is not None
    assert dataset.interactions.earlier.train.tolist() == [0, 1, 1, 0, 0]
    assert dataset.interactions.earlier.test.tolist() == [3, 1, 1]  # the test item is the last, whatever its time
    assert prepare(folder / "x.train.rating", ties="file").interactions.train_items.tolist() == [1, 3, 2, 0, 5]


def test_text_ids_and_unions(split):
    folder = split("a\t07\t1\t1\nb\t7\t1\t1\n", "b\tx\t1\t1\nc\t07\t1\t1\n", None)
    with pytest.warns(NcfWarning, match="1 of 3 users have no test item"):
        dataset = prepare(folder / "x.test.rating")
    assert dataset.user_ids.tolist() == ["a", "b", "c"]
    assert dataset.item_ids.tolist() == ["07", "7", "x"]
    assert dataset.interactions.negatives is None
    assert dataset.interactions.test_items.tolist() == [PAD, 2, 0]
    dataset = prepare(split(negative=NEGATIVE.replace("8", "08")) / "x.train.rating")
    assert dataset.item_ids.tolist() == ["0", "08", "1", "2", "3", "4", "5"]


def test_files_that_do_not_fit_together(split):
    for parts, match in (
        ({"negative": NEGATIVE.replace("(1,2)", "(1,3)")}, r"line 2: its \(user,item\) is not a row of \.test\.rating"),
        ({"negative": NEGATIVE + "(1,2)\t4\n"}, "line 4: its .* is a second row for its user"),
        ({"negative": NEGATIVE.partition("(1,2)")[0]}, r"has no row for 2 of 3 users"),
        ({"negative": "0\t4\n"}, r"line 1: a row begins with \(user,item\): got '0'"),
        ({"test": TEST + "0\t5\t1\t1\n"}, "1 users have several rows"),
        ({"test": TEST + "0\t5\n"}, "2 cells where 4 are expected"),
    ):
        with pytest.raises(InputError, match=match):
            prepare(split(**parts) / "x.train.rating")


def test_a_part_alone(split):
    folder = split(test=None, negative=None)
    with pytest.warns(NcfWarning):
        assert prepare(folder / "x.train.rating", min_ratings=1).n_train == 3
    (folder / "y.test.rating").write_text(TEST)
    with pytest.raises(InputError, match=r"also needs y\.train\.rating"):
        prepare(folder / "y.test.rating")


def test_a_test_item_in_training_is_warned_of_and_repeats_are_dropped(split):
    folder = split(train=TRAIN + "0\t4\t1\t1\n0\t3\t1\t1\n")
    with pytest.warns(NcfWarning, match="1 users have their test item among their training rows"):
        dataset = prepare(folder / "x.train.rating")
    assert dataset.interactions.train_items.tolist() == [4, 3, 1, 0, 5]
    assert dataset.summary["repeated_pairs"] == 1


# The real logs. Figures are of the data's own README, but for anime's: its file holds fewer rows than the README says.


@pytest.mark.parametrize(
    ("name", "rows", "users", "items", "titled"),
    [
        ("ml-1m/ratings.dat.gz", 1_000_209, 6_040, 3_706, 3_706),
        ("ml-100k/u.data", 100_000, 943, 1_682, 1_682),
        ("ml-latest-small/ratings.csv", 100_836, 610, 9_724, 9_724),
        ("movietweetings/ratings.dat", 100_000, 16_554, 10_506, 10_506),
        ("lastfm-2k/user_artists.dat", 92_834, 1_892, 17_632, 0),
        ("musical-instruments/reviews.jsonl", 10_261, 1_429, 900, 0),
        ("anime/anime_ratings.dat.gz", 419_943, 4_714, 7_157, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:.*users have no test item:ncf.errors.NcfWarning")
def test_real_logs(shared_data, name, rows, users, items, titled):
    dataset = prepare(shared_data / name, min_ratings=1)
    facts = dataset.summary
    assert (facts["rows_read"], facts["users"], facts["items"]) == (rows, users, items)
    assert facts["interactions"] == rows
    assert facts["bad_rows"] == facts["repeated_pairs"] == 0
    assert facts["titled_items"] == titled
    assert facts["rules"]["min_ratings"] == 1


def titles_of(dataset: Dataset) -> list[str]:
    assert dataset.titles is not None
    return dataset.titles.tolist()


def test_real_ids_and_titles(shared_data):
    dataset = prepare(shared_data / "movietweetings" / "ratings.dat")
    titles = dict(zip(dataset.item_ids, titles_of(dataset), strict=True))
    assert titles["0104257"] == "A Few Good Men (1992)"
    dataset = prepare(
        shared_data / "lastfm-2k" / "user_artists.dat", item_names=str(shared_data / "lastfm-2k" / "artists.dat")
    )
    assert "MALICE MIZER" in dataset.titles.tolist()
    info = str(shared_data / "anime" / "anime_info.dat")
    dataset = prepare(shared_data / "anime" / "anime_ratings.dat.gz", item_names=info)
    assert dict(zip(dataset.item_ids.tolist(), titles_of(dataset), strict=True))[1723] == "Kimi no Na wa."
    dataset = prepare(shared_data / "ml-100k" / "u.data")
    assert "Misérables, Les (1995)" in dataset.titles.tolist()  # Latin-1


def test_he_split_of_ml_1m(shared_data):
    folder = shared_data / "ml-1m"
    dataset = prepare(folder / "ml-1m.test.rating")
    assert (dataset.n_users, dataset.n_items, dataset.n_train) == (6_040, 3_706, 994_169)
    assert (dataset.interactions.test_items != PAD).all()
    assert dataset.interactions.negatives.shape == (6_040, 99)
    assert (dataset.interactions.negatives == dataset.interactions.test_items[:, None]).any(1).sum() == 156
    degrees = dataset.interactions.train_users.bincount()
    assert (degrees == 19).sum() == 86


def test_leaving_the_last_out_of_ml_1m_is_he_official_split(shared_data):
    """The same rows under other ids: each user keeps as many, and test items are as popular."""
    given = prepare(shared_data / "ml-1m" / "ml-1m.train.rating.gz")
    plain = prepare(shared_data / "ml-1m" / "ratings.dat.gz", validation=False)
    assert plain.n_train == given.n_train
    assert plain.interactions.train_users.bincount().tolist() == given.interactions.train_users.bincount().tolist()
    counts = [
        dataset.interactions.train_items.bincount(minlength=3_706)[dataset.interactions.test_items.long()]
        for dataset in (plain, given)
    ]
    assert counts[0].tolist() == counts[1].tolist()
