"""What docs/glassbox.md names is there: every ``file.py:Class.function``, and the recording."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "glassbox.md").read_text()
BOX = ROOT / "fsdpviz" / "engine" / "glassbox"
NAMED = re.compile(r"`(\w+\.py):([\w.]+)`")


def defined(file: str) -> set[str]:
    """Names of functions, classes, and ``Class.method`` that the file defines."""
    path = ROOT / "fsdpviz" / file if file == "schedule.py" else BOX / file
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED.findall(TEXT))))
def test_what_the_walk_names_is_defined(file: str, name: str) -> None:
    assert name in defined(file)


def test_the_walk_ties_each_sentence_to_code() -> None:
    walk = TEXT.split("## One step, recorded")[1].split("\n## ")[0]
    steps = re.split(r"\n\d+\. ", walk)[1:]
    assert len(steps) == 9
    assert all(NAMED.search(step) for step in steps)


def test_a_name_that_is_gone_is_found() -> None:
    # the companion
    assert "Unit.gather" in defined("unit.py")
    assert "Unit.all_gather_now" not in defined("unit.py")


def test_every_file_is_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in BOX.glob("*.py")}
    assert len(lengths) > 15
    assert max(lengths.values()) <= 300, lengths


def test_the_picture_is_a_recording_of_the_lanes() -> None:
    picture = (ROOT / "docs" / "images" / "glassbox_step.svg").read_text()
    assert "cpu + emulated links" in picture
    for lane in ("compute", "H2D stream", "gather stream", "reduce stream", "D2H stream", "optimizer stream"):
        assert f">{lane}</text>" in picture
    for unit_copied in range(4):
        assert re.search(rf"<title>fsdpviz::d2h \([^)]*{unit_copied}\), bytes = \d+", picture)
