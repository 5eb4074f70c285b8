"""Records one step of the glass box on two ranks and draws rank 0's part of it: ``docs/images/glassbox_step.svg``.

python docs/draw_step.py [run folder]       with a folder: draws what was recorded there before
"""

from __future__ import annotations

import sys
import tempfile
from html import escape
from pathlib import Path

import polars as pl

import fsdpviz
from fsdpviz.base.kinds import Kind
from fsdpviz.experiment import Data, Experiment, GlassBox, Link, Links, Mesh, Mlp, Offload, Optimizer, Prefetch, Steps
from fsdpviz.view.palette import KIND_STYLES

PICTURE = Path(__file__).parent / "images" / "glassbox_step.svg"
STEP = Experiment(
    name="one step of the glass box",
    engine="glassbox",
    model=Mlp(widths=(512,) * 5),
    mesh=Mesh(shard=2),
    prefetch=Prefetch(forward=1, backward=1),
    offload=Offload(parameters=True),
    glassbox=GlassBox(optimizer_when="backward", keep_last=1),
    optimizer=Optimizer(name="adamw", lr=1e-3),
    data=Data(batch_size=4096),
    steps=Steps(warmup=2, measured=2),
    links=Links(intra_node=Link(bandwidth_gbps=0.08), host_device=Link(bandwidth_gbps=0.06)),
    device="cpu",
)
LANES = ("compute", "H2D stream", "gather stream", "reduce stream", "D2H stream", "optimizer stream")
KINDS = (Kind.COMPUTE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.H2D, Kind.D2H, Kind.OPTIMIZER, Kind.WAIT)
WIDTH, LEFT, ROW, TOP = 1080, 130, 34, 44


def step_spans(trace: fsdpviz.Recording) -> pl.DataFrame:
    """Rank 0's last step: one row a bar, with its lane by name and its times from the step's start."""
    spans = trace.spans.with_columns(pl.col("kind").cast(pl.String))
    last = spans.filter(pl.col("rank") == 0)["step"].max()
    lanes = trace.lanes.filter(pl.col("rank") == 0).select("lane", pl.col("name").alias("lane_name"))
    bars = (
        spans.filter((pl.col("rank") == 0) & (pl.col("step") == last) & pl.col("kind").is_in([*map(str, KINDS)]))
        .join(lanes, on="lane")
        .with_columns(
            lane_name=pl.when(pl.col("lane_name").is_in(LANES)).then("lane_name").otherwise(pl.lit("compute")),
            end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        )
        .filter(pl.col("duration_ns") > 50_000)
        .sort("start_ns")
    )
    origin = bars["start_ns"].min()
    return bars.with_columns(pl.col("start_ns") - origin, pl.col("end_ns") - origin)


def drawn(bars: pl.DataFrame, provenance: str) -> str:
    """The picture, as SVG."""
    span_ns = bars["end_ns"].max()
    assert isinstance(span_ns, int)
    scale = (WIDTH - LEFT - 10) / span_ns
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + ROW * len(LANES) + 30}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="13">rank 0 of 2, one step · {escape(provenance)}</text>',
    ]
    for row, lane in enumerate(LANES):
        y = TOP + ROW * row
        parts.append(f'<text x="10" y="{y + 18}">{lane}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y + ROW - 4}" y2="{y + ROW - 4}" stroke="#ddd"/>')
        for bar in bars.filter(pl.col("lane_name") == lane).iter_rows(named=True):
            x, width = LEFT + bar["start_ns"] * scale, (bar["end_ns"] - bar["start_ns"]) * scale
            style = KIND_STYLES[Kind(bar["kind"])]
            unit = (bar["unit"] or "").rpartition(".")[2]
            title = f"{bar['name']}, {(bar['end_ns'] - bar['start_ns']) / 1e6:.1f} ms"
            parts.append(
                f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" '
                f'height="{ROW - 8}" fill="{style.fill}" stroke="white" stroke-width="0.4"/>'
            )
            if width > 9 and unit:
                place = f'x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="{style.ink}"'
                parts.append(f"<text {place}>{escape(unit)}</text>")
            parts.append("</g>")
    y = TOP + ROW * len(LANES) + 16
    for mark_ms in range(0, int(span_ns / 1e6) + 1, 50):
        parts.append(f'<text x="{LEFT + mark_ms * 1e6 * scale:.1f}" y="{y}">{mark_ms} ms</text>')
    x = 330.0
    for kind in KINDS:
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{KIND_STYLES[kind].fill}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{KIND_STYLES[kind].words}</text>')
        x += 34 + 5.5 * len(KIND_STYLES[kind].words)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            recording = fsdpviz.open(Path(sys.argv[1]))
        else:
            recording = fsdpviz.run(STEP, out=Path(folder) / "run", progress=False)
        PICTURE.write_text(drawn(step_spans(recording), str(recording.provenance)))


if __name__ == "__main__":
    main()
