"""The demo: FSDP2 without and with prefetch, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..base.errors import RunFolderError
from ..base.provenance import Provenance
from ..base.units import format_payload
from ..experiment.presets import demo, demo_cuda
from ..experiment.run_folder import write_json
from ..view import Highlight, Section, SettingsTable, write_page
from .ab import Ab, compare
from .doctor import gpu_count
from .run import run
from .summary import summaries


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo left: the pair of runs, the page and the summary's file."""

    ab: Ab
    page: Path
    summary: Path


def run_demo(out: Path, *, progress: bool = True) -> Demo:
    """Runs the A/B on two ranks and writes ``index.html``, ``summary.json`` and both run folders under ``out``.

    On two GPUs where there are two, else on CPU with gloo over an emulated link. An earlier demo in ``out`` is
    replaced. Raises what ``run`` raises.
    """
    make = demo_cuda if gpu_count() >= 2 else demo
    (out / "index.html").unlink(missing_ok=True)
    (out / "summary.json").unlink(missing_ok=True)
    without, with_prefetch = (
        run(make(prefetch), out=out / folder, overwrite=True, progress=progress)
        for prefetch, folder in ((False, "prefetch-off"), (True, "prefetch-on"))
    )
    ab = compare(without, with_prefetch)
    write_json(out / "summary.json", summaries([ab.a, ab.b]))
    return Demo(ab, write_ab_page(out / "index.html", ab, title="Prefetch hides all-gathers"), out / "summary.json")


def write_ab_page(path: Path, ab: Ab, *, title: str) -> Path:
    """An offline page with both timelines on one time axis and the report beside them. Raises RunFolderError."""
    if path.is_dir():
        raise RunFolderError(f"a page is a file; {path} is a folder. Use {path / 'index.html'}")
    sections = [
        Section("Both timelines, on one time axis", ab.timeline()),
        Section("The numbers", ab.report()),
        Section(f"{ab.a.name}: every rank and step", ab.a.report()),
        Section(f"{ab.b.name}: every rank and step", ab.b.report()),
    ]
    settings = [side.about.get("experiment") for side in (ab.a, ab.b)]
    if all(settings):
        sections.append(Section("The settings", SettingsTable((ab.a.name, ab.b.name), [s or {} for s in settings])))
    provenance = [ab.a.provenance, ab.b.provenance]
    return write_page(path, title, sections, lead=_lead(ab), provenance=provenance, highlights=_highlights(ab))


def _lead(ab: Ab) -> str:
    ranks = max(len(ab.a.ranks), len(ab.b.ranks))
    what = f"{ab.a.name} against {ab.b.name}, {ranks} ranks each"
    links = _links(ab)
    if Provenance.CPU_EMULATED_LINKS in (ab.a.provenance, ab.b.provenance) and links:
        return (
            f"{what}, run on this machine's CPU. Compute and collectives are real; each transfer is stretched to what "
            f"{links} would take. Judge what is hidden and what is exposed, not the speed."
        )
    return f"{what}. Times are as recorded."


def _links(ab: Ab) -> str:
    link = (ab.b.about.get("experiment", {}).get("links") or {}).get("intra_node")
    return f"a link of {format_payload(link['bandwidth_gbps'] * 1e9)}/s" if link else ""


def _highlights(ab: Ab) -> list[Highlight]:
    """The numbers that the page is about; none where a side has no steps."""
    comparison = ab.comparison
    a, b = comparison.a.mean(), comparison.b.mean()
    if a is None or b is None:
        return []
    gathers = comparison.all_gathers_a, comparison.all_gathers_b
    return [
        Highlight(
            "exposed communication",
            f"{a.exposed_comm_ms:.0f} → {b.exposed_comm_ms:.0f} ms",
            "a step, mean of ranks and steps",
        ),
        Highlight(
            "hidden under compute",
            f"{_percent(a.overlap_frac)} → {_percent(b.overlap_frac)}",
            "of communication",
        ),
        Highlight("step", f"{a.span_ms:.0f} → {b.span_ms:.0f} ms", "as traced"),
        Highlight(
            "all-gathers",
            " → ".join(f"{one.count_per_step:g}" for one in gathers),
            " → ".join(
                "bytes unknown" if one.bytes_per_step is None else format_payload(one.bytes_per_step) for one in gathers
            ),
        ),
    ]


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction:.0%}"
