"""What Nsight Systems' codes and texts are called here: as Kineto calls them, so that one set of rules reads both."""

from __future__ import annotations

import re

# ENUM_CUDA_MEMCPY_OPER's names, without CUDA_MEMCPY_KIND_
_COPIES = {
    "HTOD": "HtoD",
    "DTOH": "DtoH",
    "HTOA": "HtoA",
    "ATOH": "AtoH",
    "ATOA": "AtoA",
    "ATOD": "AtoD",
    "DTOA": "DtoA",
    "DTOD": "DtoD",
    "HTOH": "HtoH",
    "PTOP": "PtoP",
    "UVM_HTOD": "HtoD, unified memory",
    "UVM_DTOH": "DtoH, unified memory",
    "UVM_DTOD": "DtoD, unified memory",
}
_COPY_CODES = dict(enumerate(["UNKNOWN", *_COPIES]))  # 1 HtoD, 2 DtoH, 8 DtoD, 10 PtoP
_MEMORY_CODES = {
    0: "Pageable",
    1: "Pinned",
    2: "Device",
    3: "Array",
    4: "Managed",
    5: "Device Static",
    6: "Managed Static",
}
_SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}  # ENUM_CUPTI_SYNC_TYPE

_RANGE_OF_A_PERSON = re.compile(
    r"^(?:FSDP::|fsdpviz::|nccl:|nccl[A-Z]|gloo:|ProfilerStep|Optimizer\.|DistributedDataParallel\.|FullyShardedData"
    r"|enumerate\(|##|(?i:train|step|iter))"
)
# what emit_nvtx writes behind an operator's name: always with op_id in newer versions, with seq alone in older ones,
# where a person's `prefill, seq = 4096` looks the same and the name in front must tell
_TAIL = re.compile(r", (?:seq = \d+, )?op_id = \d+(?:,.*)?$", re.DOTALL)
_OLD_TAIL = re.compile(r", seq = \d+(?:, sizes = .*)?$", re.DOTALL)
_OPERATOR = re.compile(r"\w+Backward\d*|(?:\w+::)+\w.*", re.DOTALL)
_VERSION = re.compile(r"_v\d+$")


def copy_name(code: int | None, source: int | None, target: int | None, codes: dict[int, str]) -> str:
    """``Memcpy HtoD (Pinned -> Device)``. ``codes`` are the file's own names of copies, empty where it has none."""
    kind = _COPIES.get((codes or _COPY_CODES).get(code if code is not None else 0, ""), "of unknown kind")
    memory = [_MEMORY_CODES.get(place if place is not None else -1, "Unknown") for place in (source, target)]
    return f"Memcpy {kind} ({memory[0]} -> {memory[1]})"


def copy_codes(rows: list[tuple[int | None, str | None]]) -> dict[int, str]:
    """By code, from the rows (id, name) of the file's ENUM_CUDA_MEMCPY_OPER."""
    return {code: (name or "").removeprefix("CUDA_MEMCPY_KIND_") for code, name in rows if code is not None}


def sync_name(code: int | None) -> str:
    return _SYNCS.get(code or 0, "Synchronization of unknown kind")


def call_name(name: str) -> str:
    """``cudaLaunchKernel`` of ``cudaLaunchKernel_v7000``."""
    return _VERSION.sub("", name)


def call_category(name: str) -> str:
    """Kineto's category of a CUDA call: those of the runtime begin with cuda, those of the driver with cu."""
    return "cuda_runtime" if name.startswith("cuda") else "cuda_driver"


def range_name(text: str) -> str:
    """The operator's or the range's own name, without the tail of ``emit_nvtx``."""
    tail = _tail_of(text)
    return text[: tail.start()] if tail else text


def range_category(text: str) -> str:
    """``cpu_op`` for what ``emit_nvtx`` wrote for an operator, ``user_annotation`` for a range of a person's."""
    is_operator = _tail_of(text) is not None and _RANGE_OF_A_PERSON.match(text) is None
    return "cpu_op" if is_operator else "user_annotation"


def _tail_of(text: str) -> re.Match[str] | None:
    if (tail := _TAIL.search(text)) or not (tail := _OLD_TAIL.search(text)):
        return tail
    return tail if _OPERATOR.fullmatch(text, 0, tail.start()) else None
