"""Where a number or a picture comes from. It travels into every figure and export."""

from __future__ import annotations

from enum import StrEnum


class Provenance(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"
    CPU_EMULATED_LINKS = "cpu + emulated links"
    RECORDED_ELSEWHERE = "recorded elsewhere"
    SIMULATED = "simulated"
