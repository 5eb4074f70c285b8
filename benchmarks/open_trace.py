"""Opens each trace with fsdpviz and with HolisticTraceAnalysis in turn, in fresh processes, and prints one JSON line a
file: megabytes of JSON, seconds, peak memory above the import, and the ratios.

    python benchmarks/open_trace.py ../shared/traces/kineto/*.json.gz --environment ~/.cache/fsdpviz-benchmark

HolisticTraceAnalysis (its current release) is installed into an environment of its own, below ``--environment``, when
it is not there yet. ``--cached`` also opens each file from fsdpviz's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

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
spans = open_it(sys.argv[1])
seconds = time.perf_counter() - begun
print(json.dumps({"seconds": seconds, "peak_mb": (memory()["VmHWM"] - before) / 1e6, "spans": spans}))
"""
_OURS = (
    "from fsdpviz.trace import open_trace\ndef open_it(path): return len(open_trace(path, cache=%r).spans)\n" + _MEASURE
)
_PEER = (
    "import logging; logging.disable(logging.CRITICAL)\n"
    "from hta.trace_analysis import TraceAnalysis\n"
    "def open_it(path): return len(TraceAnalysis(trace_files={0: path}, trace_dir='').t.get_trace(0))\n" + _MEASURE
)


def peer_python(folder: Path) -> Path:
    """The interpreter of an environment that has HolisticTraceAnalysis; made where it is missing."""
    place = folder / "hta"
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists() or subprocess.run([python, "-c", "import hta"], capture_output=True).returncode:
        venv.create(place, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "HolisticTraceAnalysis"], check=True)
    return python


def measured(python: Path | str, code: str, path: Path, cache_folder: str) -> dict[str, Any] | str:
    """One run's figures, or the last line of its error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache_folder}
    ran = subprocess.run([python, "-c", code, path], capture_output=True, text=True, env=environment)
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or ["failed"])[-1][:200]
    return json.loads(ran.stdout.strip().splitlines()[-1])


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
    """The line of one file. The two take turns, so that whatever else the machine does falls on both."""
    mb = json_mb(path)
    runs: dict[str, list[dict[str, Any] | str]] = {"fsdpviz": [], "hta": [], "cached": []}
    with tempfile.TemporaryDirectory() as cache_folder:
        for _ in range(times if mb < SMALL_MB else 1):
            runs["fsdpviz"].append(measured(sys.executable, _OURS % False, path, cache_folder))
            runs["hta"].append(measured(peer, _PEER, path, cache_folder))
        if is_cached:
            measured(sys.executable, _OURS % True, path, cache_folder)
            runs["cached"] = [measured(sys.executable, _OURS % True, path, cache_folder) for _ in range(times)]
    line: dict[str, Any] = {"file": path.name, "mb": round(mb, 2)}
    line |= {name: middle(found) for name, found in runs.items() if found}
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
    for path in given.files:
        print(json.dumps(compared(path.resolve(), peer, given.times, given.cached)), flush=True)


if __name__ == "__main__":
    main()
