from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import polars  # noqa: F401  # sets an environment variable of its own when it is first imported
import pytest
from hypothesis import HealthCheck, settings
from leftovers import Snapshot

# a busy machine is no fault of the code; what CI finds anew each time is for developers to look for at leisure
settings.register_profile("fsdpviz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("fsdpviz"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "fsdpviz")


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests open is not kept among what the user opens."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["XDG_CACHE_HOME"]
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Fails the test that leaves something behind; a run counts when its folder is below ``tmp_path``."""
    before = Snapshot.take()
    yield
    left = before.leftovers(tmp_path)
    assert not left, f"left behind: {'; '.join(left)}"
