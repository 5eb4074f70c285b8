"""Spans without a category, which most often says whether a span ran on the host or on a device.

torch before 1.8, and today's profiler where Kineto is not used, write none: the process is called ``CPU functions`` or
``CUDA functions``, and all that runs under either name is one thing. Elsewhere a lane may be called a device's
(``Stream 2``, ``Ascend Hardware``) and hold what is no work beside what is: torch_npu's ``trace_view.json`` has waits
and the parts of a collective among its kernels, each collective once more under ``Communication``, and sums of it all
under ``Overlap Analysis``. Such spans stay on the host, and a note says that the device's work was not read.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from ..kineto.columns import Coded
from ..kineto.reader import Recording
from ..table import UNCATEGORISED, UNREAD_DEVICE, Note
from .classify import DEVICE_CATEGORIES

_OF_HOST = re.compile(r"CPU functions$")
_OF_DEVICE = re.compile(
    r"(?:CUDA|HIP|ROCm|GPU|XPU|NPU|HPU|MLU|MPS|MTIA|MUSA|GCU|IPU|PrivateUse(?:1|One)) functions$", re.IGNORECASE
)
_TOLD = "spans without a category, taken for what their process is called"
_COPY, _FILL = re.compile(r"memcpy", re.IGNORECASE), re.compile(r"memset", re.IGNORECASE)
_NAMES_A_DEVICE = re.compile(
    r"stream\W{0,2}\d|(?:GPU|NPU|XPU|HPU|MLU)\W{0,2}\d|Ascend Hardware|/device:(?!CPU)", re.IGNORECASE
)
# a process of a device's collectives, where none of a device's spans has a category; a host's, where some have
_NAMES_COMMUNICATION = re.compile(r"HCCL|Communication\b", re.IGNORECASE)


def with_categories(recording: Recording) -> Recording:
    """The recording with the categories that a process's name tells, and notes on all spans that have none."""
    category, process, name = (recording.codes[column] for column in ("category", "process", "name"))
    if "" not in category.values:
        return recording
    rows = (category.codes == category.values.index("")).nonzero()[0]
    is_host, is_device = (
        process.where(lambda text, pattern=pattern: pattern.match(text) is not None)[rows]
        for pattern in (_OF_HOST, _OF_DEVICE)
    )
    host, device, rest = rows[is_host], rows[is_device & ~is_host], rows[~is_device & ~is_host]
    code_of = {text: code for code, text in enumerate(category.values)}
    codes = category.codes.copy()
    codes[host] = code_of.setdefault("cpu_op", len(code_of))
    names, which = np.unique(name.codes[device], return_inverse=True)
    of_name = [code_of.setdefault(_on_device(name.values[one]), len(code_of)) for one in names.tolist()]
    codes[device] = np.array(of_name, np.int32)[which]
    is_unread = _is_on_device(recording, rest)
    notes = [
        Note(what, len(some), example(some[0])[:60])
        for what, some, example in (
            (_TOLD, np.union1d(host, device), lambda row: process.values[process.codes[row]]),
            (UNREAD_DEVICE, rest[is_unread], lambda row: name.values[name.codes[row]]),
            (UNCATEGORISED, rest[~is_unread], lambda row: name.values[name.codes[row]]),
        )
        if len(some)
    ]
    return replace(
        recording,
        codes={**recording.codes, "category": Coded(codes, list(code_of))},
        notes=(*recording.notes, *notes),
    )


def _on_device(name: str) -> str:
    return "gpu_memcpy" if _COPY.search(name) else "gpu_memset" if _FILL.search(name) else "kernel"


def _is_on_device(recording: Recording, rows: np.ndarray) -> np.ndarray:
    """Which of the rows are on a lane that is named as a device's (bool)."""
    process, thread = recording.codes["process"], recording.codes["thread"]
    several = len(thread.values)
    lanes, which = np.unique(process.codes[rows].astype(np.int64) * several + thread.codes[rows], return_inverse=True)
    pairs = [(process.values[lane // several], thread.values[lane % several]) for lane in lanes.tolist()]
    is_device = [any(map(_NAMES_A_DEVICE.match, _names(recording, *pair))) for pair in pairs]
    if not recording.codes["category"].where(DEVICE_CATEGORIES.__contains__).any():
        for place, (one, _) in enumerate(pairs):
            is_device[place] |= any(map(_NAMES_COMMUNICATION.match, recording.names_of(one)))
    return np.array(is_device, bool)[which]


def _names(recording: Recording, process: str, thread: str) -> tuple[str, ...]:
    return *recording.names_of(process), thread, recording.thread_names.get((process, thread), "")
