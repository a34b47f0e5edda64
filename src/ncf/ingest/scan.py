"""A log as a relation that DuckDB can scan: its columns, what they are for, and the SQL that reads them.

Every form comes to the same columns: `user` and `item` (VARCHAR, or BIGINT where the form has integers), and where the
log has them `value` (DOUBLE) and `time` (DOUBLE; BIGINT microseconds for dates), NULL where a cell cannot be read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb

from ncf.config import PrepareConfig
from ncf.data.duckdb_session import file_list, identifier, literal, reading
from ncf.errors import InputError
from ncf.ingest.columns import Roles, pick_roles
from ncf.ingest.locate import Files
from ncf.ingest.text import SAMPLE_LINES, Dialect, read_bytes, read_lines, sniff
from ncf.ingest.times import EXACT, as_microseconds, kind_of

TABLE = "table_in_memory"
INTEGERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER"}
DIGITS = {"digits32": "INTEGER", "digits64": "BIGINT"}  # what text ids are read as where they are spelled like it
FLOATS = {"FLOAT", "DOUBLE"}
REJECTS = 10_000  # malformed rows kept for the message where the first one ends the preparation


@dataclass(frozen=True)
class Scan:
    """A log that is ready to be read."""

    form: str  # "text", "json", "parquet" or "table"
    files: Files
    names: tuple[str, ...] | None  # of its columns; None for a text file without a header
    roles: Roles
    kinds: dict[
        str, str
    ]  # role -> how its cells are read: a DuckDB type or, of text, a key of DIGITS, "text", "iso", "whole" or "number"
    dialect: Dialect | None = None

    def name(self, role: str) -> str | None:
        """The column taken for `role`, as a person would call it."""
        index: int | None = getattr(self.roles, role)
        if index is None:
            return None
        return self.names[index] if self.names else f"column {index + 1}"

    def relation(self, files: tuple[Path, ...], *, encoding: str = "utf-8", limit_rejects: bool = True) -> str:
        """SQL that reads `files` into the columns above."""
        if self.form == "text":
            source = self._text(files, encoding, limit_rejects=limit_rejects)
        elif self.form == "json":
            used = {self.column(role): "VARCHAR" for role in self.kinds}
            fields = ", ".join(f"{column}: '{kind}'" for column, kind in used.items())
            options = "format='newline_delimited', ignore_errors=true, maximum_object_size=67108864"
            source = f"read_json({file_list(files)}, {options}, columns={{{fields}}})"
        elif self.form == "parquet":
            source = f"read_parquet({file_list(files)})"
        else:
            source = TABLE
        selected = ", ".join(f"{self._cell(role)} AS {identifier(role)}" for role in self.kinds)
        return f"(SELECT {selected} FROM {source})"

    def column(self, role: str) -> str:
        """The role's column as an SQL identifier."""
        index: int = getattr(self.roles, role)
        return identifier(f"c{index}" if self.form == "text" or not self.names else self.names[index])

    def _text(self, files: tuple[Path, ...], encoding: str, *, limit_rejects: bool) -> str:
        assert self.dialect is not None  # noqa: S101 -- for the type checker
        typed = {getattr(self.roles, role): kind for role, kind in self.kinds.items()}
        kinds = (self._csv_type(typed.get(index)) for index in range(self.dialect.width))
        columns = ", ".join(f"c{index}: '{kind}'" for index, kind in enumerate(kinds))
        return (
            f"read_csv({file_list(files)}, auto_detect=false, columns={{{columns}}}, header=false,"
            f" delim={literal(self.dialect.delimiter)}, quote='\"', escape='\"', skip={self.dialect.skipped},"
            f" compression='{'gzip' if self.dialect.compressed else 'none'}', encoding='{encoding}',"
            f" store_rejects=true, rejects_limit={REJECTS if limit_rejects else 0})"
        )

    @staticmethod
    def _csv_type(kind: str | None) -> str:
        return {"number": "DOUBLE", "whole": "BIGINT"}.get(kind or "", "VARCHAR")

    def _cell(self, role: str) -> str:
        column, kind = self.column(role), self.kinds[role]
        if role in ("user", "item"):
            return _id_cell(column, kind)
        if kind in INTEGERS or (self.form == "text" and kind in ("number", "whole")):
            return column
        return as_microseconds(column, kind) or f"TRY_CAST({column} AS {'BIGINT' if kind == 'whole' else 'DOUBLE'})"


