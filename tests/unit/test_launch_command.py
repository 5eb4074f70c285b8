from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fsdpviz.base.errors import LaunchError
from fsdpviz.experiment.run_folder import RunFolder
from fsdpviz.launch.command import failures_path, run_environment, supervisor_command, torchrun_command
from fsdpviz.launch.request import LaunchRequest

FOLDER = RunFolder(Path("runs/one"))
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def two_nodes(**changes: object) -> LaunchRequest:
    settings = {"processes_per_node": 4, "nodes": 2, "node_rank": 1, "rendezvous": "node0:29500"}
    return LaunchRequest(**(settings | changes))  # type: ignore[arg-type]


def test_one_node_uses_a_free_port_of_its_own() -> None:
    command = torchrun_command("python", FOLDER, LaunchRequest(processes_per_node=2))
    assert command[:4] == ["python", "-m", "fsdpviz.launch.torchrun", str(Path("runs/one/failures.json"))]
    assert {"--nnodes=1", "--nproc-per-node=2", "--max-restarts=0"} <= set(command)
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"} <= set(command)
    assert command[-3:] == ["-m", "fsdpviz.launch.worker", str(Path("runs/one"))]


def test_two_runs_have_different_rendezvous_ids() -> None:
    request = LaunchRequest(processes_per_node=1)
    first, second = (set(torchrun_command("python", FOLDER, request)) for _ in range(2))
    (changed,) = first - second
    assert changed.startswith("--rdzv-id=")


def test_nodes_share_one_id_and_take_ranks_by_node_rank() -> None:
    command = torchrun_command("python", FOLDER, two_nodes())
    assert {"--rdzv-backend=static", "--rdzv-endpoint=node0:29500", "--node-rank=1"} <= set(command)
    assert command == torchrun_command("python", FOLDER, two_nodes())
    assert "--local-addr=127.0.0.1" not in command
    assert two_nodes().local_ranks == range(4, 8)
    assert two_nodes().world_size == 8


def test_ipv6_rendezvous_keeps_its_brackets() -> None:
    request = two_nodes(rendezvous="[fd00::2]:29500")
    assert request.rendezvous_address() == ("fd00::2", 29500)
    assert "--rdzv-endpoint=[fd00::2]:29500" in torchrun_command("python", FOLDER, request)


def test_worker_may_be_a_file() -> None:
    request = LaunchRequest(processes_per_node=1, worker_module="somewhere/worker.py")
    assert torchrun_command("python", FOLDER, request)[-2:] == ["somewhere/worker.py", str(Path("runs/one"))]
    assert "--max-restarts=0" in torchrun_command("python", FOLDER, request)


def test_supervisor_runs_the_command_it_is_given() -> None:
    assert supervisor_command("python", ["a", "b"]) == ["python", "-m", "fsdpviz.launch.supervisor", "a", "b"]


def test_nodes_that_share_a_folder_do_not_share_the_failure_file() -> None:
    assert failures_path(FOLDER, two_nodes(node_rank=0)) != failures_path(FOLDER, two_nodes(node_rank=1))


def test_environment_has_defaults_where_the_caller_says_nothing() -> None:
    environment = run_environment(FOLDER, LaunchRequest(processes_per_node=2), {})
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GLOO_SOCKET_IFNAME"] == LOOPBACK
    assert environment["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert environment["FSDPVIZ_RUN"] == str(Path("runs/one"))


def test_environment_keeps_what_the_caller_says() -> None:
    said = {
        "OMP_NUM_THREADS": "8",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "HOME": "/h",
    }
    environment = run_environment(FOLDER, LaunchRequest(processes_per_node=2), said)
    assert said.items() <= environment.items()
    assert "TORCH_FR_BUFFER_SIZE" not in environment  # both names together make torch warn


def test_environment_drops_what_belongs_to_another_torchrun() -> None:
    foreign = {
        "RANK": "3",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "PET_STANDALONE": "1",
        "ROLE_RANK": "0",
    }
    environment = run_environment(FOLDER, LaunchRequest(processes_per_node=2), foreign)
    assert not foreign.keys() & environment.keys()


def test_extra_environment_wins_but_for_the_marker() -> None:
    request = LaunchRequest(processes_per_node=2, extra_env={"OMP_NUM_THREADS": "2", "FSDPVIZ_RUN": "other"})
    environment = run_environment(FOLDER, request, {"OMP_NUM_THREADS": "8"})
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["FSDPVIZ_RUN"] == str(Path("runs/one"))


def test_nodes_on_other_machines_choose_their_own_interface() -> None:
    assert "GLOO_SOCKET_IFNAME" not in run_environment(FOLDER, two_nodes(), {})
    assert "GLOO_SOCKET_IFNAME" in run_environment(FOLDER, two_nodes(rendezvous="localhost:29500"), {})


def test_source_tree_comes_after_the_callers_own_python_path() -> None:
    environment = run_environment(FOLDER, LaunchRequest(processes_per_node=2), {"PYTHONPATH": "/mine"})
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes_per_node": 0}, "at least one rank; got processes_per_node=0"),
        ({"processes_per_node": 1, "timeout_s": 0}, "timeout above 0 s; got timeout_s=0"),
        ({"processes_per_node": 1, "timeout_s": float("nan")}, "got timeout_s=nan"),
        ({"processes_per_node": 1, "nodes": 0}, "at least one node; got nodes=0"),
        ({"processes_per_node": 1, "nodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "from 0 to 1; got 2"),
        ({"processes_per_node": 1, "nodes": 2}, "got rendezvous=''"),
        ({"processes_per_node": 1, "nodes": 2, "rendezvous": "node0"}, "got rendezvous='node0'"),
        ({"processes_per_node": 1, "nodes": 2, "rendezvous": "node0:99999"}, "got rendezvous='node0:99999'"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchRequest(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
