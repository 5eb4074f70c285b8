"""[Note: huge pages] A table of a million spans is 150 MB of memory that nobody has touched before, and Linux hands it
out 4 KiB at a time, each page zeroed in a fault of its own: that takes longer than decoding what goes into it. In pages
of 2 MB all of it takes half. NumPy asks for them by itself; polars' allocator does when this variable says so before
polars is loaded (which adds its own settings to it), so that ``fsdpviz`` sets it first of all. Where the user has set
it, or loaded polars before, nothing changes; Linux alone has them.
"""

from __future__ import annotations

import os
import sys

_CONFIGURES = "_RJEM_MALLOC_CONF"  # jemalloc, as Rust's libraries prefix it


def ask_for_huge_pages() -> None:
    """Of polars' allocator, in this process and those that it starts; see [Note: huge pages]."""
    if sys.platform == "linux" and "polars" not in sys.modules:
        os.environ.setdefault(_CONFIGURES, "thp:always")
