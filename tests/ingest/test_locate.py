"""Every form a log may come in, and its titles."""

import gzip
import json
import zipfile
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from ncf.errors import InputError, NcfWarning
from ncf.ingest.locate import source_name
from ncf.ingest.prepare import prepare
from ncf.ingest.titles import read_titles

PAIRS = [(user, item) for user in range(1, 4) for item in range(4, 9)]
ROWS = [(user, item, (user + item) % 5 + 1, 1_000_000_000 + 10 * user + item) for user, item in PAIRS]
HEADER = "userId,movieId,rating,timestamp"


def text(rows=ROWS, header=HEADER, delimiter=",", end="\n"):
    lines = [header.replace(",", delimiter)] if header else []
    return end.join([*lines, *(delimiter.join(map(str, row)) for row in rows)]) + end


@pytest.fixture
def fingerprint(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text(text())
    return prepare(path, min_ratings=1).fingerprint


def prepared(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare(path, min_ratings=1, **options)


@pytest.mark.parametrize(
    "content",
    [
        text(end="\r\n"),
        text().rstrip("\n"),
        b"\xef\xbb\xbf" + text().encode(),
        b"\xef\xbb\xbf" + text(header=None).encode(),
        text(header=None),
        text(header="userId, movieId, rating, timestamp"),
        text(header='"userId","movieId","rating","timestamp"'),
        text([tuple(f'"{cell}"' for cell in row) for row in ROWS]),
        text([tuple(f" {cell} " for cell in row) for row in ROWS], header=None),
        "\n\n" + text(),
        text(header="USER ID,Item-ID,Stars,Time"),
        gzip.compress(text().encode()),
        text([(t, i, u, r) for u, i, r, t in ROWS], "date,asin,reviewerID,overall"),
        text([(*row, 'the "weird al" song', "") for row in ROWS], HEADER + ",title,"),
        text([(*row, '"said ""no"", twice"') for row in ROWS], HEADER + ",title"),
        text([(*row, "x y") for row in ROWS], HEADER + ",note", "\t"),
    ],
)
def test_spellings_of_one_log(tmp_path, fingerprint, content):
    assert prepared(tmp_path / "log.txt", content).fingerprint == fingerprint


def test_a_quoted_cell_may_span_lines(tmp_path, fingerprint):
    rows = [(*row, '"two\nlines"') for row in ROWS]
    assert prepared(tmp_path / "log.csv", text(rows, HEADER + ",note")).fingerprint == fingerprint


@pytest.mark.parametrize("late", [False, True])
def test_latin1_where_it_is_not_utf8(tmp_path, late):
    rows = [(user, item) for user in range(20_000 if late else 2) for item in ("a", "b")]
    rows.append((0, "café"))
    path = tmp_path / "log.csv"
    path.write_bytes(text(rows, "user,item").encode("latin-1"))
    assert prepare(path, min_ratings=2).item_ids.tolist() == ["a", "b", "café"]


def test_column_flags(tmp_path, fingerprint):
    path = tmp_path / "log.csv"
    path.write_text(text([(i, u, r, t) for u, i, r, t in ROWS], "a,b,c,d"))
    named: dict[str, Any] = {"user_column": "b", "item_column": "A", "value_column": "c", "time_column": "4"}
    assert prepare(path, min_ratings=1, **named).fingerprint == fingerprint
    columns = prepare(path, min_ratings=1, **named).summary["columns"]
    assert columns == {"user": "b", "item": "a", "value": "c", "time": "d"}
    path.write_text(text([(i, u, r, t) for u, i, r, t in ROWS], None))
    assert prepare(path, min_ratings=1, user_column="2", item_column="1").fingerprint == fingerprint


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("userID,artistID,weight", ("userID", "artistID", "weight", None)),
        ("user,place_id,when,rating", ("user", "place_id", "rating", None)),
        ("x,user_id,y,hotel_id", ("user_id", "hotel_id", None, None)),
        ("reviewerID,asin,reviewTime,unixReviewTime", ("reviewerID", "asin", None, "unixReviewTime")),
        ("User-ID,ISBN,Book-Rating", ("User-ID", "ISBN", "Book-Rating", None)),
        ("id,user,ts,thing", ("user", "id", None, "ts")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*users have no test item:ncf.errors.NcfWarning")
def test_columns_are_known_by_name(tmp_path, header, columns):
    width = header.count(",") + 1
    rows = [tuple(10 * row + column for column in range(width)) for row in range(9)]
    dataset = prepared(tmp_path / "log.csv", text(rows, header), on_bad_rows="skip")
    assert tuple(dataset.summary["columns"].values()) == columns


def test_a_guess_is_said_to_be_one(tmp_path):
    rows = [(10 * row, row, 20 + row % 2, 3) for row in range(9)]
    with pytest.warns(NcfWarning) as said:
        dataset = prepared(tmp_path / "log.csv", text(rows, "shop,count,item_id,rating"), on_bad_rows="skip")
    assert tuple(dataset.summary["columns"].values()) == ("shop", "item_id", "rating", None)
    guess = "the user is taken to be column 'shop', of which nothing says so: name it with --user-column"
    assert guess in [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ((1, 2), (1, 2, None, None)),
        ((1, 2, 5), (1, 2, 3, None)),
        ((1, 2, 978300760), (1, 2, None, 3)),
        ((1, 2, "2020-01-01"), (1, 2, None, 3)),
        ((1, 2, 978300760, 5), (1, 2, 4, 3)),
        ((1, 2, "a title"), (1, 2, None, None)),
        ((1, 2, 5, 978300760), (1, 2, 3, 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*users have no test item:ncf.errors.NcfWarning")
def test_columns_without_a_header_go_by_place(tmp_path, row, columns):
    rows = [(row[0] + number, *row[1:]) for number in range(3)] + [(row[0], 9, *row[2:])]
    dataset = prepared(tmp_path / "log.csv", text(rows, None))
    found = dataset.summary["columns"].values()
    assert tuple(name and int(name.removeprefix("column ")) for name in found) == columns


def test_parquet_json_and_tables(tmp_path, fingerprint):
    frame = pd.DataFrame(ROWS, columns=HEADER.split(","))
    frame.to_parquet(tmp_path / "log.parquet")
    assert prepare(tmp_path / "log.parquet", min_ratings=1).fingerprint == fingerprint
    lines = [json.dumps({"nested": {"a": [1]}, **row}) for row in frame.to_dict("records")]
    assert prepared(tmp_path / "log.jsonl", "\n".join(lines)).fingerprint == fingerprint
    assert prepared(tmp_path / "log.jsonl.gz", gzip.compress("\n".join(lines).encode())).fingerprint == fingerprint
    arrow = pa.Table.from_pandas(frame)
    dated = frame.assign(timestamp=pd.to_datetime(frame["timestamp"], unit="s"))
    words = frame.assign(userId=frame["userId"].astype(str), movieId=frame["movieId"].astype("category"))
    floats = frame.astype(float)
    zoned = dated.assign(timestamp=dated["timestamp"].dt.tz_localize("UTC"))
    tables = [frame, frame.astype("int32"), floats, words, dated, zoned]
    tables += [
        pl.from_arrow(arrow),
        pl.from_arrow(arrow).lazy(),
        arrow,
        frame.iloc[::1].set_index("userId", drop=False),
    ]
    for table in tables:
        dataset = prepare(table, min_ratings=1)
        assert dataset.fingerprint == fingerprint
        assert dataset.summary["source"] == "a table in memory"


def test_tables_with_text_ids_and_empty_cells():
    frame = pd.DataFrame({"user": ["a", "a", None, "b"], "item": [1.0, 2.0, 3.0, np.nan]})
    with pytest.raises(InputError, match=r"the table, row 3: the user's id \(column 'user'\) is blank"):
        prepare(frame, min_ratings=1)
    dataset = prepare(frame, min_ratings=1, on_bad_rows="skip")
    assert (dataset.user_ids.tolist(), dataset.item_ids.tolist()) == (["a"], [1, 2])
    assert dataset.summary["bad_rows"] == 2


def test_mixed_number_and_text_ids_are_one(tmp_path):
    lines = ['{"user": 7, "item": "x"}', '{"user": "7", "item": "y"}', '{"user": 7, "item": 9148955329465708066}']
    dataset = prepared(tmp_path / "log.json", "\n".join(lines))
    assert dataset.user_ids.tolist() == [7]
    assert dataset.item_ids.tolist() == ["9148955329465708066", "x", "y"]


def test_a_glob_reads_files_in_the_order_of_their_names(tmp_path, fingerprint):
    for number, part in enumerate((ROWS[:4], ROWS[4:9], ROWS[9:])):
        (tmp_path / f"part-{number}.tsv").write_text(text(part, delimiter="\t"))
    dataset = prepare(str(tmp_path / "part-*.tsv"), min_ratings=1)
    assert dataset.fingerprint == fingerprint
    assert dataset.summary["rows_read"] == len(ROWS)
    assert len(dataset.summary["files"]) == 3
    (tmp_path / "part-3.tsv").write_text(text(ROWS, delimiter=","))
    with pytest.raises(InputError, match=r"part-3\.tsv is not written as .*part-0\.tsv is \(its delimiter differs\)"):
        prepare(str(tmp_path / "part-*.tsv"), min_ratings=1)


def test_a_name_with_wildcards_is_that_file(tmp_path, fingerprint):
    assert prepared(tmp_path / "log[1]*.csv", text()).fingerprint == fingerprint
    prepare(tmp_path / "log[1]*.csv", tmp_path / "out[1]'s", min_ratings=1)
    frame = pd.DataFrame(ROWS, columns=HEADER.split(","))
    frame.to_parquet(tmp_path / "log[2].parquet")
    assert prepare(tmp_path / "log[2].parquet", min_ratings=1).fingerprint == fingerprint


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


def test_archives_and_directories_bring_titles(tmp_path):
    movies = "".join(f"{item}::Film {item} (é)::Drama\n" for item in range(4, 8)).encode("latin-1")
    members = {"ml-1m/README": "", "ml-1m/movies.dat": movies, "ml-1m/ratings.dat": text(header=None, delimiter="::")}
    packed = archive(tmp_path / "ml-1m.zip", members)
    dataset = prepare(packed, min_ratings=1)
    expected = [f"Film {item} (é)" for item in range(4, 8)] + [""]
    assert dataset.titles.tolist() == expected
    assert dataset.summary["titled_items"] == 4
    assert dataset.summary["files"] == [f"{packed}:ml-1m/ratings.dat"]
    with zipfile.ZipFile(packed) as opened:
        opened.extractall(tmp_path / "unpacked")
    unpacked = tmp_path / "unpacked"
    for place in (unpacked, unpacked / "ml-1m", unpacked / "ml-1m" / "ratings.dat"):
        assert prepare(place, min_ratings=1).fingerprint == dataset.fingerprint
    (tmp_path / "kept").mkdir()
    packed.rename(tmp_path / "kept" / packed.name)
    assert prepare(tmp_path / "kept", min_ratings=1).fingerprint == dataset.fingerprint


def test_a_directory_with_one_log_or_several(tmp_path, fingerprint):
    (tmp_path / "plain.csv").rename(tmp_path / "one.csv")
    assert prepare(tmp_path, min_ratings=1).fingerprint == fingerprint
    (tmp_path / "two.csv").write_text(text())
    with pytest.raises(InputError, match=r"several files: name the log; found one\.csv, two\.csv"):
        prepare(tmp_path, min_ratings=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no log: name the log; found nothing"):
        prepare(tmp_path / "empty")


def test_a_damaged_archive(tmp_path):
    packed = archive(tmp_path / "a.zip", {"ratings.csv": text() * 99})
    whole = packed.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:60] + bytes(40) + whole[100:]):
        packed.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.zip is a damaged archive"):
            prepare(packed)
    with pytest.raises(InputError, match=r"b\.zip holds no ratings\.csv, ratings\.dat, u\.data: .*found x, y"):
        prepare(archive(tmp_path / "b.zip", {"x": "1", "y": "2"}))
    assert sorted(tmp_path.iterdir()) == [packed, tmp_path / "b.zip"]


@pytest.mark.parametrize(
    "content",
    [
        'movieId,title,genres\n4,"Four, the film",x\n7,Seven,y\n',
        "id\tname\turl\n4\tFour, the film\thttp://a\n7\tSeven\thttp://b\n",
        "4|Four, the film|01-Jan-1995||http\n7|Seven|01-Jan-1995||http\n",
        "4::Four, the film::Drama\n7::Seven::Drama\n",
        "title;item_id\nFour, the film;4\nSeven;7\n",
        '\ufeffanime_ids\tname\tmembers\n4\t"Four, the film"\t9\n7\tSeven\t3\n',
    ],
)
def test_item_names(tmp_path, content):
    names = tmp_path / "names.txt"
    names.write_text(content, encoding="utf-8")
    dataset = prepared(tmp_path / "log.csv", text(), item_names=str(names))
    assert dataset.titles.tolist() == ["Four, the film", "", "", "Seven", ""]
    assert dataset.summary["titles"] == str(names)


def test_item_names_of_other_kinds(tmp_path):
    path = tmp_path / "names.parquet"
    duckdb.execute(f"COPY (SELECT 4 AS item_id, 'Four' AS title) TO '{path}'")
    assert read_titles(path) == {"4": "Four"}
    with pytest.warns(NcfWarning, match="no item of .* is in the log"):
        dataset = prepared(tmp_path / "log.csv", text(), item_names=str(_write(tmp_path / "x.csv", "id,title\n99,x\n")))
    assert dataset.titles is None
    with pytest.raises(InputError, match="no such file"):
        prepare(tmp_path / "log.csv", min_ratings=1, item_names="nowhere.csv")
    with pytest.raises(InputError, match="no columns of ids and titles"):
        prepare(tmp_path / "log.csv", min_ratings=1, item_names=str(_write(tmp_path / "y.csv", "one\ntwo\n")))


def _write(path, content):
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("ml-20m", "ml-20m"),
        ("a/b.csv.gz", "b"),
        ("x/log-*.csv", "log"),
        ("d/ml-1m.train.rating.gz", "ml-1m"),
        ("*.csv", "log"),
    ],
)
def test_source_names(source, name):
    assert source_name(source) == name


def test_a_first_row_with_a_number_is_data_even_beside_a_known_word(tmp_path):
    path = tmp_path / "log.tsv"
    path.write_text("u1\tbook\t5\nu1\tfilm\t4\nu2\tbook\t3\nu2\tfilm\t1\n")
    dataset = prepare(path, min_ratings=1)
    assert dataset.summary["rows_read"] == 4
    assert dataset.item_ids.tolist() == ["book", "film"]


def test_a_json_array_is_told_from_json_lines(tmp_path):
    path = tmp_path / "log.json"
    path.write_text('[\n{"user_id": 1, "item_id": 2}]')
    with pytest.raises(InputError, match="one JSON array: write it as JSON lines"):
        prepare(path)
