"""FSDP1's ranges read as FSDP2's.

``FullyShardedDataParallel`` records what it does and not for which unit (torch/distributed/fsdp/_runtime_utils.py).
The unit follows from order and nesting, from one forward of the root to the next:

- the root's forward is the one that moves the arguments to the device (``_to_kwargs``); those inside are the units',
  in order of execution;
- backward runs them in reverse: a ``_pre_backward_hook`` that prefetches for each unit with parameters, the one whose
  forward ended last first, and a ``_post_backward_hook``, the one whose forward began last first; hooks in one node of
  autograd are on the same output, which the inner unit made and had hooked first;
- a unit has parameters if its forward ends its own gather, with ``_pre_forward_prefetch``;
- a prefetch is for the next unit in forward and for the one before in backward.

A unit is called by the one ``fsdpviz::forward (<name>)`` inside its forward, else ``#1``, ``#2``, … in order of
execution. Where the counts do not fit (a window cut the step, a module ran twice) the unit stays unknown.

[Note: forwards that run again] ``checkpoint(FSDP(block))`` runs a unit's forward again inside backward, where no
other forward is around it. Whose it is follows from the hooks beside it:

- FSDP1 does nothing in the forward of a unit whose ``_pre_backward_hook`` has run: one that does not prefetch is that
  unit's, and no use that a gather could be for;
- of one that does the hook is still to come, and is the next (``use_reentrant=True``);
- forwards without a hook between them are of one checkpoint, and ran side by side the first time too.

Where these do not agree with each other or with the nesting of the first time, the unit stays unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from ...base.labels import ROOT, Phase, RangeLabel, parse_label
from .windows import Windows

Range = tuple[int, int, int, str]  # lane, start_ns, end_ns, name

PREFIX = "FullyShardedDataParallel."
NODE = "autograd::engine::evaluate_function"
NO_USE = "FSDP1"  # the family of a forward for which FSDP1 does nothing, so that no gather is for it
_FORWARD = PREFIX + "forward"
_ROOT_PRE_FORWARD, _ROOT_ONLY = PREFIX + "_root_pre_forward", PREFIX + "_to_kwargs"  # torch 2.1 and later
_FORWARD_PREFETCH = PREFIX + "_pre_forward_prefetch"
_PRE_BACKWARD = PREFIX + "_pre_backward_hook"
_POST_BACKWARD = PREFIX + "_post_backward_hook"
_PHASES = {  # by what FSDP2 calls the same
    "_pre_forward": "pre_forward",
    "_post_forward": "post_forward",
    "_pre_forward_prefetch": "forward_prefetch",
    "_pre_backward_hook": "pre_backward",
    "_pre_backward_prefetch": "backward_prefetch",
    "_post_backward_prefetch": "backward_prefetch",
    "_post_backward_hook": "post_backward_reduce",
    "_post_backward_hook_reshard_only": "post_backward_reshard",
}
_OF_BACKWARD = frozenset(phase for name, phase in _PHASES.items() if "backward" in name)
_FOREVER = 2**63 - 1


def fsdp1_labels(ranges: Sequence[Range]) -> list[tuple[Range, RangeLabel]]:
    """The ranges of FSDP1 with the labels that FSDP2 would have given them; units are None where unknown."""
    own = sorted((item for item in ranges if item[3].startswith(PREFIX)), key=_outer_first)
    roots = _roots(own)
    if not roots:
        return []
    blocks = {name: unit for name in {item[3] for item in ranges} if (unit := _block(name))}
    named = sorted((item for item in ranges if item[3] in blocks), key=_outer_first)
    nodes = _nodes(ranges, [item for item in own if item[3] == _PRE_BACKWARD])
    found: list[tuple[Range, RangeLabel]] = []
    for root, end_ns in zip(roots, [*(following[1] for following in roots[1:]), _FOREVER], strict=True):
        calls = [(item, blocks[item[3]]) for item in _between(named, root[1], end_ns)]
        found += _step(root, _between(own, root[1], end_ns), calls, nodes)
    return found


def _nodes(ranges: Sequence[Range], hooks: Sequence[Range]) -> dict[Range, int]:
    """Which node of autograd each hook runs in; a number of its own for one that runs in none that was recorded."""
    nodes = Windows(item for item in ranges if item[3].startswith(NODE))
    found = nodes.at(np.array([hook[0] for hook in hooks]), np.array([hook[1] for hook in hooks]))
    return {
        hook: node if node >= 0 else -1 - at for at, (hook, node) in enumerate(zip(hooks, found.tolist(), strict=True))
    }


def _roots(own: Sequence[Range]) -> list[Range]:
    """The forwards of the root, in order. Before torch 2.1 nothing marks them: those that hold as many as any."""
    inside: dict[Range, int] = {}  # by outermost forward, how many ranges that only a root's holds
    last: dict[int, Range] = {}  # by lane
    is_marked = any(item[3] == _ROOT_PRE_FORWARD for item in own)
    for item in own:
        outer = last.get(item[0])
        is_inside = outer is not None and _holds(outer, item)
        if item[3] == _FORWARD and not is_inside:
            last[item[0]] = item
            inside[item] = 0
        elif outer is not None and is_inside and item[3] == (_ROOT_ONLY if is_marked else _FORWARD):
            inside[outer] += 1
    fewest = 1 if is_marked else max(inside.values(), default=0)
    return [item for item, count in inside.items() if count >= fewest]


def _step(
    root: Range, own: Sequence[Range], named: Sequence[tuple[Range, str]], nodes: Mapping[Range, int]
) -> Iterator[tuple[Range, RangeLabel]]:
    forwards = [item for item in own if item[3] == _FORWARD and _holds(root, item)]
    units = _called(forwards, named)
    after = [item for item in own if item[1] >= root[2]]
    gathering = _gathering(own)
    owners = [place for place, item in enumerate(forwards) if item in gathering]
    before = _in_backward(after, forwards, owners, nodes)
    again = _run_again(after, forwards, before, gathering, nodes)
    places = {item: place for place, item in enumerate(forwards)} | again
    following: dict[int | None, int] = dict(pairwise(owners or range(len(units))))
    for item, around in zip(own, _innermost(places, own), strict=True):
        if item in again and item not in gathering:
            yield item, RangeLabel(NO_USE, "post_forward", units[again[item]])
        phase = _PHASES.get(item[3].removeprefix(PREFIX))
        if phase is None:
            continue
        if phase in _OF_BACKWARD:
            place = before.get(item)
        else:
            if around in again and around not in gathering:
                continue
            place = None if around is None else places[around]
            if phase == "forward_prefetch":
                place = following.get(place)
        yield item, RangeLabel("FSDP", phase, None if place is None else units[place])


def _gathering(own: Sequence[Range]) -> set[Range | None]:
    """The forwards that gather what they need, or wait for it; they alone then prefetch."""
    forwards = [item for item in own if item[3] == _FORWARD]
    return set(_innermost(forwards, [item for item in own if item[3] == _FORWARD_PREFETCH]))


def _in_backward(
    after: Sequence[Range], forwards: Sequence[Range], owners: Sequence[int], nodes: Mapping[Range, int]
) -> dict[Range, int | None]:
    """Of each range of backward the place of its unit's forward; the target's for a prefetch."""
    prefetches = [item for item in after if item[3].endswith("_backward_prefetch")]
    ahead = [item for item in prefetches if item[3] == PREFIX + "_pre_backward_prefetch"]
    hooks = [item for item in after if item[3] == _PRE_BACKWARD and _inside(item, ahead)]
    posts = [item for item in after if item[3] == _POST_BACKWARD]
    every = range(len(forwards))
    choices = [owners] if owners else [every, every[1:]]  # the root's parameters may all be its units'
    found: dict[Range, int | None] = {}
    for ranges in (hooks, posts):
        places: Sequence[int] = next((choice for choice in choices if len(choice) == len(ranges)), [])
        by_end = sorted(places, key=lambda place: -forwards[place][2])
        following = dict(pairwise([0, *(place for place in by_end if place)]))
        order = _hooked(by_end, hooks, nodes) if ranges is hooks else sorted(places, reverse=True)
        for item, place in zip(ranges, order, strict=False):
            found[item] = place
            target = following.get(place) if place or ranges is hooks else None
            found |= dict.fromkeys(_inside(item, prefetches), target)
    return found


def _hooked(by_end: Sequence[int], hooks: Sequence[Range], nodes: Mapping[Range, int]) -> list[int]:
    """The places in the order of the hooks: reversed among those that are on one output."""
    found: list[int] = []
    for _, group in groupby(zip(hooks, by_end, strict=False), key=lambda pair: nodes[pair[0]]):
        found += reversed([place for _, place in group])
    return found


def _run_again(
    after: Sequence[Range],
    forwards: Sequence[Range],
    before: Mapping[Range, int | None],
    gathering: Container[Range | None],
    nodes: Mapping[Range, int],
) -> dict[Range, int]:
    """The forwards inside backward, each with the place of the one that it repeats.

    See [Note: forwards that run again].
    """
    found: dict[Range, int] = {}
    hooks = [item for item in after if item[3] == _PRE_BACKWARD and item in before]
    ended_ns = {before.get(item): item[1] for item in reversed(after) if item[3] == _POST_BACKWARD}  # the first time
    outermost = {nodes[item]: before[item] for item in hooks}  # of those on one output
    for run in _runs(after):
        last = _outermost(run)[-1]
        at = bisect_left(hooks, last[1], key=_start_ns)
        place = before[hooks[at - 1]] if at else None  # the last backward that began, if it has not ended
        place = under_way = None if ended_ns.get(place, _FOREVER) < last[1] else place
        if last in gathering:
            place = outermost[nodes[hooks[at]]] if at < len(hooks) else None  # the one that begins next
            if place is not None and under_way is not None and not _holds(forwards[under_way], forwards[place]):
                continue
        first = 0 if place is None else place - run.index(last)
        repeated = forwards[first : first + len(run)] if first > 0 else []
        if [len(_inside(item, run)) for item in run] == [len(_inside(item, forwards)) for item in repeated]:
            found |= {item: first + at for at, item in enumerate(run)}
    return found


def _runs(after: Sequence[Range]) -> Iterator[list[Range]]:
    """The forwards inside backward with no hook between them."""
    run: list[Range] = []
    for item in after:
        if item[3] == _FORWARD:
            run.append(item)
        elif run and item[3].startswith((_PRE_BACKWARD, _POST_BACKWARD)):
            yield run
            run = []
    if run:
        yield run


def _called(forwards: Sequence[Range], named: Sequence[tuple[Range, str]]) -> list[str]:
    """The units' names, by the ranges inside each forward and in none inside it."""
    names: dict[Range | None, set[str]] = defaultdict(set)
    for around, (_, unit) in zip(_innermost(forwards, [item for item, _ in named]), named, strict=True):
        names[around].add(unit)
    called = [names[item].pop() if len(names[item]) == 1 else f"#{place}" for place, item in enumerate(forwards)]
    return [ROOT, *called[1:]]


