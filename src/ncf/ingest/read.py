"""Read a log into arrays: each row's user and item as dense codes, its value and its time, in the rows' order.

Integer ids go straight into arrays of 8 bytes a row and are coded there; text ids are coded by DuckDB, which spills
what it cannot hold. At its height this takes some 60 bytes a row.
"""

from dataclasses import dataclass, replace

import duckdb
import numpy as np

from ncf.config import PrepareConfig
from ncf.data.duckdb_session import progress_bar, reading
from ncf.errors import InputError
from ncf.ingest.rejects import count_rejects, explain_bad_row, explain_reject, forget_rejects, has_bad_encoding
from ncf.ingest.scan import DIGITS, INTEGERS, Scan

SPAN = 8  # ids are coded through a table where their range is at most so many times their number
BLANKS = "E' \\t\\r\\n'"


@dataclass(frozen=True)
class Ids:
    """A column of raw ids: the distinct ones in ascending order, and the place of each row's among them."""

    values: np.ndarray  # int64, or str objects
    codes: np.ndarray  # [rows] int32


@dataclass(frozen=True)
class Log:
    """The readable rows of a log, in their order."""

    users: Ids
    items: Ids
    values: np.ndarray | None  # [rows] float64: ratings or weights, where they were asked for
    times: np.ndarray | None  # [rows] float64, or int64
    bad_rows: int = 0  # that were skipped


def read_log(con: duckdb.DuckDBPyConnection, scan: Scan, config: PrepareConfig, *, progress: bool = False) -> Log:
    """Read every row; values if `min_value` needs them. Raises InputError at a bad row, unless those are skipped."""
    label = scan.files.label(scan.files.logs[0]) if scan.files.logs else "the table"
    encoding = scan.dialect.encoding if scan.dialect else "utf-8"
    with reading(label), progress_bar(con, f"reading {label}", shown=progress):
        log = _read(con, scan, config, encoding)
        if log is None:  # Latin-1 further down than the sample
            assert scan.dialect is not None  # noqa: S101 -- only text has an encoding
            scan = replace(scan, dialect=replace(scan.dialect, encoding="latin-1"))
            log = _read(con, scan, config, "latin-1")
    if log is None or not log.users.codes.size:
        skipped = f" ({log.bad_rows} bad ones skipped)" if log and log.bad_rows else ""
        raise InputError(f"{label} has no row that can be read{skipped}")
    return log


def _read(con: duckdb.DuckDBPyConnection, scan: Scan, config: PrepareConfig, encoding: str) -> Log | None:
    """The log, or None where it is not in this encoding."""
    strict = config.on_bad_rows == "error"
    relation = scan.relation(scan.files.logs, encoding=encoding, limit_rejects=strict)
    extras = ["time"] * (scan.roles.time is not None) + ["value"] * (config.min_value is not None)
    integers = all(scan.kinds[role] in (*INTEGERS, *DIGITS) for role in ("user", "item"))
    log = None
    for attempt in (_read_integers, _read_text) if integers else (_read_text,):
        forget_rejects(con)
        log = attempt(con, relation, scan, extras)
        if encoding == "utf-8" and has_bad_encoding(con):
            return None
        rejected = count_rejects(con)
        if rejected and strict:
            explain_reject(con, scan)
        if log is not None:
            log = replace(log, bad_rows=log.bad_rows + rejected)
            break
    if log is not None and log.bad_rows and strict:
        explain_bad_row(con, scan, encoding, " OR ".join((_nonsense(scan, extras), *map(_blank, ("user", "item")))))
    return log


def _nonsense(scan: Scan, extras: list[str]) -> str:
    """SQL: whether a row's time or value cannot be read, or is blank (which a value may be where it is not used)."""
    wrong = [f"COALESCE(NOT isfinite({role}::DOUBLE), false)" for role in ("value", "time") if role in scan.kinds]
    return " OR ".join(wrong + [f"{role} IS NULL" for role in extras]) or "false"


def _blank(role: str) -> str:
    return f"{role} IS NULL OR trim({role}::VARCHAR, {BLANKS}) = ''"


