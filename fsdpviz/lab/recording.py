"""What a notebook holds after a run or after opening a trace: the Trace, with its report and timeline at hand."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.compare import losses
from ..experiment import Experiment, RunFolder
from ..trace import Trace, open_trace

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..trace.files.sources import Paths
    from ..view import ReportTable


@dataclass(frozen=True, eq=False)
class Recording(Trace):
    """A Trace with the front doors to its analyses. ``folder`` is the run's, None for traces of other origin."""

    folder: RunFolder | None = None

    def report(self) -> ReportTable:
        """Where each step's time went, and the lectures' five measures; a table in a notebook, text in a terminal."""
        from ..analysis import report
        from ..view import ReportTable

        return ReportTable(report(self))

    def timeline(self, **options: Any) -> go.Figure:
        """Lanes over time as a Plotly figure; ``options`` are those of ``view.timeline`` (ranks, steps, title, …)."""
        from ..view import timeline

        return timeline(self, **options)

    @property
    def name(self) -> str:
        stated = self.about.get("experiment", {}).get("name")
        return stated if isinstance(stated, str) and stated else "recording"

    @property
    def experiment(self) -> Experiment:
        """The experiment that was run. Raises ExperimentError for a trace that no experiment of ours made."""
        return Experiment.from_dict(self.about.get("experiment") or {"experiment": "none"})

    @property
    def losses(self) -> list[float]:
        """The loss of each step, warm-up included: the mean over ranks, and so over the step's whole batch."""
        return list(losses(self).values())

    def log(self, rank: int = 0) -> str:
        """What ``rank`` printed, empty when nothing was kept."""
        if self.folder is None or not self.folder.rank(rank).log.is_file():
            return ""
        return self.folder.rank(rank).log.read_text(encoding="utf-8", errors="replace")

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def open(paths: Paths, **options: Any) -> Recording:  # fsdpviz.open
    """The recording in ``paths``: a trace, several, or a run folder. Raises TraceError, in one line.

    ``options`` are those of ``trace.open_trace``.
    """
    trace = open_trace(paths, **options)
    folder = Path(paths) if isinstance(paths, str | os.PathLike) else None
    is_run = folder is not None and RunFolder.looks_like_one(folder)
    values = {field.name: getattr(trace, field.name) for field in fields(Trace)}
    return Recording(**values, folder=RunFolder(folder) if folder and is_run else None)
