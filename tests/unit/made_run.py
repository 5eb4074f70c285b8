"""Run folders made by hand: two ranks, one step, an emulated link.

Without prefetch (µs from the step's start; two blocks, so two gathers, on the link's lane):

    gather 0 [0, 40)  compute 0 [42, 92)  gather 1 [94, 134)  compute 1 [136, 186)   step [0, 200)

so communication 80, all of it exposed, compute 100, idle 20. With prefetch gather 1 is issued before compute 0:

    gather 0 [0, 40)  gather 1 [42, 82)  compute 0 [42, 92)  compute 1 [94, 144)     step [0, 160)

so communication 80, exposed 40, compute 100, idle 20.
"""

from __future__ import annotations

import json
from pathlib import Path

from make_trace import MAIN, document, mark, op, write

from fsdpviz.experiment import RunFolder
from fsdpviz.experiment.presets import demo
from fsdpviz.experiment.run_folder import write_json

LINK = 102
WHEN = {False: ((0, 94), (42, 136), 200), True: ((0, 42), (42, 94), 160)}  # gathers, computes, end


def made_run(path: Path, prefetch: bool, *, finished: bool = True) -> Path:
    """A run folder at ``path`` as above."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    write_json(folder.experiment, demo(prefetch).to_dict())
    write_json(folder.environment, {"provenance": "cpu + emulated links", "world_size": 2})
    gathers, computes, end = WHEN[prefetch]
    for rank in (0, 1):
        mine = folder.rank(rank)
        mine.path.mkdir()
        events = [mark("ProfilerStep#1", 0, end), mark("fsdpviz::forward", 0, end)]
        for block, (gather, compute) in enumerate(zip(gathers, computes, strict=True)):
            events.append(mark(f"fsdpviz::all_gather (blocks.{block})", gather, 40, thread=LINK))
            events.append(mark(f"FSDP::pre_forward (blocks.{block})", compute - 1, 1))
            events.append(op("aten::linear", compute, 50))
            events.append(mark(f"FSDP::post_forward (blocks.{block})", compute + 50, 1))
        write(mine.trace.with_name("trace.json.gz"), document(events, rank=rank))
        write_json(mine.lanes, {str(MAIN): "main thread", str(LINK): "link intra-node"})
        write_json(mine.memory, {"peak_device_bytes": 1000 + rank, "peak_host_bytes": 5000 + rank})
        line = {"step": 1, "measured": True, "loss": 0.5 + rank, "step_ns": end * 1000, "samples": 8}
        mine.metrics.write_text(json.dumps(line) + "\n")
    if finished:
        write_json(folder.result, {"losses": [1.0]})
    return path
