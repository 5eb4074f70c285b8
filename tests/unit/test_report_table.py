"""Tables of reports whose numbers are worked out by hand, and the page that holds them."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from pathlib import Path

import plotly.graph_objects as go
import pytest

from fsdpviz.analysis.breakdown import StepBreakdown
from fsdpviz.analysis.compare import Comparison, Traffic
from fsdpviz.analysis.report import Measures, Report
from fsdpviz.base.errors import FsdpvizError
from fsdpviz.base.provenance import Provenance
from fsdpviz.trace.table import Note
from fsdpviz.view import ComparisonTable, Highlight, ReportTable, Section, SettingsTable, write_page
from fsdpviz.view.page import page
from fsdpviz.view.table_format import BADGE_COLOURS, Table

MS = 1_000_000
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"

# compute 60 + exposed communication 20 + exposed copies 5 + idle 15 = span 100; half of the 40 is hidden
ROW = StepBreakdown(
    rank=0,
    step=3,
    span_ns=100 * MS,
    compute_ns=60 * MS,
    comm_ns=40 * MS,
    exposed_comm_ns=20 * MS,
    copy_ns=10 * MS,
    exposed_copy_ns=5 * MS,
    idle_ns=15 * MS,
    overlap_frac=0.5,
)
MEASURES = Measures(
    step_ms=100.0,
    samples_per_s=80.0,
    peak_device_bytes=None,
    peak_host_bytes=3 * 2**30,
    all_gather_ms=25.0,
    h2d_ms=0.0,
    d2h_ms=1.5,
)


def report(*rows: StepBreakdown, note: str = "") -> Report:
    notes = (Note(note, 1),) if note else ()
    return Report(rows, MEASURES, Provenance.CPU_EMULATED_LINKS, notes)


def row(**changes: int | float | None) -> StepBreakdown:
    return dataclasses.replace(ROW, **changes)  # pyright: ignore[reportArgumentType]


def test_text_has_badge_headline_and_every_number_with_its_unit():
    text = str(ReportTable(report(ROW)))
    first = text.splitlines()[0]
    assert first == (
        "[cpu + emulated links] step 100 ms · exposed communication 20 ms (20.0 % of the step) · "
        "50.0 % of communication hidden · 80.0 samples/s"
    )
    line = next(line for line in text.splitlines() if line.startswith("rank 0, step 3"))
    shown = re.split(r"  +", line)
    times = ["100.00 ms", "60.00 ms", "40.00 ms", "20.00 ms", "10.00 ms", "5.00 ms", "15.00 ms"]
    assert shown == ["rank 0, step 3", *times, "50.0 %"]
    assert re.search(r"peak host memory +3 GiB", text)


def test_columns_are_aligned():
    lines = str(ReportTable(report(ROW, row(rank=11, span_ns=123_456 * MS)))).splitlines()
    table = [line for line in lines if line.startswith(("rank", "──────────────"))][:3]
    assert len({len(line) for line in table}) == 1


def test_unknown_is_not_zero():
    text = str(ReportTable(report(row(overlap_frac=None, comm_ns=0, exposed_comm_ns=0))))
    assert re.search(r"peak device memory +–", text)
    assert re.search(r"host → device copies a step +0 ms", text)
    assert "hidden ·" not in text.splitlines()[0]
    assert re.search(r"rank 0, step 3 .* –$", text, re.MULTILINE)


def test_a_recording_without_steps_or_without_work():
    assert "rank 0  " in str(ReportTable(report(row(step=None))))
    assert "no work was recorded" in str(ReportTable(report()))
    assert "no work was recorded" in ReportTable(report())._repr_html_()


def test_long_reports_say_how_many_rows_they_leave_out():
    table = ReportTable(report(*(row(step=step) for step in range(40))))
    assert "8 more rows" in str(table) and "8 more rows" in table._repr_html_()
    assert table.frame().height == 40


def test_numbers_pass_through():
    table = ReportTable(report(ROW))
    assert table.frame()["exposed_comm_ns"].to_list() == [20 * MS]
    assert json.loads(table.json()) == json.loads(json.dumps(table.to_dict()))
    assert json.loads(table.json())["breakdown"][0]["overlap_frac"] == 0.5


def test_notes_are_shown_and_escaped():
    table = ReportTable(report(ROW, note=HOSTILE))
    assert HOSTILE in str(table)
    html = table._repr_html_()
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html


def test_html_has_badge_and_needs_nothing_from_outside():
    html = ReportTable(report(ROW))._repr_html_()
    assert "cpu + emulated links" in html
    assert not re.search(r"https?:|src=|url\(|@import", html)
    # text and lines take the notebook's own colours, so that a dark theme stays readable
    style = html[html.index("<style>") : html.index("</style>")]
    assert "color:inherit" in style and not re.search(r"[^-]color:#|background:#", style)


def test_every_provenance_has_a_badge():
    assert set(BADGE_COLOURS) == set(Provenance)


def comparison(loss: float | None = 0.0) -> Comparison:
    return Comparison(
        a=report(ROW),
        b=report(row(span_ns=85 * MS, exposed_comm_ns=5 * MS, overlap_frac=0.875)),
        ratios={"span_ms": 0.85, "exposed_comm_ms": 0.25, "copy_ms": None},
        max_loss_difference=loss,
        all_gathers_a=Traffic(16.0, 4e6),
        all_gathers_b=Traffic(16.0, None),
    )


def test_comparison_has_both_and_the_ratio_of_the_second_to_the_first():
    text = str(ComparisonTable(comparison(), ("without", "with")))
    assert "exposed communication a step 20 ms → 5 ms (× 0.25) · step 100 ms → 85 ms" in text
    assert re.search(r"exposed communication +20 ms +5 ms +0\.25$", text, re.MULTILINE)
    assert re.search(r"all-gathers a step +16 +16 +1\.00$", text, re.MULTILINE)
    assert re.search(r"all-gathered a step +4 MB +– +–$", text, re.MULTILINE)
    assert re.search(r"copies +10 ms +10 ms +–$", text, re.MULTILINE)
    assert "losses are equal, bit for bit" in text


def test_comparison_tells_losses_that_differ_from_unknown_ones():
    assert "losses differ by at most 1e-06" in str(ComparisonTable(comparison(1e-6)))
    assert "losses" not in str(ComparisonTable(comparison(None)))


def test_comparison_passes_numbers_through_and_escapes_names():
    table = ComparisonTable(comparison(), (HOSTILE, "b"))
    rows = {row[0]: row[1:] for row in table.frame().iter_rows()}
    assert rows["exposed_comm_ms"] == (20.0, 5.0, 0.25)
    assert json.loads(table.json())["ratios"]["span_ms"] == 0.85
    assert "<script" not in table._repr_html_()


def test_a_table_of_no_rows_is_its_header():
    assert Table(("a", "b"), ()).text() == "a  b\n─  ─"


# --- the page


def test_differing_settings_stand_first_and_equal_ones_are_folded():
    html = SettingsTable(
        ("a", "b"),
        ({"engine": "fsdp2", "prefetch": {"forward": 0}}, {"engine": "fsdp2", "prefetch": {"forward": 1}}),
    )._repr_html_()
    before, after = html.split("<details>")
    assert "prefetch.forward" in before and "engine" not in before
    assert "engine" in after and "1 equal setting<" in after


def test_a_setting_that_only_one_run_has_differs():
    html = SettingsTable(("a", "b"), ({"links": None}, {"links": {"gbps": 1}}))._repr_html_()
    assert html.count("class=differs") == 2  # links in one, links.gbps in the other
    assert "All settings are equal" in SettingsTable(("a", "b"), ({"x": 1}, {"x": 1}))._repr_html_()


def test_a_page_escapes_every_string_and_asks_for_nothing():
    figure = go.Figure(go.Bar(x=[1], name="</script><script>alert(1)</script>"))
    text = page(
        HOSTILE,
        [Section(HOSTILE, figure, HOSTILE), Section("b", SettingsTable((HOSTILE,), [{HOSTILE: HOSTILE}]))],
        lead=HOSTILE,
        provenance=[Provenance.CPU],
        highlights=[Highlight(HOSTILE, HOSTILE, HOSTILE)],
    )
    assert HOSTILE not in text and "<img src=x" not in text
    assert "</script><script>alert" not in text
    assert "default-src 'none'" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<[^>]*(src|href)\s*=|@import|url\(", markup)


def test_plotly_is_inside_once_and_only_where_there_is_a_figure():
    figure = go.Figure(go.Bar(x=[1]))
    assert page("t", [Section("a", figure), Section("b", figure)]).count("plotly.js v") == 1
    assert len(page("t", [Section("a", ReportTable(report(ROW)))])) < 50_000


def test_writing_replaces_the_page_whole(tmp_path: Path):
    path = tmp_path / "new" / "index.html"
    assert write_page(path, "one", []) == path
    write_page(path, "two", [])
    assert "<title>two</title>" in path.read_text(encoding="utf-8")
    assert [child.name for child in path.parent.iterdir()] == ["index.html"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_keeps_the_old_page_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "index.html"
    write_page(path, "old", [])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FsdpvizError, match="no space left") as caught:
        write_page(path, "new", [])
    assert "\n" not in str(caught.value)
    assert "<title>old</title>" in path.read_text(encoding="utf-8")
    assert [child.name for child in tmp_path.iterdir()] == ["index.html"]


def test_a_page_cannot_be_written_where_a_file_is_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FsdpvizError, match="a page needs a place"):
        write_page(tmp_path / "file" / "index.html", "t", [])
    with pytest.raises(FsdpvizError, match="a page needs a place"):
        write_page(tmp_path, "t", [])
