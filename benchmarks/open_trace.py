"""Opens each trace with fsdpviz and with HolisticTraceAnalysis in turn, in fresh processes, and prints one JSON line a
file: megabytes of JSON, seconds, peak memory above the import, and the ratios. What the import itself takes stands in
the first line.

    python benchmarks/open_trace.py ../shared/traces/kineto/*.json.gz --environment ~/.cache/fsdpviz-benchmark

A folder is opened as the ranks of one run; its memory is that of all processes together. HolisticTraceAnalysis (its
current release) is installed into an environment of its own, below ``--environment``, when it is not there yet.
``--cached`` also opens each file from fsdpviz's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from isal import igzip

ROOT = Path(__file__).resolve().parents[1]
SMALL_MB = 100  # below, the median of several

# both run in a process of their own: import, remember the memory, open, tell
_MEASURE = """
import json, resource, sys, time
def high():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
def memory():
    try:
        with open("/proc/self/status") as file:
            return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Vm")}
    except OSError:
        return {"VmRSS": high(), "VmHWM": high()}
try:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak of the import is none of the reader's
except OSError:
    pass
before, begun = memory()["VmRSS"], time.perf_counter()
spans = open_it(sys.argv[1:])
seconds = time.perf_counter() - begun
found = {"seconds": seconds, "peak_mb": (memory()["VmHWM"] - before) / 1e6, "spans": spans, "import_mb": before / 1e6}
print(json.dumps(found))
"""
_OURS = (
    "from fsdpviz.trace import open_trace\ndef open_it(paths): return len(open_trace(paths, cache=%r).spans)\n"
    + _MEASURE
)
_PEER = (
    "import logging; logging.disable(logging.CRITICAL)\n"
    "from hta.trace_analysis import TraceAnalysis\n"
    "def open_it(paths):\n"
    "    traces = TraceAnalysis(trace_files=dict(enumerate(paths)), trace_dir='').t.get_all_traces()\n"
    "    return sum(map(len, traces.values()))\n" + _MEASURE
)
_IMPORTS = {
    "fsdpviz": "from fsdpviz.trace import open_trace",
    "hta": "from hta.trace_analysis import TraceAnalysis",
}


def peer_python(folder: Path) -> Path:
    """The interpreter of an environment that has HolisticTraceAnalysis; made where it is missing."""
    place = folder / "hta"
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists() or subprocess.run([python, "-c", "import hta"], capture_output=True).returncode:
        venv.create(place, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "HolisticTraceAnalysis", "psutil"], check=True)
    return python


def measured(python: Path | str, code: str, paths: Sequence[Path], cache_folder: str) -> dict[str, Any] | str:
    """One run's figures, or the last line of its error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache_folder}
    command = [str(part) for part in (python, "-c", code, *paths)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        peak = memory_of_all(process) if len(paths) > 1 else 0  # looking costs the process time
        out, errors = process.communicate()
    if process.returncode:
        return (errors.strip().splitlines() or ["failed"])[-1][:200]
    found = json.loads(out.strip().splitlines()[-1])
    import_mb = found.pop("import_mb")
    if peak:
        found["peak_mb"] = peak / 1e6 - import_mb
    return found


def memory_of_all(process: subprocess.Popen) -> int:
    """The most resident bytes that the process and all that it started had together, looked at 20 times a second."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            peak = max(peak, sum(one.memory_info().rss for one in (root, *root.children(recursive=True))))
        time.sleep(0.05)
    return peak


def imported(python: Path | str, code: str) -> dict[str, float]:
    """Seconds and megabytes that an import takes, the better of three."""
    measure = (
        "import json, psutil, time\nown = psutil.Process()\n"
        "before, begun = own.memory_info().rss, time.perf_counter()\n"
        f"{code}\nprint(json.dumps([time.perf_counter() - begun, (own.memory_info().rss - before) / 1e6]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = [
        json.loads(subprocess.run([python, "-c", measure], capture_output=True, text=True, env=environment).stdout)
        for _ in range(3)
    ]
    return dict(zip(("seconds", "mb"), (round(value, 3) for value in min(runs)), strict=True))


def middle(runs: Sequence[dict[str, Any] | str]) -> dict[str, Any] | str:
    good = [run for run in runs if not isinstance(run, str)]
    if len(good) < len(runs):
        return next(run for run in runs if isinstance(run, str))
    return {key: round(median(run[key] for run in good), 4) for key in good[0]}


def json_mb(path: Path) -> float:
    size = 0
    with igzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while block := file.read(1 << 20):
            size += len(block)
    return size / 1e6


def compared(path: Path, peer: Path, times: int, is_cached: bool) -> dict[str, Any]:
    """The line of one file or folder. The two take turns, so that whatever else the machine does falls on both."""
    paths = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    mb = sum(json_mb(file) for file in paths)
    runs: dict[str, list[dict[str, Any] | str]] = {"fsdpviz": [], "hta": [], "cached": []}
    with tempfile.TemporaryDirectory() as cache_folder:
        for _ in range(times if mb < SMALL_MB else 1):
            runs["fsdpviz"].append(measured(sys.executable, _OURS % False, paths, cache_folder))
            runs["hta"].append(measured(peer, _PEER, paths, cache_folder))
        if is_cached:
            measured(sys.executable, _OURS % True, paths, cache_folder)
            runs["cached"] = [measured(sys.executable, _OURS % True, paths, cache_folder) for _ in range(times)]
    line: dict[str, Any] = {"file": path.name, "mb": round(mb, 2)}
    line |= {name: middle(found) for name, found in runs.items() if found}
    if isinstance(line.get("cached"), dict):
        line["cached_ms_per_million"] = round(line["cached"]["seconds"] * 1e9 / line["cached"]["spans"], 1)
    ours, theirs = line["fsdpviz"], line["hta"]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        line["times_faster"] = round(theirs["seconds"] / ours["seconds"], 1)
        line["memory_frac"] = round(ours["peak_mb"] / theirs["peak_mb"], 2) if theirs["peak_mb"] else None
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--environment", type=Path, required=True, help="folder for the peer's environment")
    parser.add_argument("--times", type=int, default=5, help="runs of a file under 100 MB, of which the median counts")
    parser.add_argument("--cached", action="store_true", help="also open from the cache")
    given = parser.parse_args()
    peer = peer_python(given.environment.expanduser())
    pythons = {"fsdpviz": sys.executable, "hta": peer}
    print(json.dumps({"import": {name: imported(pythons[name], code) for name, code in _IMPORTS.items()}}), flush=True)
    for path in given.files:
        print(json.dumps(compared(path.resolve(), peer, given.times, given.cached)), flush=True)


if __name__ == "__main__":
    main()
