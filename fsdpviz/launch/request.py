"""How a run is to be started, as a frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base.errors import LaunchError

WORKER_MODULE = "fsdpviz.launch.worker"


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """How to start a run: how many ranks, on how many nodes, for how long at most.

    With several nodes each calls ``launch`` with its own ``node_rank``; ``rendezvous`` is then ``host:port``
    of node 0. ``worker_module`` may also be the path of a ``.py`` file. ``extra_env`` wins over the caller's
    environment. Raises LaunchError.
    """

    processes_per_node: int
    timeout_s: float = 600.0
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    worker_module: str = WORKER_MODULE
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.processes_per_node < 1:
            raise LaunchError(f"a node runs at least one rank; got processes_per_node={self.processes_per_node}")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise LaunchError(f"a run needs a timeout above 0 s; got timeout_s={self.timeout_s}. Say timeout_s=600")
        if self.nodes < 1:
            raise LaunchError(f"a run needs at least one node; got nodes={self.nodes}")
        if not 0 <= self.node_rank < self.nodes:
            raise LaunchError(f"node_rank counts nodes from 0 to {self.nodes - 1}; got {self.node_rank}")
        if self.nodes > 1:
            self.rendezvous_address()

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def local_ranks(self) -> range:
        """The global ranks that this node runs."""
        first = self.node_rank * self.processes_per_node
        return range(first, first + self.processes_per_node)

    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of node 0, of ``host:port`` or ``[IPv6]:port``. Raises LaunchError."""
        host, colon, port = self.rendezvous.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise LaunchError(
                f"{self.nodes} nodes meet at host:port of node 0; got rendezvous={self.rendezvous!r}. "
                "Say rendezvous='node0:29500'"
            )
        return host.strip("[]"), int(port)

    @property
    def is_on_one_machine(self) -> bool:
        """True when every rank can be reached over the loopback interface."""
        if self.nodes == 1:
            return True
        host, _ = self.rendezvous_address()
        return host in ("localhost", "::1") or host.startswith("127.")