def _read_integers(con: duckdb.DuckDBPyConnection, relation: str, scan: Scan, extras: list[str]) -> Log | None:
    """The log, in one pass; None where an id is blank or not the plain spelling of an int64."""
    ids = ", ".join(f"{_integer(role, scan.kinds[role])} AS {role}" for role in ("user", "item"))
    rest = "".join(f", COALESCE({role}, 0) AS {role}" for role in extras)
    query = f"SELECT {ids}, {_nonsense(scan, extras)} AS bad{rest} FROM {relation}"
    columns = con.execute(query).fetchnumpy()
    if any(isinstance(columns[role], np.ma.MaskedArray) for role in ("user", "item")):
        return None
    bad = columns.pop("bad")
    bad_rows = int(bad.sum())
    if bad_rows:
        columns = {name: column[~bad] for name, column in columns.items()}
    users = number_ids(columns.pop("user"))
    items = number_ids(columns.pop("item"))
    return Log(users, items, columns.get("value"), columns.get("time"), bad_rows)


def _integer(role: str, kind: str) -> str:
    if kind in INTEGERS:
        return role
    number = f"TRY_CAST({role} AS {DIGITS[kind]})"
    return f"CASE WHEN {number}::VARCHAR = {role} THEN {number} END"


def number_ids(raw: np.ndarray) -> Ids:
    """Code integers by their place among the distinct ones."""
    if not raw.size:
        return Ids(raw.astype(np.int64), raw.astype(np.int32))
    low, high = int(raw.min()), int(raw.max())
    if high - low < min(SPAN * raw.size + (1 << 20), 2**31):
        offsets = raw - low
        present = np.zeros(high - low + 1, dtype=bool)
        present[offsets] = True
        places = np.cumsum(present, dtype=np.int32) - 1
        return Ids(np.flatnonzero(present) + low, places[offsets])
    values = np.unique(raw).astype(np.int64)
    return Ids(values, np.searchsorted(values, raw).astype(np.int32))


def _read_text(con: duckdb.DuckDBPyConnection, relation: str, scan: Scan, extras: list[str]) -> Log:
    """The log, with ids as they are spelled; as integers where all of a column are the plain spelling of an int64."""
    ids = ", ".join(f"NULLIF(trim({role}::VARCHAR, {BLANKS}), '') AS {role}" for role in ("user", "item"))
    rest = "".join(f", COALESCE({role}, 0) AS {role}" for role in extras)
    bad = " OR ".join((_nonsense(scan, extras), *map(_blank, ("user", "item"))))
    query = f"SELECT {ids}, {bad} AS bad{rest} FROM {relation}"
    con.execute(f"CREATE OR REPLACE TEMP TABLE log AS {query}")
    (bad_rows,) = con.execute("SELECT count(*) FROM log WHERE bad").fetchall()[0]
    users, items = (_distinct(con, role) for role in ("user", "item"))
    columns = con.execute(f"""
        SELECT user_ids.code AS user, item_ids.code AS item{"".join(f", {role}" for role in extras)}, log.rowid AS row
        FROM log JOIN user_ids ON log.user = user_ids.id JOIN item_ids ON log.item = item_ids.id WHERE NOT bad
    """).fetchnumpy()
    order = np.argsort(columns.pop("row"))  # a join keeps no order
    columns = {name: column[order] for name, column in columns.items()}
    con.execute("DROP TABLE log; DROP TABLE user_ids; DROP TABLE item_ids")
    return Log(
        Ids(users, columns["user"]), Ids(items, columns["item"]), columns.get("value"), columns.get("time"), bad_rows
    )


def _distinct(con: duckdb.DuckDBPyConnection, role: str) -> np.ndarray:
    """The distinct ids of a column in order, which the table `<role>_ids` then holds with their codes."""
    distinct = f"SELECT DISTINCT {role} AS id FROM log WHERE NOT bad"
    plain = "bool_and(COALESCE(TRY_CAST(id AS BIGINT)::VARCHAR = id, false))"
    (integers,) = con.execute(f"SELECT {plain} FROM ({distinct})").fetchall()[0]
    key = "id::BIGINT" if integers else "id"
    con.execute(f"""
        CREATE OR REPLACE TEMP TABLE {role}_ids AS
        SELECT id, {key} AS key, (row_number() OVER (ORDER BY {key}) - 1)::INTEGER AS code FROM ({distinct})
    """)
    return con.execute(f"SELECT key FROM {role}_ids ORDER BY code").fetchnumpy()["key"]
