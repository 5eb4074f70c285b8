"""A process that reads files for another: ``parallel`` starts it, and tells it what by lines of JSON.

It ends when its standard input does, so that it never outlives whom it works for by more than one file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from ...base.errors import TraceError
from ..files.sniff import Format
from ..files.sources import Source
from .collector import without_collector
from .readers import read_source
from .stored import can_be_stored, write_parts


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Answers each job (``parallel.job_of``) by one line: ``{}`` when the parts are there, ``{"error": …}`` for a
    TraceError, and ``{"other": …}`` for anything else, which whoever asked then reads himself.
    """
    for line in jobs:
        answers.write(json.dumps(_done(json.loads(line))) + "\n")
        answers.flush()


def _done(job: dict[str, Any]) -> dict[str, str]:
    source = Source(
        Path(job["path"]),
        job["name"],
        Format(job["format"]),
        is_temporary=job["is_temporary"],
        lane_names=job["lane_names"],
    )
    try:
        with without_collector():
            parts = read_source(source, cache=job["cache"])
        if not can_be_stored(parts):
            return {"other": "its parts cannot be handed over"}
        write_parts(Path(job["out"]), parts)
    except TraceError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001  # a process boundary
        return {"other": repr(error)}
    return {}


def main() -> None:
    serve(sys.stdin, sys.stdout)
