"""What recording costs: step time with capture over step time without, paired, medians.

    python benchmarks/capture_overhead.py [--pairs 5] [--preset tiny] [--set key=value …]

Prints one JSON object a line: each pair, then the summary. Runs alternate which comes first, so that a machine
that slows down favours neither.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import fsdpviz
from fsdpviz.experiment import Capture, Experiment, Steps

WITHOUT = Capture(trace=False, flight_recorder=False, memory=False)


def step_ms(experiment: Experiment, out: Path) -> float:
    measured = fsdpviz.run(experiment, out=out, progress=False).report().measures.step_ms
    assert measured is not None  # every run has metrics
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    settings = dict(setting.split("=", 1) for setting in arguments.set)
    base = fsdpviz.preset(arguments.preset).with_settings(settings).replace(steps=Steps(warmup=3, measured=10))
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(arguments.pairs):
            order = [("with", base), ("without", base.replace(capture=WITHOUT))]
            ms = {
                name: step_ms(experiment, Path(folder) / f"{name}-{pair}")
                for name, experiment in (order if pair % 2 else reversed(order))
            }
            ratios.append(ms["with"] / ms["without"])
            print(json.dumps({"pair": pair, "step_ms": ms, "ratio": round(ratios[-1], 3)}), flush=True)
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    summary = {"benchmark": "capture_overhead", "preset": arguments.preset, "median_ratio": round(median(ratios), 3)}
    print(json.dumps(summary | {"range": spread, "pairs": arguments.pairs}))


if __name__ == "__main__":
    main()
