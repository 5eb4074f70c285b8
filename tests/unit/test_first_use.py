"""The files that importing the reader opens: see opener's [Note: first use]."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdpviz
from fsdpviz.trace import open_trace

PACKAGE = Path(fsdpviz.__file__).parent
FOLDER = PACKAGE / "trace" / "reading" / "first_use"
WORK = {"cuda": ["compute"], "nccl": ["all_gather", "compute", "h2d"], "gloo": ["compute", "compute", "all_gather"]}


@pytest.mark.parametrize(("kind", "work"), WORK.items())
def test_each_kind_of_recording_is_there_and_opens(kind, work):
    trace = open_trace(FOLDER / f"{kind}.json", cache=False)
    assert [kind for kind in trace.spans["kind"] if kind not in ("host", "annotation")] == work
    assert trace.steps["step"].to_list() == [1]


def test_no_other_file_is_there():
    assert {file.stem for file in FOLDER.iterdir()} == WORK.keys()


def test_an_installation_without_them_opens_traces(tmp_path):
    ignored = shutil.ignore_patterns("first_use", "__pycache__", "*.c")
    shutil.copytree(PACKAGE, tmp_path / "fsdpviz", ignore=ignored)
    code = "import sys, fsdpviz.trace as trace; print(trace.__file__, len(trace.open_trace(sys.argv[1]).spans))"
    command = [sys.executable, "-c", code, str(FOLDER / "cuda.json")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == [str(tmp_path / "fsdpviz" / "trace" / "__init__.py"), "4"], done.stderr
