"""polars' allocator is asked for huge pages before it is loaded, and nobody's own choice is overruled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

VARIABLE = "_RJEM_MALLOC_CONF"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="huge pages of this kind are Linux's")


def _after(code: str, **given: str) -> str:
    """What the variable reads in a fresh process once ``code`` has run; "" where it is not set."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | given
    command = [sys.executable, "-c", f"import os\n{code}\nprint(os.environ.get({VARIABLE!r}, ''))"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_asked_for_before_polars_is_loaded():
    code = "import sys\nimport fsdpviz\nassert 'polars' not in sys.modules\nfrom fsdpviz.trace import open_trace"
    assert "thp:always" in _after(code).split(",")  # polars adds settings of its own


def test_polars_that_is_loaded_already_and_the_users_own_choice_stay_as_they_are():
    assert "thp" not in _after("import polars\nimport fsdpviz")
    assert _after("import fsdpviz", **{VARIABLE: "thp:never"}) == "thp:never"
