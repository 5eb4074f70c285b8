"""Two recordings side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis import Comparison
from ..analysis import compare as compare_traces
from .recording import Recording
from .recording import open as open_recording

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ..view import ComparisonTable


@dataclass(frozen=True, eq=False)
class Ab:
    """A pair of recordings and what differs between them."""

    a: Recording
    b: Recording
    comparison: Comparison

    def timeline(self, **options: Any) -> go.Figure:
        """Both timelines on one time axis; ``options`` are those of ``view.compare_timeline``."""
        from ..view import compare_timeline

        options.setdefault("names", (self.a.name, self.b.name))
        return compare_timeline(self.a, self.b, **options)

    def report(self) -> ComparisonTable:
        """The numbers of A, of B, and their ratio."""
        from ..view import ComparisonTable

        return ComparisonTable(self.comparison, (self.a.name, self.b.name))

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def compare(a: Recording | str | Path, b: Recording | str | Path) -> Ab:
    """The pair, from recordings or from what ``fsdpviz.open`` takes."""
    first, second = (side if isinstance(side, Recording) else open_recording(side) for side in (a, b))
    return Ab(first, second, compare_traces(first, second))
