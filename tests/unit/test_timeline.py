"""What a timeline shows of traces small enough to draw by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
import pytest

from fsdpviz.base.errors import TraceError
from fsdpviz.base.kinds import Kind
from fsdpviz.base.provenance import Provenance
from fsdpviz.trace.table import LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Trace
from fsdpviz.view import compare_timeline as draw_two
from fsdpviz.view import timeline as draw
from fsdpviz.view.bars import MAX_BARS, to_bars
from fsdpviz.view.palette import KIND_STYLES, PAINT_ORDER
from fsdpviz.view.text import cut, safe

MS = 1_000_000
timeline: Any = draw  # plotly's types do not know the attributes of a trace
compare_timeline: Any = draw_two
EPOCH = 1_700_000_000_000_000_000  # recordings carry such times; a float cannot hold them to the ns


def span(start_ms: float, length_ms: float, kind: str, **known: Any) -> dict[str, Any]:
    known = {"rank": 0, "lane": 0, "name": kind, "step": 5, "depth": 0, **known}
    times = {"start_ns": EPOCH + round(start_ms * MS), "duration_ns": round(length_ms * MS)}
    return {**dict.fromkeys(SPAN_SCHEMA), **known, **times, "kind": kind}


def made(
    spans: Sequence[dict[str, Any]],
    steps: Sequence[tuple[int, int, float, float]] = (),
    lanes: Sequence[str] = ("main thread", "link intra-node"),
    provenance: Provenance = Provenance.CPU_EMULATED_LINKS,
) -> Trace:
    """``steps`` are (rank, step, start in ms, end in ms); every rank has the same lanes."""
    frame = pl.DataFrame(list(spans), schema=SPAN_SCHEMA)
    ranks = frame["rank"].unique().sort().to_list()
    rows = [(rank, i, name, False, "1", str(i), i) for rank in ranks for i, name in enumerate(lanes)]
    step_rows = [(rank, step, EPOCH + round(a * MS), EPOCH + round(b * MS)) for rank, step, a, b in steps]
    return Trace(
        frame,
        pl.DataFrame(rows, schema=LANE_SCHEMA, orient="row"),
        pl.DataFrame(step_rows, schema=STEP_SCHEMA, orient="row"),
        provenance,
    )


# Two units, one gather hidden and one not. ms:
#   main   wait 0-4 | compute a 4-14 | compute b 14-24 | optimizer 24-26
#   link   gather a 0-4 | gather b 4-12
SIX = (
    span(0, 4, "wait"),
    span(4, 10, "compute", unit="layers.0", phase="forward", name="aten::linear"),
    span(14, 10, "compute", unit="layers.1", phase="forward", name="aten::linear"),
    span(24, 2, "optimizer", phase="optimizer"),
    span(0, 4, "all_gather", lane=1, unit="layers.0", phase="forward", bytes=4_000_000, group="shard"),
    span(4, 8, "all_gather", lane=1, unit="layers.1", phase="forward", bytes=4_000_000, group="shard"),
)
SIX_STEPS = ((0, 5, 0, 26),)


def bars(figure: Any, kind: str) -> Any:
    (trace,) = [one for one in figure.data if one.type == "bar" and one.legendgroup == kind]
    return trace


def all_bars(figure: Any) -> int:
    return sum(len(trace.x) for trace in figure.data if trace.type == "bar")


def note(figure: Any) -> str:
    return " ".join(one.text.replace("<br>", " ") for one in figure.layout.annotations if one.name == "note").replace(
        "&#39;", "'"
    )


def test_bars_have_the_times_of_their_spans_in_ms_from_the_start():
    figure = timeline(made(SIX, SIX_STEPS))
    gathers = bars(figure, "all_gather")
    assert list(gathers.base) == [0, 4]
    assert list(gathers.x) == [4, 8]
    assert list(bars(figure, "compute").base) == [4, 14]
    assert type(figure) is go.Figure  # a FigureWidget would store megabytes in every saved notebook


def test_hover_says_unit_kind_times_bytes_phase_rank_and_step():
    text = bars(timeline(made(SIX, SIX_STEPS)), "all_gather").hovertext[1]
    for fact in ("all-gather · layers.1", "start 4.000 ms", "duration 8 ms", "4 MB", "(4,000,000 bytes)"):
        assert fact in text
    for fact in ("forward", "step 5", "rank 0", "link intra-node", "group shard"):
        assert fact in text


def test_unknown_bytes_and_unit_are_left_out_of_the_hover():
    text = bars(timeline(made(SIX, SIX_STEPS)), "optimizer").hovertext[0]
    assert "bytes" not in text and "None" not in text and "group" not in text


def test_wide_bars_carry_their_unit_and_say_what_they_are():
    figure = timeline(made(SIX, SIX_STEPS))
    assert list(bars(figure, "compute").text) == ["layers.0", "layers.1"]
    assert list(bars(figure, "all_gather").text) == ["AG layers.0", "AG layers.1"]


def test_badge_names_the_provenance():
    figure = timeline(made(SIX, SIX_STEPS, provenance=Provenance.SIMULATED))
    badges = [one for one in figure.layout.annotations if one.name == "provenance"]
    assert [one.text for one in badges] == ["simulated"]
    assert badges[0].visible is not False


def test_the_link_lies_right_under_the_thread_that_computes():
    # the recording's own order has a lane of copies between the two
    lanes = ("main thread", "stream h2d", "link intra-node")
    spans = [
        *(span(0, 10, "compute", rank=rank) for rank in (0, 1)),
        *(span(0, 1, "h2d", rank=rank, lane=1) for rank in (0, 1)),
        *(span(0, 1, "all_gather", rank=rank, lane=2) for rank in (0, 1)),
    ]
    ticks = timeline(made(spans, lanes=lanes)).layout.yaxis
    names = ["main thread", "link intra-node", "stream h2d"]
    assert list(ticks.ticktext) == [f"rank {rank} · {name}" for rank in (0, 1) for name in names]
    assert list(ticks.tickvals) == sorted(ticks.tickvals)


def test_phases_are_named_in_a_strip_and_end_where_the_next_begins():
    figure = timeline(made(SIX, SIX_STEPS))
    (strip,) = [one for one in figure.data if one.type == "bar" and one.name == "phase"]
    assert list(strip.base) == [4, 24]  # forward 4-24, optimizer 24-26
    assert list(strip.x) == [20, 2]
    (names,) = [one for one in figure.data if one.type == "scatter" and one.name == "phase"]
    assert "forward" in names.text


def test_only_work_and_waits_are_drawn_unless_asked():
    spans = [*SIX, span(0, 26, "annotation", name="fsdpviz::forward"), span(1, 2, "host", name="cudaLaunch")]
    trace = made(spans, SIX_STEPS)
    shown = {one.legendgroup for one in timeline(trace).data if one.type == "bar" and one.legendgroup}
    assert shown == {"wait", "compute", "optimizer", "all_gather"}
    asked = timeline(trace, kinds=[Kind.HOST])
    assert {one.legendgroup for one in asked.data if one.type == "bar" and one.legendgroup} == {"host"}


# --- what is shown by default, and what is said of the rest

TWO_STEPS = [span(0, 10, "compute"), span(20, 30, "compute", step=6)]
TWO_STEP_ROWS = ((0, 5, 0, 15), (0, 6, 20, 60))


def test_the_first_step_is_shown_by_default_and_the_line_below_says_so():
    figure = timeline(made(TWO_STEPS, TWO_STEP_ROWS))
    assert list(bars(figure, "compute").x) == [10]
    assert "tep 5 of 5, 6 shown" in note(figure)


def test_a_chosen_step_starts_at_zero():
    figure = timeline(made(TWO_STEPS, TWO_STEP_ROWS), steps=6)
    assert list(bars(figure, "compute").base) == [0]
    assert "tep" not in note(figure)


def test_all_steps():
    assert list(bars(timeline(made(TWO_STEPS, TWO_STEP_ROWS), steps="all"), "compute").base) == [0, 20]


def test_without_steps_the_whole_recording_is_shown():
    assert list(bars(timeline(made(TWO_STEPS)), "compute").x) == [10, 30]


def test_a_span_that_hangs_over_the_edge_of_the_step_is_drawn_and_its_neighbour_is_not():
    # step 5 is 10-20: the first span ends where it starts, the second hangs in, the last starts where it ends
    spans = [span(0, 10, "compute"), span(5, 6, "h2d", lane=1), span(19, 4, "d2h"), span(20, 1, "optimizer")]
    figure = timeline(made(spans, ((0, 5, 10, 20),)))
    drawn = [one for one in figure.data if one.type == "bar"]
    assert {one.legendgroup: list(one.base) for one in drawn} == {"h2d": [-5], "d2h": [9]}


def test_ranks_and_lanes_can_be_chosen():
    trace = made([span(0, 1, "compute", rank=rank, lane=lane) for rank in (0, 1) for lane in (0, 1)])
    assert all_bars(timeline(trace, ranks=1)) == 2
    assert list(timeline(trace, ranks=[1], lanes="LINK").layout.yaxis.ticktext) == ["rank 1 · link intra-node"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"ranks": [7]}, "ranks= must name ranks of the trace; it has 0, not 7"),
        ({"steps": 9}, "the trace has 5, not 9"),
        ({"steps": "last"}, "numbers or 'all'"),
        ({"lanes": ["nccl"]}, "The lanes are link intra-node, main thread"),
    ],
)
def test_what_the_trace_does_not_have_is_an_error_that_says_what_it_has(choice: dict[str, Any], says: str):
    with pytest.raises(TraceError, match=re.escape(says)) as caught:
        timeline(made(SIX, SIX_STEPS), **choice)
    assert "\n" not in str(caught.value)


def test_many_ranks_show_the_first_eight_and_say_so():
    figure = timeline(made([span(0, 1, "compute", rank=rank) for rank in range(20)]))
    assert all_bars(figure) == 8
    assert "8 of 20 ranks shown" in note(figure)


def test_an_empty_lane_is_left_out_and_counted():
    figure = timeline(made([span(0, 1, "compute")]))
    assert list(figure.layout.yaxis.ticktext) == ["rank 0 · main thread"]
    assert "1 lane without work in view left out" in note(figure)


def test_an_empty_recording_is_a_figure_that_says_so():
    figure = timeline(made([]))
    assert all_bars(figure) == 0
    assert "No spans to draw" in note(figure)


def test_a_rank_without_the_step_is_named():
    spans = [span(0, 1, "compute", rank=rank) for rank in (0, 1)]
    assert "o such step on rank 1" in note(timeline(made(spans, ((0, 5, 0, 1),))))


# --- merging


def test_nested_spans_of_a_kind_are_one_bar_that_counts_them():
    # 0-10 holds 1-3 and 4-6; 10-12 follows
    spans = [span(0, 10, "compute"), span(1, 2, "compute"), span(4, 2, "compute"), span(10, 2, "compute")]
    figure = timeline(made(spans))
    assert list(bars(figure, "compute").x) == [10, 2]
    assert "2 spans nested inside" in bars(figure, "compute").hovertext[0]
    assert "4 spans drawn as 2 bars: 2 lie inside another of their kind" in note(figure)


def test_narrow_neighbours_merge_and_wide_or_distant_ones_do_not():
    # view 2,000 µs, so a pixel is 1 µs. Three spans of 0.4 µs with gaps of 0.1 µs become one bar, busy
    # 1.2 of 1.4 µs; after a gap of 50 µs a lone one; then a wide one that touches a narrow one
    us = 0.001
    spans = [span(us * start, 0.4 * us, "compute") for start in (0, 0.5, 1.0, 51.4)]
    spans += [span(us * 100, us * 30, "compute"), span(us * 130, us * 0.4, "compute")]
    table = to_bars(made(spans).spans, view_ns=2 * MS, max_bars=4).table.sort("start_ns")
    assert table["spans"].to_list() == [3, 1, 1, 1]
    assert table["busy_ns"].to_list() == [1200, 400, 30_000, 400]
    assert table["duration_ns"].to_list() == [1400, 400, 30_000, 400]


def test_few_spans_never_merge():
    spans = [span(i * 0.0001, 0.0001, "compute") for i in range(20)]
    bars_drawn = to_bars(made(spans).spans, view_ns=1000 * MS, max_bars=20)
    assert bars_drawn.resolution_ns == 0
    assert bars_drawn.table.height == 20


def test_kinds_lanes_and_ranks_never_merge_with_one_another():
    spans = [
        span(i * 0.001, 0.0005, kind, lane=lane, rank=rank)
        for i in range(10)
        for kind in ("compute", "h2d")
        for lane in (0, 1)
        for rank in (0, 1)
    ]
    table = to_bars(made(spans).spans, view_ns=10_000 * MS, max_bars=8).table
    assert table.select("rank", "lane", "kind").n_unique() == table.height == 8


def test_units_stay_apart_while_there_is_room():
    # 2,000 units of 10 spans each: with room for 2,100 bars each unit keeps its own
    spans = [span(i * 0.01, 0.009, "compute", unit=f"layers.{i // 10}") for i in range(20_000)]
    table = to_bars(made(spans).spans, view_ns=200 * MS, max_bars=2100).table
    assert table.height == 2000
    assert set(table["units"].to_list()) == {1}


def many(count: int = 100_000) -> list[dict[str, Any]]:
    """Compute of 0.7 µs every 1 µs on one lane, gathers of 0.5 µs every 1 µs on the other."""
    return [
        span(
            i // 2 * 0.001,
            (0.0007, 0.0005)[i % 2],
            ("compute", "all_gather")[i % 2],
            lane=i % 2,
            unit=f"u{i % 7}",
        )
        for i in range(count)
    ]


def test_a_hundred_thousand_spans_become_at_most_two_thousand_bars_with_their_true_busy_time():
    trace = made(many())
    figure = timeline(trace)
    assert 100 < all_bars(figure) <= MAX_BARS
    assert len(figure.layout.shapes) == 0
    assert "100,000 spans drawn as" in note(figure) and "merge" in note(figure)

    table = to_bars(trace.spans, view_ns=50 * MS).table
    assert table["spans"].sum() == 100_000
    # 50,000 × 700 ns and 50,000 × 500 ns: the gaps inside a bar are not busy
    busy = dict(table.group_by("kind").agg(pl.col("busy_ns").sum()).iter_rows())
    assert busy == {"compute": 35_000_000, "all_gather": 25_000_000}
    assert table["duration_ns"].sum() > 60_000_000


def test_kinds_that_alternate_share_the_height_of_their_lane_as_they_shared_its_time():
    # every µs: 500 ns of compute, then 250 ns of copy, then nothing. Painted over one another at full height
    # the copies would seem to have filled the lane
    spans = [span(i * 0.001, 0.0005, "compute") for i in range(5000)]
    spans += [span(i * 0.001 + 0.0005, 0.00025, "h2d") for i in range(5000)]
    table = to_bars(made(spans).spans, view_ns=5 * MS, max_bars=1000).table
    shape = {kind: (share, below) for kind, share, below in table.select("kind", "share", "below").iter_rows()}
    assert shape["compute"] == (pytest.approx(0.5, abs=0.01), 0)
    assert shape["h2d"] == (pytest.approx(0.25, abs=0.01), pytest.approx(0.5, abs=0.01))


def test_alternating_bars_stay_inside_their_lane():
    figure = timeline(made(many(), lanes=("main thread", "link")), ranks=0)
    for kind, middle in (("compute", 0.5), ("all_gather", 1.5)):
        drawn = bars(figure, kind)
        for y, width in zip(drawn.y, drawn.width, strict=True):
            assert middle - 0.41 < y - width / 2 and y + width / 2 < middle + 0.41


def test_a_merged_bar_says_how_many_and_how_busy():
    text = bars(timeline(made(many())), "compute").hovertext[3]
    assert re.search(r"\d+ spans merged, busy \S+ µs of \S+ µs", text)


def test_overlapping_spans_of_a_kind_count_once_as_busy():
    # 0-6 and 4-10 overlap by 2: the union is 10, not 12 (times in ns)
    spans = [span(0, 6e-6, "compute"), span(4e-6, 6e-6, "compute"), span(1, 1, "compute")]
    table = to_bars(made(spans).spans, view_ns=1000 * MS, max_bars=2).table.sort("start_ns")
    assert table["busy_ns"].to_list() == [10, MS]


def test_more_lanes_than_can_be_drawn_are_counted():
    lanes = [f"stream {i}" for i in range(300)]
    spans = [span(i * 0.001, 0.001, "compute", lane=i) for i in range(300)]
    figure = timeline(made(spans, lanes=lanes))
    assert len(figure.layout.yaxis.ticktext) == 100
    assert "100 of 300 lanes shown" in note(figure)


def test_every_kind_in_every_lane_still_fits():
    kinds = [kind.value for kind in Kind]
    spans = [
        span(i * 0.001, 0.0001, kinds[i % len(kinds)], lane=i // 150, phase=("forward", "backward")[i % 2])
        for i in range(15_000)
    ]
    figure = timeline(made(spans, lanes=[f"stream {i}" for i in range(100)]), kinds=list(Kind))
    assert all_bars(figure) <= MAX_BARS


# --- strangers' names

HOSTILE = '<a href="javascript:alert(1)">x</a><script>alert(1)</script>'


def test_names_units_lanes_and_titles_are_escaped_everywhere():
    spans = [span(0, 10, "compute", name=HOSTILE, unit=HOSTILE, phase=HOSTILE, group=HOSTILE)]
    trace = made(spans, lanes=[HOSTILE])
    for figure in (timeline(trace, title=HOSTILE), compare_timeline(trace, trace, names=(HOSTILE, HOSTILE))):
        written = str(figure.to_dict())
        assert "<a " not in written and "<script" not in written
        assert "&lt;a href=" in written


def test_formulas_are_not_handed_to_mathjax():
    assert "$" not in safe(r"$\href{javascript:alert(1)}{x}$")


def test_long_names_are_cut():
    assert cut("x" * 121) == "x" * 119 + "…"
    assert cut("x" * 120) == "x" * 120
    assert len(cut("\n" * 10_000_000 + "x")) <= 120
    assert cut("a\nb\u202ec") == "a b c"
    hover = bars(timeline(made([span(0, 1, "compute", name="k" * 1_000_000)])), "compute").hovertext[0]
    assert len(hover) < 400


# --- two timelines


def test_two_timelines_share_one_axis_and_each_starts_at_its_own_step():
    slow = made(SIX, SIX_STEPS)
    fast = made([span(100, 10, "compute", step=9), span(100, 8, "all_gather", lane=1, step=9)], ((0, 9, 100, 113),))
    figure = compare_timeline(slow, fast, names=("without", "with"))
    assert {one.xaxis for one in figure.data} <= {None, "x"}
    assert {one.yaxis for one in figure.data} == {"y", "y2"}
    lower = {one.legendgroup: one for one in figure.data if one.yaxis == "y2" and one.type == "bar"}
    assert list(lower["compute"].base) == [0]
    texts = [one.text for one in figure.layout.annotations]
    assert "<b>without</b>" in texts and "<b>with</b>" in texts
    assert "13 ms<br>sooner" in texts  # 26 − 13
    assert texts.count("cpu + emulated links") == 2
    assert figure.layout.xaxis.range[1] == pytest.approx(26 * 1.015)
    # one legend entry a kind
    shown = [one.legendgroup for one in figure.data if one.showlegend]
    assert len(shown) == len(set(shown))
    upper, under = figure.layout.yaxis.domain, figure.layout.yaxis2.domain
    assert upper[0] > under[1]


def test_an_unpaced_cpu_run_claims_no_speed_up():
    slow, fast = made(SIX, SIX_STEPS, provenance=Provenance.CPU), made(SIX[:2], ((0, 5, 0, 14),))
    texts = [one.text for one in compare_timeline(slow, fast).layout.annotations]
    assert not any("sooner" in text for text in texts)


def test_two_big_traces_together_stay_within_the_limit():
    trace = made(many(40_000))
    assert all_bars(compare_timeline(trace, trace)) <= MAX_BARS


def test_a_comparison_of_many_ranks_shows_whole_ranks_and_says_so():
    trace = made([span(0, 1, kind, rank=r, lane=i) for r in range(6) for i, kind in enumerate(("compute", "h2d"))])
    figure = compare_timeline(trace, trace)
    assert len(figure.layout.yaxis.ticktext) == 8  # 4 ranks × 2 lanes
    assert "4 of 6 ranks shown" in note(figure)
    assert len(compare_timeline(trace, trace, ranks=range(6)).layout.yaxis.ticktext) == 12


# --- the palette


def _linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def _contrast(a: str, b: str) -> float:
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05)."""
    light, dark = sorted(
        (sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), _linear(x), strict=True)) for x in (a, b)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_measured_right():
    assert _contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_style_whose_text_reads(kind: Kind):
    style = KIND_STYLES[kind]
    assert kind in PAINT_ORDER
    assert _contrast(style.ink, style.fill) >= 4.5


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
MAIN_KINDS = ("compute", "all_gather", "reduce_scatter", "all_reduce", "h2d", "d2h", "optimizer", "wait")


def _lab(rgb: Sequence[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB under D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(w * c for w, c in zip(row, rgb, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if (t := max(v, 0) / white) > 0.008856 else 7.787 * t + 16 / 116
        for v, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def _difference(a: str, b: str, deficiency: str) -> float:
    seen = [
        _lab([sum(w * c for w, c in zip(row, _linear(colour), strict=True)) for row in DEFICIENCIES[deficiency]])
        for colour in (a, b)
    ]
    return sum((p - q) ** 2 for p, q in zip(*seen, strict=True)) ** 0.5


@pytest.mark.parametrize("deficiency", list(DEFICIENCIES))
def test_the_main_kinds_are_told_apart_by_every_eye(deficiency: str):
    pairs = [(a, b) for i, a in enumerate(MAIN_KINDS) for b in MAIN_KINDS[i + 1 :]]
    closest = min(
        (_difference(KIND_STYLES[Kind(a)].fill, KIND_STYLES[Kind(b)].fill, deficiency), a, b) for a, b in pairs
    )
    assert closest[0] > 12, closest


def test_a_red_and_green_that_a_deutan_confuses_would_be_found():
    assert _difference("#c0392b", "#7d7a1e", "deutan") < 12 < _difference("#c0392b", "#7d7a1e", "none")
