"""Bad input: one clear line that says what is wrong, the value received and the fix; and nothing left behind."""

import gzip
import re

import duckdb
import pytest

from ncf.errors import InputError, NcfWarning
from ncf.ingest.prepare import prepare

HEADER = "userId,movieId,rating,timestamp\n"
GOOD = HEADER + "".join(f"{user},{item},4.5,{100 * user + item}\n" for user in range(1, 4) for item in range(1, 6))


def refused(source, match, **options):
    with pytest.raises(InputError, match=match) as caught:
        prepare(source, **({"min_ratings": 1} | options))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.fixture
def log(tmp_path):
    def write(content):
        path = tmp_path / "log.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "log.csv is empty"),
        ("\n \n", "log.csv is empty"),
        (HEADER, "has a header and no rows"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "is not a text file"),
        ("just some words\nwithout any table\nin it\n", "cannot tell|no columns that"),
        ("one\ntwo\nthree\n", "no columns that .*: 'one'; name it with --delimiter"),
        ("alice,matrix\nbob,memento\n", "cannot tell whether the first line 'alice, matrix' .*--no-header.*--user-col"),
        (
            "colour,shape,rating\n1,2,3\n",
            "no column known as user or item: found 'colour', 'shape', 'rating'; .*--user",
        ),
        ("userId,movieId\n1,2,3\n1,2,3\n", "has 2 column names but 3 cells"),
        (gzip.compress(GOOD.encode() * 50)[:-30], "cannot be read"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
        ('{"user": 1, "item": 2}\nnot json\n', "line 2: the user's id .* is blank: 'not json'"),
        ('{"user": 1, "item": 2}\n{"user": 1}\n', "line 2: the item's id .* is blank"),
        ("{not json}\n{}\n", "line 1 is not a JSON object"),
        (b"PAR1 but not Parquet", "cannot be read"),
    ],
)
def test_what_is_not_a_log(log, content, match):
    refused(log(content), match)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("2,7,3", r"3 cells where 4 are expected \(delimiter ','\): '2,7,3'"),
        ("2,7,3,4,5", r"5 cells where 4 are expected \(delimiter ','\): '2,7,3,4,5'"),
        (",7,3,4", r"the user's id \(column 'userId'\) is blank: ',7,3,4'"),
        ("2,  ,3,4", r"the item's id \(column 'movieId'\) is blank: '2,  ,3,4'"),
        ('2,"",3,4', r"the item's id \(column 'movieId'\) is blank"),
        ("2,7,good,4", r"the rating \(column 'rating'\) is not a number: '2,7,good,4'"),
        ("2,7,nan,4", r"the rating \(column 'rating'\) is not a number"),
        ("2,7,3,yesterday", r"the time \(column 'timestamp'\) is not a number or an ISO date: '2,7,3,yesterday'"),
        ("2,7,3,", r"the time \(column 'timestamp'\) is not a number or an ISO date"),
        ("2,7,3,inf", r"the time \(column 'timestamp'\) is not a number or an ISO date"),
        ('2,"7,3,4', "a quote mark that is never closed"),
    ],
)
@pytest.mark.parametrize("place", [1, 14])
def test_a_bad_row_is_named(log, row, match, place):
    lines = GOOD.splitlines()
    lines.insert(place, row)
    path = log("\n".join(lines) + "\n")
    refused(path, rf"log\.csv, line {place + 1}: {match}.*--on-bad-rows skip")


def test_a_blank_rating_counts_only_where_ratings_do(log):
    path = log(GOOD + "2,7,,4\n")
    assert prepare(path, min_ratings=1).summary["bad_rows"] == 0
    refused(path, r"the rating \(column 'rating'\) is not a number: '2,7,,4'", min_value=1)


