"""An Nsight Systems SQLite export, read without trusting it.

The file is opened read-only and as it lies (``immutable``: no journal beside it is looked for). Only stored tables
are read, column by column: a view or a virtual table of a known name is refused, since either may compute for ever.
No SQL function may run, no value may exceed 16 MiB, and whatever type a cell has, a column comes out in its own;
bytes that are no UTF-8 are replaced.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import polars as pl

from ...base.errors import TraceError

_BATCH = 100_000
_LONGEST_VALUE = 16 << 20
_DAMAGED = (sqlite3.Error, OverflowError, UnicodeDecodeError)  # the last from sqlite3's own messages
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
_KNOWN = ("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME")
_KNOWN += ("NVTX_EVENTS", "TARGET_INFO_SESSION_START_TIME", "META_DATA_EXPORT")


class NsysDatabase:
    """Use as a context manager. Raises TraceError, one line, for a file that is no export, or is damaged."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        try:
            self._connection = sqlite3.connect(
                f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
            self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            self._connection.execute("PRAGMA trusted_schema = OFF")
            self._connection.execute("PRAGMA cell_size_check = ON")
            self._columns = self._stored_columns()
        except _DAMAGED as error:
            raise TraceError(f"{name} is a damaged SQLite file: {_short(error)}") from error
        self._connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
        )
        if "StringIds" not in self._columns or len(self._columns.keys() & set(_KNOWN)) < 2:
            self._connection.close()
            raise TraceError(
                f"{name} is an SQLite file but no export of Nsight Systems (it has no StringIds beside CUPTI or NVTX "
                "tables); export with: nsys export --type sqlite FILE.nsys-rep"
            )

    def __enter__(self) -> NsysDatabase:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()

    def _stored_columns(self) -> dict[str, set[str]]:
        """The columns of each table that is stored as rows."""
        found: dict[str, set[str]] = {}
        master = self._connection.execute("SELECT name, type, sql FROM sqlite_master").fetchall()
        for name, type_, sql in master:
            is_stored = type_ == "table" and isinstance(sql, str) and not sql.lstrip().upper().startswith("CREATE VIRT")
            if is_stored and isinstance(name, str) and '"' not in name:
                found[name] = {str(row[1]) for row in self._connection.execute(f'PRAGMA table_info("{name}")')}
        return found

    def has(self, table: str) -> bool:
        return table in self._columns

    def read(self, table: str, columns: Mapping[str, pl.DataType | type[pl.DataType]]) -> pl.DataFrame:
        """The named columns, of the types asked for; null where the table, the column or the value's type is lacking.

        Rows are in the table's order. Raises TraceError for a damaged file.
        """
        here = [column for column in columns if column in self._columns.get(table, ())]
        if not here:
            return pl.DataFrame(schema=dict(columns))
        quoted = ", ".join(f'"{column}"' for column in here)
        pieces = [pl.DataFrame(schema=dict(columns))]
        try:
            with closing(self._connection.execute(f'SELECT {quoted} FROM "{table}"')) as cursor:
                while rows := cursor.fetchmany(_BATCH):
                    pieces.append(_frame(here, columns, rows))
        except _DAMAGED as error:
            raise TraceError(f"{self.name} is a damaged SQLite file: {table}: {_short(error)}") from error
        return pl.concat(pieces)


def _frame(here: list[str], columns: Mapping[str, pl.DataType | type[pl.DataType]], rows: list[tuple]) -> pl.DataFrame:
    values = dict(zip(here, zip(*rows, strict=True), strict=True))
    return pl.DataFrame(
        [
            pl.Series(name, _plain(values[name], dtype) if name in values else [None] * len(rows), dtype=dtype)
            for name, dtype in columns.items()
        ]
    )


def _plain(values: tuple, dtype: pl.DataType | type[pl.DataType]) -> list:
    """SQLite lets any cell have any type: what is of another than the column's is null."""
    wanted = int if dtype == pl.Int64 else str
    if set(map(type, values)) <= {wanted, type(None)}:
        return list(values)
    return [value if type(value) is wanted else None for value in values]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]
