from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars  # noqa: F401  # sets an environment variable of its own when it is first imported
import pytest
from leftovers import Snapshot


@pytest.fixture
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Fails the test that leaves something behind; a run counts when its folder is below ``tmp_path``."""
    before = Snapshot.take()
    yield
    left = before.leftovers(tmp_path)
    assert not left, f"left behind: {'; '.join(left)}"
