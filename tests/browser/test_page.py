"""The page in a real Chromium, opened from the disk, with no network asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fsdpviz.analysis.compare import compare
from fsdpviz.base.provenance import Provenance
from fsdpviz.trace.table import LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Trace
from fsdpviz.view import ComparisonTable, ReportTable, Section, compare_timeline, timeline, write_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

MS = 1_000_000
IMG = "<img src=x onerror=alert(1)>"
SCRIPT = "</script><script>alert(2)</script>"
LINK = '<a href="javascript:alert(3)">click</a>'
ENTITY = "&lt;i&gt; &quot;&#x41; 'quoted'"
TEMPLATE = "%{x} ${y} $\\alpha$ `z`"


def made(gather_ms: int, name: str = "aten::linear", unit: str = "layers.{}") -> Trace:
    """Eight units forward on one rank, each a gather of ``gather_ms`` and then 10 ms of compute."""
    rows = []
    time_ns = 0
    for index in range(8):
        known = {"rank": 0, "unit": unit.replace("{}", str(index)), "phase": "forward", "step": 1, "depth": 0}
        gather = {"lane": 1, "kind": "all_gather", "start_ns": time_ns, "duration_ns": gather_ms * MS}
        time_ns += gather_ms * MS
        compute = {"lane": 0, "kind": "compute", "start_ns": time_ns, "duration_ns": 10 * MS}
        time_ns += 10 * MS
        rows += [{**dict.fromkeys(SPAN_SCHEMA), "name": name, **known, **span} for span in (gather, compute)]
    lanes = [(0, index, lane, False, "1", str(index), index) for index, lane in enumerate(("main thread", "link"))]
    return Trace(
        pl.DataFrame(rows, schema=SPAN_SCHEMA),
        pl.DataFrame(lanes, schema=LANE_SCHEMA, orient="row"),
        pl.DataFrame([(0, 1, 0, time_ns)], schema=STEP_SCHEMA, orient="row"),
        Provenance.CPU_EMULATED_LINKS,
    )


@dataclass
class Opened:
    """A page with all that it said and asked for while it was open."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelectorAll('.js-plotly-plot .points path').length > 0")

    def hover(self, trace: str, point: int) -> str:
        """The text that appears when the pointer rests on a bar."""
        box = self.page.evaluate(
            """([name, point]) => {
                const figure = document.querySelector('.js-plotly-plot');
                const index = figure._fullData.findIndex((one) => one.name === name && one.type === 'bar');
                const bars = [...figure.querySelectorAll('.barlayer .trace')]
                    .find((group) => group.__data__[0].trace.index === index);
                const box = bars.querySelectorAll('.point path')[point].getBoundingClientRect();
                return [box.x + box.width / 2, box.y + box.height / 2];
            }""",
            [trace, point],
        )
        self.page.mouse.move(*box)
        self.page.wait_for_selector(".hoverlayer .hovertext")
        return self.page.text_content(".hoverlayer .hovertext")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    watch = Opened(page)

    def dialog(box: Any) -> None:
        watch.dialogs.append(box.message)
        box.dismiss()

    page.on("console", lambda message: watch.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: watch.said.append(f"error: {error}"))
    page.on("request", lambda request: watch.asked.append(request.url))
    page.on("dialog", dialog)
    yield watch
    page.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a, b = made(8), made(2)
    both = compare(a, b)
    return write_page(
        tmp_path_factory.mktemp("page") / "index.html",
        "Slow and quick gathers",
        [
            Section("Timelines", compare_timeline(a, b, names=("slow", "quick"))),
            Section("Numbers", ComparisonTable(both, ("slow", "quick"))),
            Section("Slow", ReportTable(both.a)),
        ],
        provenance=[a.provenance],
    )


def test_opens_from_the_disk_without_a_word_or_a_request(opened: Opened, demo: Path):
    opened.open(demo)
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_the_watch_on_requests_and_errors_can_fail(opened: Opened, tmp_path: Path):
    path = tmp_path / "loud.html"
    path.write_text("<script>console.error('x'); fetch('http://127.0.0.1:9/').catch(() => 0); alert(1)</script>")
    opened.page.goto(path.as_uri())
    opened.page.wait_for_timeout(200)
    assert "error: x" in opened.said
    assert "http://127.0.0.1:9/" in opened.asked
    assert opened.dialogs == ["1"]


def test_the_policy_stops_what_would_be_fetched(opened: Opened, demo: Path):
    opened.open(demo)
    refused = opened.page.evaluate("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
    assert refused
    assert any("Content Security Policy" in line for line in opened.said)


def test_all_bars_are_drawn_with_units_on_them(opened: Opened, demo: Path):
    opened.open(demo)
    # 2 traces × 8 units × (gather, compute), and a phase strip each
    bars = "[...document.querySelectorAll('.barlayer .point path')]"
    widths = opened.page.evaluate(f"{bars}.map((bar) => bar.getBoundingClientRect().width)")
    assert len(widths) == 2 * 16 + 2
    assert min(widths) > 1
    labels = opened.page.evaluate(
        "[...document.querySelectorAll('.barlayer .bartext')]"
        ".filter((text) => text.getAttribute('style').includes('display: none') === false)"
        ".map((text) => text.textContent)"
    )
    assert "layers.7" in labels
    body = opened.page.text_content("body")
    assert "cpu + emulated links" in body and "exposed communication" in body


def test_hover_shows_unit_kind_and_times(opened: Opened, demo: Path):
    opened.open(demo)
    text = opened.hover("all-gather", 3)
    # gather 3 starts after three rounds of 8 + 10 ms
    for fact in ("all-gather · layers.3", "start 54.000 ms", "duration 8 ms", "forward", "rank 0", "link"):
        assert fact in text


def test_no_button_uploads_the_chart(opened: Opened, demo: Path):
    opened.open(demo)
    titles = opened.page.evaluate("[...document.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title)")
    assert titles and not [title for title in titles if title and "Share" in title]


@pytest.mark.parametrize("hostile", [IMG, SCRIPT, LINK, ENTITY, TEMPLATE])
def test_markup_in_names_is_shown_and_does_nothing(opened: Opened, tmp_path: Path, hostile: str):
    trace = made(8, name=hostile, unit=hostile)
    path = write_page(tmp_path / "index.html", hostile, [Section(hostile, timeline(trace, title=hostile), hostile)])
    opened.open(path)
    assert hostile in opened.hover("compute", 2)
    assert opened.page.text_content("h1") == hostile
    opened.page.wait_for_timeout(200)
    assert opened.dialogs == [] and opened.said == []
    assert opened.page.evaluate("document.querySelectorAll('img[src=x], svg a').length") == 0


def test_fits_a_small_screen_without_scrolling_sideways(opened: Opened, demo: Path):
    opened.page.set_viewport_size({"width": 700, "height": 800})
    opened.open(demo)
    opened.page.wait_for_timeout(300)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 700


def test_prints_with_figures_as_wide_as_the_paper(opened: Opened, demo: Path):
    opened.page.set_viewport_size({"width": 1900, "height": 1000})
    opened.open(demo)
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    width = "document.querySelector('.js-plotly-plot .main-svg').getBoundingClientRect().width"
    opened.page.wait_for_function(f"{width} === 1020")
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.page.wait_for_function(f"{width} > 1200")
