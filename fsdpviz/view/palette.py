"""What each kind and phase looks like: one colour, one word, one pattern, everywhere.

The colours are Okabe and Ito's eight (distinct under the three common colour deficiencies) and, for the
rare kinds, muted ones from Paul Tol's sets. A colour is never the only signal: bars carry their unit and
kind as text, and reductions, copies and waits are hatched.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.kinds import Kind
from ..base.labels import Phase
from ..base.provenance import Provenance


@dataclass(frozen=True)
class KindStyle:
    """``fill``, ``ink`` (text on the fill) and ``hatch`` are #rrggbb.

    ``tag`` is empty where the unit alone says enough. ``pattern`` is one of plotly's, drawn in ``hatch``.
    """

    words: str
    tag: str
    fill: str
    ink: str
    pattern: str = ""
    hatch: str = "#ffffff"


_WHITE, _BLACK = "#ffffff", "#111111"

# in the order of the legend: what computes, what communicates, what copies, what waits
KIND_STYLES: dict[Kind, KindStyle] = {
    Kind.COMPUTE: KindStyle("compute", "", "#0072b2", _WHITE),
    Kind.OPTIMIZER: KindStyle("optimizer", "opt", "#333333", _WHITE),
    Kind.ALL_GATHER: KindStyle("all-gather", "AG", "#e69f00", _BLACK),
    Kind.REDUCE_SCATTER: KindStyle("reduce-scatter", "RS", "#d55e00", _BLACK, "/"),
    Kind.ALL_REDUCE: KindStyle("all-reduce", "AR", "#cc79a7", _BLACK, "x"),
    Kind.BROADCAST: KindStyle("broadcast", "BC", "#8c510a", _WHITE),
    Kind.ALL_TO_ALL: KindStyle("all-to-all", "A2A", "#882255", _WHITE),
    Kind.P2P: KindStyle("send / receive", "P2P", "#999933", _BLACK, "|"),
    Kind.H2D: KindStyle("copy host → device", "H2D", "#009e73", _BLACK, "\\"),
    Kind.D2H: KindStyle("copy device → host", "D2H", "#f0e442", _BLACK, "\\", _BLACK),
    Kind.D2D: KindStyle("copy on device", "D2D", "#44aa99", _BLACK, "-"),
    Kind.MEMSET: KindStyle("memset", "set", "#ddcc77", _BLACK, "-", _BLACK),
    Kind.WAIT: KindStyle("wait", "wait", "#dcdcdc", _BLACK, ".", _BLACK),
    Kind.HOST: KindStyle("host", "", "#aab7c4", _BLACK),
    Kind.ANNOTATION: KindStyle("annotation", "", "#eceff1", _BLACK),
}

# which bars lie on top where spans of one lane overlap; the last is on top
PAINT_ORDER: tuple[Kind, ...] = (
    Kind.ANNOTATION,
    Kind.HOST,
    Kind.WAIT,
    Kind.COMPUTE,
    Kind.OPTIMIZER,
    Kind.MEMSET,
    Kind.D2D,
    Kind.H2D,
    Kind.D2H,
    Kind.P2P,
    Kind.ALL_TO_ALL,
    Kind.BROADCAST,
    Kind.ALL_REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.ALL_GATHER,
)

# light enough that every ink reads on them and no bar is confused with them
PHASE_FILLS: dict[str, str] = {
    Phase.FORWARD: "#d6e6f5",
    Phase.BACKWARD: "#f7e0cc",
    Phase.RECOMPUTE: "#ece3f4",
    Phase.OPTIMIZER: "#dddddd",
}
OTHER_PHASE_FILL = "#eeeeee"

INK = "#1a1a1a"
MUTED = "#555555"
GRID = "#dfe3e8"
PAPER = "#ffffff"
STEP_LINE = "#7a7a7a"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"

# background and border of the provenance badge; ink is INK
BADGE_COLOURS: dict[Provenance, tuple[str, str]] = {
    Provenance.CUDA: ("#e3f3e6", "#2e7d32"),
    Provenance.CPU: ("#e8eef7", "#34568b"),
    Provenance.CPU_EMULATED_LINKS: ("#fff3d6", "#a86c00"),
    Provenance.RECORDED_ELSEWHERE: ("#eef0f2", "#566573"),
    Provenance.SIMULATED: ("#f3e6f5", "#7b1fa2"),
}
