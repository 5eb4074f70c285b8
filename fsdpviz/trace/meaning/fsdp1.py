"""FSDP1's ranges read as FSDP2's.

``FullyShardedDataParallel`` records what it does and not for which unit (torch/distributed/fsdp/_runtime_utils.py).
The unit follows from order and nesting, within each outermost ``FullyShardedDataParallel.forward``:

- forwards are nested: the outermost is the root's, those inside are the units', in order of execution;
- backward runs them in reverse: as many ``_post_backward_hook`` as units with parameters, the root's last, and as
  many ``_pre_backward_hook`` that prefetch (one without parameters does not), the root's first;
- a prefetch is for the next unit in forward and for the one before in backward.

A unit is called by the one ``fsdpviz::forward (<name>)`` inside its forward, else ``#1``, ``#2``, … in order of
execution. Where the counts do not fit (a window cut the step, a module ran twice) the unit stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.labels import ROOT, Phase, RangeLabel, parse_label

Range = tuple[int, int, int, str]  # lane, start_ns, end_ns, name

PREFIX = "FullyShardedDataParallel."
_FORWARD = PREFIX + "forward"
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
_FOREVER = 2**63 - 1


def fsdp1_labels(ranges: Sequence[Range]) -> list[tuple[Range, RangeLabel]]:
    """The ranges of FSDP1 with the labels that FSDP2 would have given them; units are None where unknown."""
    own = sorted((item for item in ranges if item[3].startswith(PREFIX)), key=_outer_first)
    if not own:
        return []
    roots = _outermost([item for item in own if item[3] == _FORWARD])
    named = [(item, label.unit) for item in ranges if (label := _block(item[3])) and label.unit]
    found: list[tuple[Range, RangeLabel]] = []
    roots.sort(key=lambda item: item[1])
    for root, end_ns in zip(roots, [*(following[1] for following in roots[1:]), _FOREVER], strict=True):
        found += _step(root, [item for item in own if root[1] <= item[1] < end_ns], named)
    return found


def _step(root: Range, own: Sequence[Range], named: Sequence[tuple[Range, str]]) -> Iterator[tuple[Range, RangeLabel]]:
    forwards = [item for item in own if item[3] == _FORWARD and _holds(root, item)]
    units = [ROOT, *(_called(item, forwards, named, place) for place, item in enumerate(forwards[1:], 1))]
    after = [item for item in own if item[1] >= root[2]]
    before = _in_backward(after, units)
    for item in own:
        phase = _PHASES.get(item[3].removeprefix(PREFIX))
        if phase is None:
            continue
        if item[1] < root[2]:
            place = max((at for at, forward in enumerate(forwards) if _holds(forward, item)), default=None)
            unit = None if place is None else _after(units, place) if phase == "forward_prefetch" else units[place]
        else:
            unit = before.get(item)
        yield item, RangeLabel("FSDP", phase, unit)


def _in_backward(after: Sequence[Range], units: Sequence[str]) -> dict[Range, str | None]:
    """The unit of each range of backward, the target's for a prefetch."""
    prefetches = [item for item in after if item[3] == PREFIX + "_pre_backward_prefetch"]
    hooks = [item for item in after if item[3] == PREFIX + "_pre_backward_hook"]
    hooks = [hook for hook in hooks if any(_holds(hook, item) for item in prefetches)]
    posts = [item for item in after if item[3] == PREFIX + "_post_backward_hook"]
    blocks = list(reversed(units[1:]))
    found: dict[Range, str | None] = {}
    for ranges, with_root in ((hooks, [ROOT, *blocks]), (posts, [*blocks, ROOT])):
        order = {len(with_root): with_root, len(blocks): blocks}.get(len(ranges), [])
        for item, unit in zip(ranges, order, strict=False):
            found[item] = unit
            following = _after([ROOT, *blocks], [ROOT, *blocks].index(unit)) if unit != ROOT or item in hooks else None
            for prefetch in after:
                if prefetch[3].endswith("_backward_prefetch") and _holds(item, prefetch):
                    found[prefetch] = following
    return found


def _called(item: Range, forwards: Sequence[Range], named: Sequence[tuple[Range, str]], place: int) -> str:
    inner = [other for other in forwards if other is not item and _holds(item, other)]
    inside = {unit for block, unit in named if _holds(item, block) and not any(_holds(other, block) for other in inner)}
    return inside.pop() if len(inside) == 1 else f"#{place}"


def _block(name: str) -> RangeLabel | None:
    label = parse_label(name)
    return label if label and label.family == "fsdpviz" and label.phase == Phase.FORWARD else None


def _after(units: Sequence[str], place: int) -> str | None:
    return units[place + 1] if place + 1 < len(units) else None


def _outermost(forwards: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for item in forwards:
        if not found or not _holds(found[-1], item):
            found.append(item)
    return found


def _holds(outer: Range, inner: Range) -> bool:
    """On one lane: backward may run on another thread than forward, and a hook's ranges are on its own."""
    return outer[0] == inner[0] and outer[1] <= inner[1] < outer[2]


def _outer_first(item: Range) -> tuple[int, int, int]:
    return item[1], -item[2], item[0]
