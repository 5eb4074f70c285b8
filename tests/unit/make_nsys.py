"""Writes tiny Nsight Systems exports: the tables and columns that a real one has, times in ns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VM = 1 << 48  # the upper bits of a global id name the machine


def global_pid(process: int) -> int:
    return VM + (process << 24)


def global_tid(process: int, thread: int) -> int:
    return global_pid(process) + thread


def work(start: int, end: int, *, process: int, gpu: int, stream: int = 7, correlation: int = 0, **more: Any) -> dict:
    return {
        "start": start,
        "end": end,
        "deviceId": gpu,
        "contextId": process,
        "streamId": stream,
        "correlationId": correlation,
        "globalPid": global_pid(process),
        **more,
    }


def call(start: int, end: int, *, process: int, thread: int | None = None, correlation: int, name: int) -> dict:
    return {
        "start": start,
        "end": end,
        "globalTid": global_tid(process, process if thread is None else thread),
        "correlationId": correlation,
        "nameId": name,
    }


def push_pop(start: int, end: int | None, text: str, *, process: int, thread: int | None = None, **more: Any) -> dict:
    tid = global_tid(process, process if thread is None else thread)
    return {"start": start, "end": end, "eventType": 59, "text": text, "globalTid": tid, **more}


def write_export(path: Path, tables: Mapping[str, Iterable[Mapping[str, Any]]], strings: Mapping[int, str]) -> Path:
    """Tables are made of their first row's keys; StringIds of ``strings``."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    rows = [{"id": key, "value": value} for key, value in strings.items()]
    for table, content in {"StringIds": rows, **tables}.items():
        content = list(content)
        columns = list(dict.fromkeys(key for row in content for key in row))
        connection.execute(f'CREATE TABLE "{table}" ({", ".join(columns) or "start"})')
        marks = ", ".join("?" * len(columns))
        connection.executemany(
            f'INSERT INTO "{table}" VALUES ({marks})', [[row.get(column) for column in columns] for row in content]
        )
    connection.commit()
    connection.close()
    return path
