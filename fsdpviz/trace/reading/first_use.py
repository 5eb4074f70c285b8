"""What loading costs, spent when loading.

[Note: first use] The first frame that polars makes costs 5 ms and 4 MB, most of it code paged in from its 200 MB of
binary: more than a small trace does. The compiled scanner, numpy and the interpreter have first times too. They are
part of loading those libraries and not of any trace, so that ``opener`` reads five events when it is imported.
"""

from __future__ import annotations

from pathlib import Path

from ..kineto.reader import recording_of
from ..meaning.spans import RankTables, rank_tables

_EVENTS = b"""{"traceEvents": [
{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "thread 1 (python)"}},
{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 9.5},
{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 2, "dur": 3, "args": {"External id": 1}},
{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 3, "dur": 1,
 "args": {"correlation": 1}},
{"ph": "X", "cat": "kernel", "name": "add", "pid": 0, "tid": "stream 7", "ts": 5, "dur": 2, "args": {"correlation": 1}}
]}"""


def tables_of_few_events() -> RankTables:
    """The tables of the events above, all of one rank; see [Note: first use]."""
    return rank_tables(recording_of(Path("first use"), iter((_EVENTS,)), []), 0)
