"""Parts on disk: what a reader made of a file, as Parquet and JSON, so that it need not be made again.

Nothing in it executes when it is read, and it is checked, each file against its sum: a folder that was cut short,
damaged or made by another version of the tables raises ``StoredError``.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
from isal.isal_zlib import crc32

from ..files.parts import Part, Role
from ..meaning.spans import RankTables
from ..table import GROUP_SCHEMA, LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Note

_SCHEMAS = {"spans": SPAN_SCHEMA, "lanes": LANE_SCHEMA, "steps": STEP_SCHEMA, "groups": GROUP_SCHEMA}
_LIST = "parts.json"  # written last
_SUMMED_BYTES = 128 << 10  # at once: small enough for a core's own cache


class StoredError(Exception):
    """What is stored cannot be read back."""


def can_be_stored(parts: Sequence[Part]) -> bool:
    """True where JSON gives back what the parts say beside their tables."""
    try:
        return all(json.loads(json.dumps(dict(part.about))) == part.about for part in parts)
    except (TypeError, ValueError, RecursionError):
        return False


def write_parts(folder: Path, parts: Sequence[Part]) -> None:
    """Fills an empty folder. Raises OSError where it cannot be written, as on a full disk."""
    listed: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        frames = {name: getattr(part.tables, name) for name in _SCHEMAS}
        for name, frame in frames.items():
            # uncompressed: 21 bytes a span, and read twice as fast
            try:
                frame.write_parquet(
                    _table(folder, number, name),
                    compression="uncompressed",
                    statistics=False,
                    row_group_size=100_000,
                )
            except pl.exceptions.PolarsError as error:  # which a system's error becomes
                raise OSError(str(error)) from error
        listed.append(
            {
                "rank": part.rank,
                "gpu": part.rank_by_gpu,
                "about": dict(part.about),
                "role": part.role.value,
                "rows": {name: len(frame) for name, frame in frames.items()},
                "sums": {name: _sum(_table(folder, number, name)) for name in frames},
                "notes": [[note.what, note.count, note.example] for note in part.tables.notes],
            }
        )
    (folder / _LIST).write_text(json.dumps({"parts": listed, "sum": _sum_of(listed)}), encoding="utf-8")


def read_parts(folder: Path, name: str) -> list[Part]:
    """The parts, called ``name``. Raises StoredError for whatever is not as it was written."""
    try:
        _sum(folder / _LIST)  # that it is a file, and no pipe that would never end
        content = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        listed = content["parts"]
        if content["sum"] != _sum_of(listed):
            raise StoredError(f"{folder}: the list of its parts is not as it was written")
        return [_part(folder, number, stated, name) for number, stated in enumerate(listed)]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        pl.exceptions.PolarsError,
        pl.exceptions.PanicException,
    ) as error:
        raise StoredError(f"{folder}: {error}") from error


def _part(folder: Path, number: int, stated: dict[str, Any], name: str) -> Part:
    frames: dict[str, Any] = {}
    for table, schema in _SCHEMAS.items():
        file, most = _table(folder, number, table), stated["rows"][table] + 1
        if _sum(file) != stated["sums"][table]:
            raise StoredError(f"{folder}: {table} are not as they were written")
        frame = pl.read_parquet(file, n_rows=most, parallel="columns")
        if dict(frame.schema) != schema or len(frame) != stated["rows"][table]:
            raise StoredError(f"{folder}: {table} are not as they were written")
        frames[table] = frame
    notes = tuple(Note(str(what), int(count), str(example)) for what, count, example in stated["notes"])
    tables = RankTables(notes=notes, **frames)
    return Part(
        name, tables, stated["rank"], rank_by_gpu=stated["gpu"], about=stated["about"], role=Role(stated["role"])
    )


def _table(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number}.{name}.parquet"


def _sum(file: Path) -> int:
    """Of the bytes of a file, made faster than they are read. Raises StoredError for what is no file."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise StoredError(f"{file} is no regular file")
    found, buffer = 0, memoryview(bytearray(_SUMMED_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            found = crc32(buffer[:count], found)
    return found


def _sum_of(listed: list[dict[str, Any]]) -> int:
    return crc32(json.dumps(listed).encode())
