"""What a rank does to be stoppable from outside, even while it is stuck in a collective."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from ..experiment.run_folder import RankFolder, RunFolder
from .processes import die_with_parent, is_alive
from .supervisor import SUPERVISOR_VARIABLE

WATCH_S = 0.2
ORPHAN_EXIT_CODE = 86


def start_watch(folder: RunFolder, rank: int, on_stop: Callable[[], None]) -> None:
    """Call it first thing in a rank; it starts a daemon thread and returns.

    The rank ends at once when its supervisor is gone. When ``folder.stop_request`` appears, all threads'
    Python stacks go to the rank's ``stacks.txt`` and ``on_stop`` is called in a thread of its own, both once.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)  # missing under a torchrun that we did not start
    if supervisor:
        die_with_parent()

    def watch() -> None:
        asked = False
        while supervisor is None or is_alive(supervisor):
            if not asked and folder.stop_request.exists():
                asked = True
                write_stacks(folder.rank(rank))
                # apart, since a dump that hangs must not end the watch
                threading.Thread(target=on_stop, name="stop request", daemon=True).start()
            time.sleep(WATCH_S)
        os._exit(ORPHAN_EXIT_CODE)

    threading.Thread(target=watch, name="supervisor watch", daemon=True).start()


def write_stacks(folder: RankFolder) -> None:
    """Writes the Python stack of each thread but the calling one, whole or not at all."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    folder.path.mkdir(parents=True, exist_ok=True)
    temporary = folder.stacks.with_name(f".{folder.stacks.name}")
    temporary.write_text("\n".join(parts), encoding="utf-8")
    temporary.replace(folder.stacks)
