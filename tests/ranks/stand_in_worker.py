"""A worker that keeps the contract of fsdpviz.launch.worker and trains nothing; STAND_IN says how it ends.

    python -m torch.distributed.run … stand_in_worker.py <run folder>

It imports torch only for the modes that need a collective, so that most tests are fast.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fsdpviz.base.errors import ExperimentError
from fsdpviz.experiment.run_folder import RunFolder, write_json
from fsdpviz.launch.watch import start_watch

FOREVER_S = 600.0
RANK = int(os.environ["RANK"])
FOLDER = RunFolder(Path(sys.argv[-1]))
OWN = FOLDER.rank(RANK)


def main() -> None:
    log = os.open(OWN.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    start_watch(FOLDER, RANK, on_stop=dump)
    try:
        say("starting")
        say("building")
        mode = os.environ.get("STAND_IN", "ok")
        MODES[mode]()
        say("done")
    except Exception as error:  # noqa: BLE001, the process boundary
        write_json(
            OWN.error,
            {
                "rank": RANK,
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "time": time.time(),
                "is_user_error": isinstance(error, ExperimentError),
            },
        )
        if os.environ.get("STAND_IN_LINGER"):
            time.sleep(FOREVER_S)  # a teardown that hangs after the error was written
        sys.exit(1)


def say(stage: str, **more: object) -> None:
    with OWN.status.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "stage": stage, **more}) + "\n")


def dump() -> None:
    if "torch" in sys.modules:
        from torch._C import _distributed_c10d as c10d

        temporary = OWN.flight.with_suffix(".part")
        temporary.write_bytes(c10d._dump_fr_trace_json())  # pyright: ignore[reportAttributeAccessIssue]
        temporary.replace(OWN.flight)


def ok() -> None:
    for step in range(1, 4):
        say("step", step=step, steps=3, loss=1 / step)


def raise_on_1() -> None:
    if RANK == 1:
        sys.stdout.write("the last words of rank 1\n")
        sys.stdout.flush()
        raise ZeroDivisionError("the loss is gone")
    time.sleep(FOREVER_S)


def refuse() -> None:
    raise ExperimentError("device='cuda' needs a GPU; this machine has none. Use device='cpu'.")


def killed_on_1() -> None:
    """Rank 0 is silent and ignores SIGTERM, so torchrun alone would report after 30 s."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ignore_term()


def exit_on_1() -> None:
    if RANK == 1:
        os._exit(3)
    time.sleep(FOREVER_S)


def quit_early() -> None:
    if RANK == 1:
        os._exit(0)


def hang() -> None:
    say("step", step=1, steps=3, loss=1.0)
    time.sleep(FOREVER_S)


def ignore_term() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    say("step", step=1, steps=3, loss=1.0)
    time.sleep(FOREVER_S)


def hang_with_children() -> None:
    """Each rank also has a child in a session of its own that ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    ignore_term()


def chatty() -> None:
    while True:
        sys.stdout.write("still here " * 20 + "\n")
        sys.stdout.flush()
        time.sleep(0.001)


def join_group() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))


def collective() -> None:
    join_group()
    import torch.distributed as dist

    dist.destroy_process_group()


def hang_in_all_reduce() -> None:
    """Rank 0 waits in C++ for an all-reduce that rank 1 never enters."""
    join_group()
    import torch
    import torch.distributed as dist

    if RANK == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        say("step", step=1, steps=3, loss=1.0)
        work.wait()  # type: ignore[union-attr]
    say("step", step=1, steps=3, loss=1.0)
    time.sleep(FOREVER_S)


def killed_in_all_reduce() -> None:
    """Rank 1 is killed while rank 0 waits for it: rank 0 raises that its connection was closed."""
    join_group()
    import torch
    import torch.distributed as dist

    if RANK == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


MODES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        ok,
        raise_on_1,
        refuse,
        killed_on_1,
        exit_on_1,
        quit_early,
        hang,
        ignore_term,
        hang_with_children,
        chatty,
        collective,
        hang_in_all_reduce,
        killed_in_all_reduce,
    )
}

if __name__ == "__main__":
    main()