def test_feedback_in_words_is_no_rating(log):
    path = log("user_id,item_id,feedback\n1,2,like\n1,3,skip\n2,2,like\n")
    with pytest.warns(NcfWarning, match="1 of 2 users have no test item"):
        dataset = prepare(path, min_ratings=1)
    assert dataset.summary["columns"] == {"user": "user_id", "item": "item_id", "value": None, "time": None}
    assert dataset.summary["rows_read"] == 3
    refused(path, "--min-value 1 needs a rating, and no column is one: name --value-column", min_value=1.0)
    refused(path, "the rating .*'1,2,like'", value_column="feedback")


def test_a_bound_above_every_rating(log):
    refused(log(GOOD), r"no row has a rating of at least 6 \(the highest is 4.5\): lower --min-value", min_value=6.0)


@pytest.mark.parametrize("lines", [20, 20_000])
def test_json_lines_cut_off_within_their_gzip(tmp_path, lines):
    path = tmp_path / "log.json.gz"
    rows = "".join(f'{{"user": {row % 97}, "item": {row}}}\n' for row in range(lines))
    path.write_bytes(gzip.compress(rows.encode())[:-20])
    refused(path, "log.json.gz (is damaged or )?cannot be read: .*; is it complete")


def test_titles_with_empty_cells(log, tmp_path):
    titles = tmp_path / "titles.parquet"
    rows = "(1, 'One', NULL), (2, NULL, 'x'), (3, 'Three', 'y')"
    duckdb.execute(f"COPY (SELECT * FROM (VALUES {rows}) AS t(item_id, title, genre)) TO '{titles}'")
    dataset = prepare(log(GOOD), min_ratings=1, item_names=titles)
    found = dict(zip(dataset.item_ids.tolist(), dataset.titles.tolist(), strict=True))
    assert found == {1: "One", 2: "", 3: "Three", 4: "", 5: ""}


def test_bad_rows_can_be_skipped_and_are_counted(log):
    bad = ["2,7,3", ",7,3,4", "2, ,3,4", "2,7,good,4", "2,7,3,yesterday", "2,7,nan,4", "1,2,3,4,5,6,7"]
    dataset = prepare(log(GOOD + "\n".join(bad) + "\n"), min_ratings=1, on_bad_rows="skip")
    assert dataset.fingerprint == prepare(log(GOOD), min_ratings=1).fingerprint
    dataset = prepare(log(GOOD + "\n".join(bad) + "\n"), min_ratings=1, on_bad_rows="skip")
    assert dataset.summary["bad_rows"] == len(bad)
    assert dataset.summary["rows_read"] == 15 + len(bad)
    refused(log(HEADER + "\n".join(["1,2,3,4", "1,2,3,5", "1,2,3"])), "1 item is left", on_bad_rows="skip")
    refused(log(HEADER + "1,2,3,x\n"), r"no row that can be read \(1 bad ones skipped\)", on_bad_rows="skip")


def test_a_bad_row_after_a_million_bytes_and_a_cell_of_two_lines(log):
    """A cell of two lines may make the number of a later line one too small."""
    rows = "".join(f'{user},{item},3,4,"a note"\n' for user in range(400) for item in range(200))
    content = HEADER.strip() + ',note\n1,999,3,4,"two\nlines"\n\n' + rows
    last = content.count("\n") + 1
    line = f"({last - 1}|{last})"
    refused(log(content + "1,2,3\n"), rf"line {line}: 3 cells where 5 are expected")
    refused(log(content + "1,2,x,4,n\n"), rf"line {line}: the rating")
    refused(log(content + " ,2,3,4,n\n"), rf"line {line}: the user's id")


