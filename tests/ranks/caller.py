"""A program that launches a run and waits for it, to be ended from outside.

python caller.py <run folder> <stand-in mode>
"""

from __future__ import annotations

import sys
from pathlib import Path

from fsdpviz.experiment.run_folder import RunFolder
from fsdpviz.launch.launcher import LaunchRequest, launch

launch(
    {},
    RunFolder(Path(sys.argv[1])),
    LaunchRequest(
        processes_per_node=2,
        worker_module=str(Path(__file__).with_name("stand_in_worker.py")),
        extra_env={"STAND_IN": sys.argv[2]},
    ),
)
