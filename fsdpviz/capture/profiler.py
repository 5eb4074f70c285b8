"""torch.profiler over the chosen steps: one trace a rank, with every thread, shapes and ranges."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ..engine.protocol import RankContext
from ..experiment import Experiment
from ..experiment.run_folder import RankFolder, write_json
from .lanes import lane_names

# gloo closes a collective's range a little after it has told the waiting thread that it is done; a range that is
# still open when the profiler stops loses its shapes
SETTLE_S = 0.05


class StepProfiler:
    """Profiles consecutive steps. ``around(step)`` goes around every step; ``write`` exports what was seen."""

    def __init__(self, experiment: Experiment, context: RankContext) -> None:
        capture, warmup = experiment.capture, experiment.steps.warmup
        chosen = capture.steps if capture.steps is not None else range(experiment.steps.measured)
        self._steps = range(warmup + chosen[0], warmup + chosen[-1] + 1) if capture.trace else range(0)
        self._lanes: dict[int, str] = {}
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if context.is_cuda else [])
        self._profile = profile(
            activities=activities,
            record_shapes=capture.shapes,
            with_stack=capture.stacks,
            experimental_config=_all_threads(),
        )
        self._is_running = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if self._steps and step == self._steps[0]:
            self._profile.start()
            self._is_running = True
        yield
        if self._is_running and step == self._steps[-1]:
            self.stop()

    def stop(self) -> None:
        """Ends the recording, early when a step raised."""
        if self._is_running:
            self._is_running = False
            time.sleep(SETTLE_S)
            self._lanes = lane_names()  # while the threads that were recorded still live
            self._profile.stop()

    def write(self, folder: RankFolder) -> None:
        """Writes the trace and its lanes' names; does nothing when no step was profiled."""
        if self._lanes:
            write_json(folder.lanes, {str(thread): name for thread, name in self._lanes.items()})
            # not to a .gz at once: torch compresses line by line and as hard as it can, which takes eight times as long
            with tempfile.TemporaryDirectory() as elsewhere:
                plain = Path(elsewhere) / "trace.json"
                self._profile.export_chrome_trace(str(plain))
                with plain.open("rb") as whole, gzip.open(folder.trace, "wb", compresslevel=6) as compressed:
                    shutil.copyfileobj(whole, compressed, 1 << 20)


def _all_threads() -> Any:
    """The profiler sees worker threads, gloo's and the links', only with this; torch before 2.10 may lack an option."""
    try:
        return _ExperimentalConfig(profile_all_threads=True, trace_only=True)
    except TypeError:
        return _ExperimentalConfig(profile_all_threads=True)
