"""The command line: ``fsdpviz demo | run | open | compare | doctor``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .base.errors import FsdpvizError

app = typer.Typer(
    help="See sharded training: run FSDP on real ranks and look at its timeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path | None, typer.Option("--out", help="Run folder; a new one under runs/ when not given.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write an offline page.")]


@app.command()
def demo(out: Annotated[Path, typer.Option("--out", help="Where the page goes.")] = Path("demo")) -> None:
    """FSDP2 without and with prefetch on two ranks: a page, a summary and a table."""
    from .lab.demo import run_demo

    made = run_demo(out)
    print(made.ab.report())
    print(f"\npage     {made.page}\nsummary  {made.summary}")


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="FILE|PRESET", help="An experiment's JSON file, or a preset's name.")],
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
    out: Out = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in --out.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds until a run counts as stuck.")] = 600.0,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes; start this command on each.")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", help="This node, from 0.")] = 0,
    rendezvous: Annotated[str, typer.Option("--rendezvous", help="host:port of node 0, for several nodes.")] = "",
) -> None:
    """Run an experiment on real ranks and print its report."""
    from .lab.run import run as run_experiment

    experiment = _stated(what).with_settings(_pairs(settings or []))
    recording = run_experiment(
        experiment,
        out=out,
        overwrite=overwrite,
        timeout_s=timeout_s,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )
    print(recording.report())
    print(f"\nrun folder  {recording.folder.path if recording.folder else ''}")


@app.command("open")
def open_(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH…", help="Traces, a glob, a folder or archive of them, or a run folder."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what is in it as JSON.")] = False,
    html: Html = None,
) -> None:
    """Open a recording and print its report."""
    from .lab.recording import open as open_recording

    started = time.perf_counter()
    recording = open_recording(paths[0] if len(paths) == 1 else list(paths))
    load_s = time.perf_counter() - started
    if as_json:
        print(json.dumps(_described(recording, load_s), ensure_ascii=False))
    else:
        print(recording.report())
    if html is not None:
        _write_page(html, recording)


@app.command()
def compare(a: Path, b: Path, html: Html = None) -> None:
    """Two recordings side by side: A, B, and B over A."""
    from .lab.ab import compare as compare_recordings

    ab = compare_recordings(a, b)
    print(ab.report())
    if html is not None:
        from .lab.demo import write_ab_page

        print(f"\npage  {write_ab_page(html, ab, title=f'{ab.a.name} and {ab.b.name}')}")


@app.command()
def doctor() -> None:
    """Versions, devices, backends, ports and memory: what will work, what won't, and the mend."""
    from .lab.doctor import State, examine

    findings = examine()
    table = Table("", "state", "what there is", "mend", box=None, pad_edge=False)
    colours = {State.OK: "green", State.LIMITED: "yellow", State.BROKEN: "red"}
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.subject, state, finding.detail, finding.mend)
    Console().print(table)
    if any(finding.state is State.BROKEN for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """The entry point: an error for users is one line on stderr and exit code 1; Ctrl-C is exit code 130."""
    try:
        app()
    except FsdpvizError as error:
        print(f"fsdpviz: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("fsdpviz: stopped", file=sys.stderr)
        sys.exit(130)


def _stated(what: str) -> Any:
    """The experiment in a file, or the preset of that name."""
    from .experiment import PRESETS, Experiment, preset

    is_file = what not in PRESETS and (Path(what).suffix == ".json" or Path(what).exists())
    return Experiment.load(what) if is_file else preset(what)


def _pairs(settings: list[str]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for key, separator, _ in pairs:
        if not key or not separator:
            raise FsdpvizError(f"--set takes key=value, such as prefetch.forward=2; got {key!r}")
    return {key: value for key, _, value in pairs}


def _described(recording: Any, load_s: float) -> dict[str, Any]:
    """What ``open --json`` prints."""
    import polars as pl

    kinds = recording.spans.group_by("kind").agg(count=pl.len(), ns=pl.col("duration_ns").sum()).sort("kind")
    report = recording.report().to_dict()
    return {
        "ranks": recording.ranks,
        "spans": len(recording.spans),
        "steps": recording.steps["step"].unique().sort().to_list(),
        "provenance": recording.provenance.value,
        "kinds": {str(row["kind"]): {"count": row["count"], "ns": row["ns"]} for row in kinds.to_dicts()},
        "notes": [str(note) for note in recording.notes],
        "load_s": round(load_s, 4),
        "breakdown": report["breakdown"],
    }


def _write_page(path: Path, recording: Any) -> None:
    from .view import Section, write_page

    sections = [Section("Timeline", recording.timeline()), Section("Report", recording.report())]
    print(f"\npage  {write_page(path, recording.name, sections, provenance=[recording.provenance])}")


if __name__ == "__main__":
    main()