def _block(name: str) -> str | None:
    label = parse_label(name)
    return label.unit if label and label.family == "fsdpviz" and label.phase == Phase.FORWARD else None


def _outermost(forwards: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for item in forwards:
        if not found or not _holds(found[-1], item):
            found.append(item)
    return found


def _innermost(forwards: Iterable[Range], items: Sequence[Range]) -> list[Range | None]:
    """Of each item the last forward that began around it."""
    windows = Windows((*forward[:3], forward) for forward in forwards)
    return windows.names_at(np.array([item[0] for item in items]), np.array([item[1] for item in items]))


def _inside(outer: Range, ranges: Sequence[Range]) -> list[Range]:
    return [item for item in _between(ranges, outer[1], outer[2]) if item[0] == outer[0]]


def _between(ranges: Sequence[Range], start_ns: int, end_ns: int) -> Sequence[Range]:
    """Those that begin from ``start_ns`` on and before ``end_ns``, of ranges sorted by their start."""
    first = bisect_left(ranges, start_ns, key=_start_ns)
    return ranges[first : bisect_left(ranges, end_ns, lo=first, key=_start_ns)]


def _holds(outer: Range, inner: Range) -> bool:
    """On one lane: backward may run on another thread than forward, and a hook's ranges are on its own."""
    return outer[0] == inner[0] and outer[1] <= inner[1] < outer[2]


def _outer_first(item: Range) -> tuple[int, int, int]:
    return item[1], -item[2], item[0]


def _start_ns(item: Range) -> int:
    return item[1]
