"""The kinds a span may have, and the groups of kinds that analyses add up."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a span is. One word a span, decided by its parent operator, then its arguments, then its name."""

    COMPUTE = "compute"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    MEMSET = "memset"
    OPTIMIZER = "optimizer"
    WAIT = "wait"  # a lane that waits; never work
    HOST = "host"  # an operator or runtime call whose work is counted elsewhere
    ANNOTATION = "annotation"  # a named range around other spans


COMMUNICATION = frozenset(
    {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.BROADCAST, Kind.ALL_TO_ALL, Kind.P2P}
)
COPIES = frozenset({Kind.H2D, Kind.D2H, Kind.D2D, Kind.MEMSET})
COMPUTATION = frozenset({Kind.COMPUTE, Kind.OPTIMIZER})
WORK = COMMUNICATION | COPIES | COMPUTATION
