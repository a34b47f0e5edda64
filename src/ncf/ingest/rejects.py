"""Rows that cannot be read: how many there are, and where the first one is."""

from itertools import islice
from pathlib import Path
from typing import NoReturn

import duckdb

from ncf.errors import InputError
from ncf.ingest.columns import ROLES
from ncf.ingest.scan import Scan
from ncf.ingest.text import describe, read_lines, split_line

FIX = "correct it, or skip such rows with --on-bad-rows skip"
CONTENT = 100  # characters of a bad row that a message shows
FAULTS = {
    "UNQUOTED VALUE": "a quote mark that is never closed, or closed before its cell ends",
    "LINE SIZE OVER MAXIMUM": "the line is over 2 MB long",
    "INVALID ENCODING": "it is not UTF-8",
}


def forget_rejects(con: duckdb.DuckDBPyConnection) -> None:
    """Drop what earlier scans rejected."""
    con.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")


def _has_rejects(con: duckdb.DuckDBPyConnection) -> bool:
    return bool(con.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'reject_errors'").fetchall())


def count_rejects(con: duckdb.DuckDBPyConnection) -> int:
    """How many lines the last scan could not split into cells and numbers."""
    if not _has_rejects(con):
        return 0
    query = "SELECT count(*) FROM (SELECT DISTINCT scan_id, file_id, line_byte_position FROM reject_errors)"
    (count,) = con.execute(query).fetchall()[0]
    return int(count)


def has_bad_encoding(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether the last scan met bytes that its encoding does not have."""
    query = "SELECT 1 FROM reject_errors WHERE error_type = 'INVALID ENCODING' LIMIT 1"
    return _has_rejects(con) and bool(con.execute(query).fetchall())


def explain_reject(con: duckdb.DuckDBPyConnection, scan: Scan) -> NoReturn:
    """Raise InputError for the first line that the last scan rejected: its file, number, fault and content."""
    query = """
        SELECT file_path, line, column_idx, error_type, csv_line
        FROM reject_errors JOIN reject_scans USING (scan_id, file_id)
        ORDER BY file_path, line_byte_position, column_idx LIMIT 1"""
    path, line, column, kind, content = con.execute(query).fetchall()[0]
    dialect = scan.dialect
    assert dialect is not None  # noqa: S101 -- only text has rejects
    if kind in ("MISSING COLUMNS", "TOO MANY COLUMNS"):
        found = len(split_line(content.strip("\r\n"), dialect.delimiter))
        fault = f"{found} cells where {dialect.width} are expected (delimiter {describe(dialect.delimiter)})"
    elif kind == "CAST":
        fault = _fault(scan, next((role for role in ROLES if getattr(scan.roles, role) == column - 1), "value"))
    else:
        fault = FAULTS.get(kind, kind.lower())
    _refuse(scan.files.label(Path(path)), f"line {line}", fault, content.strip("\r\n"))


def explain_bad_row(con: duckdb.DuckDBPyConnection, scan: Scan, encoding: str, is_bad: str) -> NoReturn:
    """Raise InputError for the first row that has every cell, one of which is blank or makes no sense."""
    for file in scan.files.logs or (None,):
        relation = scan.relation((file,) if file else (), encoding=encoding)
        numbered = f"SELECT row_number() OVER () AS n, * FROM {relation}"
        bad = con.execute(f"SELECT * FROM ({numbered}) WHERE {is_bad} ORDER BY n LIMIT 1").fetchall()
        if not bad:
            continue
        row, *cells = bad[0]
        blank = [role for role, cell in zip(scan.kinds, cells, strict=True) if cell is None or not str(cell).strip()]
        fault = _fault(scan, (*blank, "value" if scan.roles.value is not None else "time")[0])
        if file is None or scan.form == "parquet":
            _refuse(scan.files.label(file) if file else "the table", f"row {row}", fault, str(tuple(cells)))
        header = scan.dialect is not None and scan.dialect.names is not None
        line, content = next(islice(read_lines(file), row - 1 + header, None), (0, ""))
        _refuse(scan.files.label(file), f"line {line}", fault, content)
    raise InputError(f"a row cannot be read; {FIX}")


def _fault(scan: Scan, role: str) -> str:
    column = f"(column {scan.name(role)!r})" if scan.names else f"({scan.name(role)})"
    if role in ("user", "item"):
        return f"the {role}'s id {column} is blank"
    allowed = "a number or an ISO date" if role == "time" else "a number"
    return f"the {'time' if role == 'time' else 'rating'} {column} is not {allowed}"


def _refuse(label: str, place: str, fault: str, content: str) -> NoReturn:
    raise InputError(f"{label}, {place}: {fault}: {content[:CONTENT]!r}; {FIX}")
