"""Spans that say no category: what is told otherwise is read, and all else is noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_trace import launched, mark, op, span, write

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.table import UNCATEGORISED, UNREAD_DEVICE

Event = dict[str, Any]
TOLD = "spans without a category, taken for what their process is called"


def opened(tmp_path: Path, events: list[Event]) -> Trace:
    return open_trace(write(tmp_path / "rank0.json", events))


def bare(process: Any, thread: Any, name: str, start: float, duration: float, **args: Any) -> Event:
    event = span("", name, start, duration, process=process, thread=thread, **args)
    del event["cat"]
    return event


def called(what: str, process: Any, thread: Any, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def kinds(trace: Trace) -> list[tuple[str, str]]:
    return trace.spans.sort("start_ns").select("name", "kind").rows()


def notes(trace: Trace) -> dict[str, tuple[int, str]]:
    return {note.what: (note.count, note.example) for note in trace.notes}


@pytest.mark.parametrize("device", ["CUDA functions", "NPU functions"])
def test_the_profiler_without_kineto(tmp_path: Path, device: str) -> None:
    """As ``EventList.export_chrome_trace`` of torch 1.7 writes it."""
    flow = {"name": "aten::add", "ph": "s", "ts": 101.524, "tid": 1, "pid": "CPU functions", "id": 0}
    events = [
        bare("CPU functions", 1, "aten::add", 101.524, 134.49),
        {**flow, "cat": "cpu_to_cuda"},
        {**flow, "cat": "cpu_to_cuda", "ph": "f", "pid": device, "tid": 0, "ts": 102.95},
        bare(device, 0, "aten::add", 102.95, 134.17),
        bare(device, 0, "Memcpy HtoD (Pageable -> Device)", 240, 5),
        bare(device, 0, "Memset (Device)", 250, 1),
    ]
    trace = opened(tmp_path, events)
    assert [kind for _, kind in kinds(trace)] == ["host", "compute", "h2d", "memset"]
    assert trace.lanes.filter(is_device=True)["process"].to_list() == [device]
    assert notes(trace)[TOLD] == (4, "CPU functions")
    assert trace.validate()["breakdown"].is_supported


def test_the_profiler_without_kineto_and_without_a_device(tmp_path: Path) -> None:
    trace = opened(
        tmp_path, [bare("CPU functions", 1, "aten::linear", 0, 9), bare("CPU functions", 1, "aten::mm", 1, 5)]
    )
    assert kinds(trace) == [("aten::linear", "compute"), ("aten::mm", "host")]


def ascend() -> list[Event]:
    """As torch_npu's trace_view.json: the host has categories, the device has none, and a collective is there twice."""
    return [
        *(called("process_name", 6, 0, "Ascend Hardware"), called("thread_name", 6, 2, "Stream 2")),
        *(called("process_name", 7, 0, "Communication(HCCL)"), called("process_name", 8, 0, "Overlap Analysis")),
        called("process_name", 9, 0, "CANN"),
        op("ProfilerStep#5", 0, 5000, process=1, thread=1),
        op("aten::mm", 100, 20, process=1, thread=1),
        bare(9, 1, "AscendCL@aclnnMatmul", 110, 5),
        bare(6, 2, "aclnnMatmul_MatMulV2", 179, 100.4, **{"Task Type": "AI_CORE", "Stream Id": 2}),
        bare(6, 2, "EVENT_WAIT", 280, 300, **{"Task Type": "EVENT_WAIT"}),
        bare(7, 3, "hcom_allReduce__123_0_1", 279, 300.25, data_type="FP16", count=1024),
        bare(8, 2, "Computing", 179, 100.4),
    ]


def test_a_device_s_lanes_that_mix_work_and_waits_are_not_read_and_it_is_said(tmp_path: Path) -> None:
    """Nor are the host's operators taken for the work that the device did."""
    trace = opened(tmp_path, ascend())
    assert {kind for _, kind in kinds(trace)} == {"host"}
    assert notes(trace)[UNREAD_DEVICE] == (3, "aclnnMatmul_MatMulV2")
    assert notes(trace)[UNCATEGORISED] == (2, "AscendCL@aclnnMatmul")
    validation = trace.validate()
    for analysis in ("breakdown", "overlap"):
        assert not validation[analysis].is_supported
        assert (
            "without a category, which are not among its work: 3, for example aclnnMatmul"
            in validation[analysis].reason
        )


def test_a_stream_without_categories_beside_one_with_them(tmp_path: Path) -> None:
    events = [*launched("kernel", "gemm", 0, 10, 5, correlation=1), bare(1, 7, "gemm", 20, 5)]
    trace = opened(tmp_path, [*events, called("thread_name", 1, 7, "stream 7 ")])
    assert kinds(trace)[1:] == [("gemm", "compute"), ("gemm", "host")]
    assert notes(trace)[UNREAD_DEVICE] == (1, "gemm")
    assert not trace.validate()["breakdown"].is_supported


@pytest.mark.parametrize(("process", "thread"), [("100", "Communication"), ("Communication", 1)])
@pytest.mark.parametrize("has_device", [True, False])
def test_a_host_that_communicates_is_no_device(tmp_path: Path, process: str, thread: Any, has_device: bool) -> None:
    """A thread of that name never is; a process is where no device has categories."""
    work = launched("kernel", "gemm", 0, 10, 5, correlation=1) if has_device else [op("aten::mm", 0, 9)]
    trace = opened(tmp_path, [*work, bare(process, thread, "fwd", 20, 5)])
    is_device = process == "Communication" and not has_device
    assert notes(trace)[UNREAD_DEVICE if is_device else UNCATEGORISED] == (1, "fwd")
    assert trace.validate()["breakdown"].is_supported is not is_device


def test_functions_of_a_language_are_no_device_s(tmp_path: Path) -> None:
    trace = opened(tmp_path, [op("aten::mm", 0, 9), bare("Python functions", 1, "forward", 0, 9)])
    assert dict(kinds(trace))["forward"] == "host"
    assert notes(trace) == {UNCATEGORISED: (1, "forward")}


@pytest.mark.parametrize("category", [None, ""])
def test_other_spans_are_the_host_s_and_counted(tmp_path: Path, category: str | None) -> None:
    events = [mark("ProfilerStep#1", 0, 50), op("aten::mm", 1, 5), {**bare(1, 1, "of mine", 3, 1), "cat": category}]
    trace = opened(tmp_path, events)
    assert dict(kinds(trace))["of mine"] == "host"
    assert notes(trace) == {UNCATEGORISED: (1, "of mine")}
    support = trace.validate()["breakdown"]
    assert support.is_supported
    assert support.reason == "spans without a category count as the host's: 1, for example of mine"
