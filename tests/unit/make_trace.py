"""Writes tiny Kineto files for tests. Times are given in whole µs and become the file's own text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[2] / "../shared/traces"
KINETO = SHARED / "kineto"

HOST, MAIN, WORKER = 100, 100, 101  # process, main thread, another thread
GPU = 0


def span(
    category: str,
    name: str,
    start: float,
    duration: float,
    *,
    thread: Any = MAIN,
    process: Any = HOST,
    **args: Any,
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def op(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return span("cpu_op", name, start, duration, **more)


def mark(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return span("user_annotation", name, start, duration, **more)


def launched(
    category: str,
    name: str,
    launch: float,
    start: float,
    duration: float,
    *,
    correlation: int,
    stream: int = 7,
    **more: Any,
) -> list[dict[str, Any]]:
    """A device span and the call, 1 µs long, that launched it from the main thread or ``launch_thread``."""
    thread = more.pop("launch_thread", MAIN)
    return [
        span("cuda_runtime", "cudaLaunchKernel", launch, 1, thread=thread, correlation=correlation),
        span(category, name, start, duration, process=GPU, thread=stream, correlation=correlation, **more),
    ]


def document(events: Iterable[Any], *, rank: int | None = None, **header: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"schemaVersion": 1}
    if rank is not None:
        content["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": 2}
    return content | {"traceEvents": list(events)} | header


def write(path: Path, content: Any) -> Path:
    """``content`` is bytes, text, or what JSON can hold; a name that ends in .gz is gzipped."""
    if not isinstance(content, bytes | str):
        content = json.dumps(content)
    data = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_trace(path: Path, events: Iterable[Any], **header: Any) -> Path:
    return write(path, document(events, **header))
