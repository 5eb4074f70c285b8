"""One line a step, and one line a stage: what the caller follows live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import torch

from ..engine.protocol import RankContext
from ..engine.train import StepResult
from ..experiment.run_folder import RankFolder


class JsonLines:
    """Appends objects to a file, each whole and at once visible to whoever reads along."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **content: Any) -> None:
        self._file.write(json.dumps(content) + "\n")

    def close(self) -> None:
        self._file.close()


class StepMetrics:
    """Writes ``metrics.jsonl``: loss, time, samples and memory of each step of this rank."""

    def __init__(self, folder: RankFolder, context: RankContext) -> None:
        self._lines, self._context, self._process = JsonLines(folder.metrics), context, psutil.Process()

    def write(self, result: StepResult) -> None:
        device_bytes = torch.cuda.memory_allocated(self._context.device) if self._context.is_cuda else None
        self._lines.write(
            step=result.step,
            measured=result.is_measured,
            loss=result.loss,
            step_ns=result.step_ns,
            samples=result.samples,
            rss_bytes=self._process.memory_info().rss,
            device_allocated_bytes=device_bytes,
        )

    def close(self) -> None:
        self._lines.close()
