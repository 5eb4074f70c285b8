"""The numbers of docs/definitions.md, against a sweep over the raw JSON that shares no code with the package."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from make_trace import KINETO

from fsdpviz.analysis.breakdown import RankWork
from fsdpviz.analysis.intervals import intersection, join, total
from fsdpviz.base.kinds import COMMUNICATION, COMPUTATION, COPIES
from fsdpviz.trace import open_trace

pytestmark = pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")

FILES = [
    "cross_stream_waits",
    "ddp_2xA100_rank0",
    "dlrm_8xA100_rank3",
    *(f"dlrm_8xV100_rank{rank}" for rank in range(4)),
    "gp100_user_annotations",
    "qwen_H100",
    "resnet50_v100_dataloader",
    "thinned_128gpu_rank0",
    "vllm_tp8_B200_rank0",
]


def sweep(path: Path) -> dict[str, int]:
    """Time covered by each class of device spans, and by two together, found by walking over all edges."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    content = json.loads(text, strict=False, parse_float=str, parse_int=str)
    edges: list[tuple[int, int, str]] = []
    names = ("compute", "comm", "copy", "busy", "both", "computes", "comms", "copies")
    found: dict[str, int] = {name: 0 for name in names}  # noqa: C420  # a checker takes fromkeys' keys for literals
    for event in content if isinstance(content, list) else content["traceEvents"]:
        category = str(event.get("cat")).lower()
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
            continue
        kind = "copy"
        if category == "kernel":
            kind = "comm" if re.search("nccl|all_reduce", event["name"]) else "compute"
        found[{"copy": "copies", "comm": "comms", "compute": "computes"}[kind]] += 1
        start = int(Decimal(event["ts"]) * 1000)
        edges += [(start, 1, kind), (start + int(Decimal(event["dur"]) * 1000), -1, kind)]
    running = Counter[str]()
    before = 0
    for time, change, kind in sorted(edges):
        for name in ("compute", "comm", "copy"):
            found[name] += (time - before) * (running[name] > 0)
        found["busy"] += (time - before) * any(running.values())
        found["both"] += (time - before) * (running["compute"] > 0 and running["comm"] > 0)
        running[kind] += change
        before = time
    return found


@pytest.mark.parametrize("name", FILES)
def test_counts_and_times_equal_an_independent_sweep_to_the_ns(name: str) -> None:
    trace = open_trace(KINETO / f"{name}.json.gz")
    work = RankWork(trace, trace.ranks[0])
    compute, comm, copy = work.of(COMPUTATION), work.of(COMMUNICATION), work.of(COPIES)
    counts = [
        len(trace.spans.filter(pl.col("kind").is_in([kind.value for kind in kinds])))
        for kinds in (COMPUTATION, COMMUNICATION, COPIES)
    ]
    assert sweep(KINETO / f"{name}.json.gz") == {
        "compute": total(compute),
        "comm": total(comm),
        "copy": total(copy),
        "busy": total(join(join(compute, comm), copy)),
        "both": total(intersection(compute, comm)),
        **dict(zip(("computes", "comms", "copies"), counts, strict=True)),
    }


def test_the_page_states_the_numbers_that_come_out() -> None:
    """A sample of its last table, as fsdpviz finds it now."""
    page = (Path(__file__).parents[2] / "docs/definitions.md").read_text()
    trace = open_trace(KINETO / "vllm_tp8_B200_rank0.json.gz")
    work = RankWork(trace, 0)
    for kinds in (COMPUTATION, COMMUNICATION, COPIES):
        assert f"| {total(work.of(kinds)) / 1000:,.3f} |" in page
