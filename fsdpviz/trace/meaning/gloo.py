"""Gloo's own ranges joined to the operators that issued them, and to the emulated links that stretch them.

Gloo records what it does on worker threads, as ``gloo:all_gather`` and the like, without saying for whom;
and it calls its reduce-scatter ``gloo:all_reduce``. The operator on the issuing thread
(``c10d::_reduce_scatter_base_``) tells. Both run in the order of issue, so the earliest operator that fits
is the one.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...base.kinds import Kind
from ..kineto.reader import Tensors
from .classify import collective_in

RANGE = re.compile(r"^gloo:")
# what gloo calls the operators that it has no name of its own for
_GLOO_NAMES = {Kind.REDUCE_SCATTER: Kind.ALL_REDUCE}


@dataclass(frozen=True)
class Span:
    """One range or operator: its row in the table, its times, its tensors where known, and the collective
    it names.
    """

    row: int
    start_ns: int
    end_ns: int
    kind: Kind
    tensors: Tensors | None = None


def issuers(gloo: Sequence[Span], operators: Sequence[Span]) -> dict[int, int]:
    """The row of the c10d operator that issued each gloo range, by the range's row; absent where none fits.

    An operator fits if it names the same collective, moves as many elements (where both say how many), and
    started before the range did. Among those the earliest that issued no other range is taken.
    """
    waiting: defaultdict[tuple[Kind, int | None], deque[Span]] = defaultdict(deque)
    for operator in sorted(operators, key=lambda span: span.start_ns):
        kind = _GLOO_NAMES.get(operator.kind, operator.kind)
        waiting[kind, _elements_gloo_sees(operator)].append(operator)
    found: dict[int, int] = {}
    for span in sorted(gloo, key=lambda span: span.start_ns):
        kind = _GLOO_NAMES.get(span.kind, span.kind)
        size = max(span.tensors.elements, default=None) if span.tensors else None
        sizes = (size, None) if size is not None else tuple(key[1] for key in waiting if key[0] is kind)
        queues = [queue for key in sizes if (queue := waiting.get((kind, key)))]
        ready = [queue for queue in queues if queue[0].start_ns <= span.start_ns]
        if ready:
            found[span.row] = min(ready, key=lambda queue: queue[0].start_ns).popleft().row
    return found


def _elements_gloo_sees(operator: Span) -> int | None:
    """The input's size: the smaller tensor of an all-gather, the larger of a reduce-scatter, else the only
    one.
    """
    elements = operator.tensors.elements if operator.tensors else ()
    if not elements:
        return None
    return min(elements) if operator.kind is Kind.ALL_GATHER else max(elements)


def lenders(
    links: Sequence[Span], gloo: Sequence[Span], kinds: Mapping[int, Kind], issued_in: Mapping[int, int]
) -> dict[int, list[int]]:
    """The gloo rows that are the real transfer inside each emulated transfer, by the link's row.

    ``kinds`` are the gloo rows' true kinds; ``issued_in`` says of a gloo row inside which link range, by
    row, its operator was issued. A gloo range whose operator does not tell goes to the earliest link range
    of its kind that it overlaps, first to one that has none yet.
    """
    lent: dict[int, list[int]] = {link.row: [] for link in links}
    ordered = sorted(links, key=lambda span: span.start_ns)
    for span in sorted(gloo, key=lambda span: span.start_ns):
        if (row := issued_in.get(span.row)) is not None:
            lent[row].append(span.row)
            continue
        same = [link for link in ordered if link.kind is kinds[span.row] and _overlap(link, span)]
        if same:
            lent[next((link for link in same if not lent[link.row]), same[0]).row].append(span.row)
    return {row: rows for row, rows in lent.items() if rows}


def _overlap(first: Span, second: Span) -> bool:
    return first.start_ns < second.end_ns and second.start_ns < first.end_ns


def payload_bytes(kind: Kind, issuer: Tensors | None, own: Tensors | None, group_size: int | None) -> int | None:
    """The full size of what a collective carries; None where the file does not say.

    An all-gather's own range shows its input only, a shard. The operator that issued it shows the output too,
    unless that is a list of tensors; then the shard times ``group_size`` is the whole.
    """
    known = [tensors for tensors in (issuer, own) if tensors and tensors.elements]
    item_bytes = next((tensors.item_bytes for tensors in known if tensors.item_bytes), None)
    if item_bytes is None:
        return None
    if kind not in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) or len(known[0].elements) > 1:
        return max(known[0].elements) * item_bytes
    if kind is Kind.REDUCE_SCATTER and own and own.elements:
        return max(own.elements) * item_bytes
    return max(known[0].elements) * item_bytes * group_size if group_size else None


def group_size(kind: Kind, issuer: Tensors | None) -> int | None:
    """Ranks of the group, from the two tensors of an all-gather or a reduce-scatter: the one is as many times the
    other. None for other collectives and where a size is not recorded or does not fit.
    """
    if kind not in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) or issuer is None or len(issuer.elements) != 2:
        return None
    small, large = sorted(issuer.elements)
    return large // small if small > 0 and large % small == 0 and large // small < 2**31 else None


def named_collective(name: str) -> Kind | None:
    """The collective of ``gloo:…`` and ``c10d::…`` names; None for other names and for operators without a
    transfer.
    """
    return collective_in(name) if name.startswith(("gloo:", "c10d::")) else None