def test_bad_rows_of_other_forms(tmp_path):
    path = tmp_path / "log.dat"
    path.write_text("1::2::3::4\n1::3::3::5\n1::::3::5\n")
    refused(path, r"line 3: the item's id \(column 2\) is blank: '1::::3::5'")
    path.write_text("1::2::3::2020-01-01\n1::3::3::2020-01-02\n1::3::3::soon\n")
    refused(path, r"line 3: the time \(column 4\) is not a number or an ISO date: '1::3::3::soon'")
    path = tmp_path / "log.parquet"
    duckdb.execute(f"COPY (SELECT * FROM (VALUES (1, 2, 'x'), (1, 3, '5')) AS t(user_id, item_id, rating)) TO '{path}'")
    refused(path, r"log\.parquet, row 1: the rating \(column 'rating'\) is not a number", min_value=1)
    two = tmp_path / "part-1.csv", tmp_path / "part-2.csv"
    two[0].write_text(GOOD)
    two[1].write_text(GOOD + "1,2,3\n")
    refused(str(tmp_path / "part-*.csv"), r"part-2\.csv, line 17: 3 cells")
    two[1].write_text(GOOD + " ,2,3,4\n")
    refused(str(tmp_path / "part-*.csv"), r"part-2\.csv, line 17: the user's id")


def test_what_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("nowhere.csv", "no such file or data set: 'nowhere.csv'; give a file, .*ml-1m.*synthetic")
    refused("nowhere-*.csv", r"no file matches 'nowhere-\*\.csv'")
    refused(7, "a log is a path, a name or a pandas, polars or Arrow table: got int")
    refused(None, "got NoneType")
    assert list(tmp_path.iterdir()) == []


def test_columns_that_are_not_there(log):
    path = log(GOOD)
    listed = "found 'userId', 'movieId', 'rating', 'timestamp'"
    refused(path, rf"no column 'client' \(--user-column\): {listed}", user_column="client")
    refused(path, rf"no column '9' \(--time-column\): {listed}", time_column="9")
    refused(path, "already another column's role", user_column="rating", item_column="3")
    refused(path, "a log without a header has no column 'userId'", user_column="userId", header=False)
    bare = log(GOOD.removeprefix(HEADER))
    refused(bare, r"no column 'client' \(--user-column\): found 4 columns without names", user_column="client")
    refused(log("userId,movieId\n1,2\n1,3\n"), "--min-value 3 needs a rating", min_value=3.0)
    refused(log(GOOD), "one column with the delimiter ';'", delimiter=";", header=True)


def test_too_little_is_left(log):
    refused(log(GOOD), r"0 of 3 users have 20 interactions \(the most is 5\): lower --min-ratings", min_ratings=20)
    refused(log(HEADER + "1,2,3,4\n2,2,3,4\n"), "1 item is left of 1: .*2 or more")


def test_a_header_where_none_is_expected(log):
    fault = r"line 1: the (time|rating) \(column [34]\) is not a number.*: 'userId,movieId,rating,timestamp'"
    refused(log(GOOD), fault, header=False)


def test_a_header_can_be_denied_and_affirmed(log):
    rows = "".join(f"{user},{item}\n" for user in ("alice", "bob") for item in ("memento", "alien", "ran"))
    assert prepare(log(rows), header=False, min_ratings=1).n_items == 3
    assert prepare(log("who,what\n" + rows), header=True, user_column="1", item_column="2", min_ratings=1).n_items == 3
    assert prepare(log("who,what\n" + rows), user_column="who", item_column="what", min_ratings=1).n_items == 3
    assert prepare(log("who,what\n" + rows), user_column="who", min_ratings=1).n_items == 3


def test_spelled_delimiters(log):
    path = log("user item\n1 2\n1 3\n")
    assert prepare(path, delimiter="space", min_ratings=1).n_items == 2
    path = log("user\titem\n1\t2\n1\t3\n")
    assert prepare(path, delimiter="\\t", min_ratings=1).n_items == 2
    assert re.search("a tab", refused(path, "one column", delimiter="|", header=True).replace("'|'", "a tab"))


def test_nothing_is_left_behind(tmp_path):
    (tmp_path / "log.csv").write_text(GOOD + "1,2\n")
    refused(tmp_path / "log.csv", "2 cells", output=tmp_path / "deep" / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.csv"]