def _id_cell(column: str, kind: str) -> str:
    if kind in INTEGERS:
        return f"{column}::BIGINT"
    if kind in FLOATS:  # what pandas makes of integers beside an empty cell
        whole = f"isfinite({column}) AND {column} = floor({column}) AND abs({column}) < {EXACT}"
        return f"CASE WHEN {whole} THEN {column}::BIGINT::VARCHAR WHEN NOT isnan({column}) THEN {column}::VARCHAR END"
    return column if kind in ("text", *DIGITS) else f"{column}::VARCHAR"


def open_scan(con: duckdb.DuckDBPyConnection, files: Files | None, table: Any, config: PrepareConfig) -> Scan:
    """Find the form and the columns of `files`, or of a `table` in memory. Raises InputError where it cannot."""
    if files is None:
        return _table(con, table, config)
    with files.logs[0].open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    if parquet:
        return _typed(con, "parquet", files, f"read_parquet({file_list(files.logs)})", config)
    start = read_bytes(files.logs[0], 1 << 10).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"[") and start[1:].lstrip().startswith(b"{"):
        raise InputError(f"{files.label(files.logs[0])} is one JSON array: write it as JSON lines, an object a line")
    return _json(files, config) if start.startswith(b"{") else _text(files, config)


def _text(files: Files, config: PrepareConfig) -> Scan:
    dialects = [sniff(file, config) for file in files.logs]
    first = dialects[0]
    for file, other in zip(files.logs, dialects, strict=True):
        same = ("delimiter", "names", "skipped", "width", "compressed")
        if unlike := [what for what in same if getattr(other, what) != getattr(first, what)]:
            raise InputError(
                f"{files.label(file)} is not written as {files.label(files.logs[0])} is (its {unlike[0]} differs):"
                " prepare files of one form together"
            )
    roles = pick_roles(first.names, first.sample, config, files.label(files.logs[0]))
    rows = [row for row in first.sample if len(row) == first.width]
    return Scan("text", files, first.names, roles, _text_kinds(roles, rows), first)


def _text_kinds(roles: Roles, rows: Sequence[Sequence[str]]) -> dict[str, str]:
    kinds = {role: _id_kind([row[getattr(roles, role)] for row in rows]) for role in ("user", "item")}
    if roles.value is not None:
        kinds["value"] = "number"
    if roles.time is not None:
        kinds["time"] = kind_of([row[roles.time] for row in rows])
    return kinds


def _id_kind(cells: Sequence[str]) -> str:
    """The integer type that the cells are the plain spelling of, which is quicker to read than `text`."""
    if not all(cell.isdecimal() and len(cell) < 20 and str(int(cell)) == cell for cell in cells):
        return "text"
    high = max(map(int, cells), default=0)
    return "digits32" if high < 2**31 else "digits64" if high < 2**63 else "text"


def _json(files: Files, config: PrepareConfig) -> Scan:
    names: dict[str, None] = {}
    objects = []
    where = files.label(files.logs[0])
    for number, line in islice(read_lines(files.logs[0]), SAMPLE_LINES):
        try:
            parsed = json.loads(line.removeprefix("\ufeff"))
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            objects.append(parsed)
            names.update(dict.fromkeys(parsed))
        elif number == 1:
            raise InputError(f"{where}: line 1 is not a JSON object: {line[:80]!r}; give JSON lines, or CSV")
    listed = tuple(names)
    roles = pick_roles(listed, (), config, where)
    rows = [["" if row.get(name) is None else str(row[name]) for name in listed] for row in objects]
    return Scan("json", files, listed, roles, _text_kinds(roles, rows))


def _table(con: duckdb.DuckDBPyConnection, table: Any, config: PrepareConfig) -> Scan:
    try:
        con.register(TABLE, table.collect() if hasattr(table, "collect") else table)
    except (duckdb.Error, TypeError, ValueError, ImportError) as error:
        kind = type(table).__name__
        raise InputError(f"a log is a path, a name or a pandas, polars or Arrow table: got {kind}") from error
    return _typed(con, "table", Files(()), TABLE, config)


def _typed(con: duckdb.DuckDBPyConnection, form: str, files: Files, relation: str, config: PrepareConfig) -> Scan:
    where = files.label(files.logs[0]) if files.logs else "the table"
    with reading(where):
        described = con.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
        names = tuple(row[0] for row in described)
        roles = pick_roles(names, (), config, where)
        kinds = {role: str(described[index][1]) for role, index in vars(roles).items() if index is not None}
        if "time" in kinds and kinds["time"] == "VARCHAR":
            time = identifier(names[roles.time or 0])
            cells = con.execute(f"SELECT {time} FROM {relation} LIMIT {SAMPLE_LINES}").fetchall()
            kinds["time"] = kind_of([str(cell) for (cell,) in cells])
    return Scan(form, files, names, roles, kinds)
