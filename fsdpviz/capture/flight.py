"""The flight recorder: the last collectives of this rank and their state, from NCCL and from gloo."""

from __future__ import annotations

import json
from typing import Any

import torch._C._distributed_c10d as c10d

from ..experiment.run_folder import RankFolder, write_json


def dump_flight_recorder(folder: RankFolder) -> None:
    """Writes ``flight.json``. Not collective, and safe from another thread while a collective hangs.

    NCCL and gloo have recorders of their own; both are kept when both saw something.
    """
    content: dict[str, Any] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)  # a build without NCCL has only the first
        if dump is not None:
            recorded = json.loads(dump())
            if recorded.get("entries") or not content:
                content = recorded
    if content:
        write_json(folder.flight, content)
