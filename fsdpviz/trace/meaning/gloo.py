"""Gloo's own ranges joined to the operators that issued them, and to the emulated links that stretch them.

Gloo records what it does on worker threads, as ``gloo:all_gather`` and the like, without saying for whom;
and it calls its reduce-scatter ``gloo:all_reduce``. The operator on the issuing thread
(``c10d::_reduce_scatter_base_``) tells. A range lists the tensors that it sends, one by one; c10d's operators name
what they receive before what they send, and a list of tensors as one argument without a type.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...base.kinds import Kind
from ..kineto.reader import Tensors
from .classify import collective_in
from .dtypes import ITEM_BYTES_OF

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

    An operator fits if it names the same collective, sends as many elements (where both say how many), and started
    before the range did. Gloo takes its work in the order of issue, so that the last range is the latest such
    operator's, the one before it has the latest of those that are left, and so on backwards. An operator whose range is
    not in the file, one of another backend's, is left over; taken from the front, it would be given the next range of
    its size, however much later, and every operator after it the range of the one behind.

    A reduce-scatter has a range for each of its tensors. Of lists, its operator shows the output alone: then there is
    a range of that size for each rank, and it is not used up.
    """
    left = _Left(operators)
    found: dict[int, int] = {}
    for span in sorted(gloo, key=lambda span: span.start_ns, reverse=True):
        if (operator := left.latest(_GLOO_NAMES.get(span.kind, span.kind), _sent_in(span), span.start_ns)) is not None:
            found[span.row] = operator.row
    return found


@dataclass(eq=False)
class _Entry:
    """One range that an operator issues."""

    operator: Span
    is_left: bool = True


class _Left:
    """Operators that are not used up. Ranges ask from the last backwards, so that what is too late for one is too late
    for all that follow, and is dropped: all of them together look at each entry a few times, however many sizes there
    are.
    """

    def __init__(self, operators: Sequence[Span]) -> None:
        """Each stack has the latest on top: one for each size of a kind, and one for all sizes of it."""
        self._of_size: defaultdict[tuple[Kind, int | None], list[_Entry]] = defaultdict(list)
        self._of_kind: defaultdict[Kind, list[_Entry]] = defaultdict(list)
        for operator in sorted(operators, key=lambda span: span.start_ns):
            kind = _GLOO_NAMES.get(operator.kind, operator.kind)
            for size in _sent_by(operator):
                self._of_size[kind, size].append(_Entry(operator))
        for (kind, _), entries in reversed(self._of_size.items()):  # of equal starts the size that came first is on top
            self._of_kind[kind] += entries
        for entries in self._of_kind.values():
            entries.sort(key=lambda entry: entry.operator.start_ns)

    def latest(self, kind: Kind, size: int | None, start_ns: int) -> Span | None:
        """The latest operator of the kind, and of the size where both say one, that started by then; it is used up."""
        of_size = (self._of_size.get((kind, one)) for one in (size, None))
        stacks = [self._of_kind.get(kind)] if size is None else [*of_size]
        ready = [top for stack in stacks if stack and (top := self._top(stack, start_ns))]
        if not ready:
            return None
        entry = max(ready, key=lambda entry: entry.operator.start_ns)
        entry.is_left = _shows_output_alone(entry.operator)
        return entry.operator

    def _top(self, stack: list[_Entry], start_ns: int) -> _Entry | None:
        while stack and not (stack[-1].is_left and stack[-1].operator.start_ns <= start_ns):
            stack.pop()
        return stack[-1] if stack else None


def _shows_output_alone(operator: Span) -> bool:
    return operator.kind is Kind.REDUCE_SCATTER and operator.tensors is not None and len(operator.tensors.sizes) == 1


def _sent_by(operator: Span) -> tuple[int | None, ...]:
    """Elements of each range that an operator issues: what it sends comes last, and a reduce-scatter sends most."""
    sizes = operator.tensors.sizes if operator.tensors else ()
    if not sizes:
        return (None,)
    return max(sizes, key=sum) if operator.kind is Kind.REDUCE_SCATTER else (sum(sizes[-1]),)


def _sent_in(span: Span) -> int | None:
    """Elements that a range sends. A scatter's has a tensor for each rank, and its operator the one that comes back."""
    if not span.tensors or not span.tensors.elements:
        return None
    return max(span.tensors.elements) if span.kind is Kind.P2P else sum(span.tensors.elements)


def lenders(
    links: Sequence[Span], gloo: Sequence[Span], kinds: Mapping[int, Kind], issued_in: Mapping[int, int]
) -> dict[int, list[int]]:
    """The gloo rows that are the real transfer inside each emulated transfer, by the link's row.

    ``kinds`` are the gloo rows' true kinds; ``issued_in`` says of a gloo row inside which link range, by
    row, its operator was issued. A gloo range whose operator does not tell goes to the earliest link range
    of its kind that it overlaps, first to one that has none yet.
    """
    lent: dict[int, list[int]] = {link.row: [] for link in links}
    all_of: defaultdict[Kind, deque[Span]] = defaultdict(deque)
    for link in sorted(links, key=lambda span: span.start_ns):
        all_of[link.kind].append(link)
    free_of = {kind: of_kind.copy() for kind, of_kind in all_of.items()}
    for span in sorted(gloo, key=lambda span: span.start_ns):
        row, kind = issued_in.get(span.row), kinds[span.row]
        if row is None:
            link = _first(free_of.get(kind), span, lent) or _first(all_of.get(kind), span)
            row = link.row if link else None
        if row is not None:
            lent[row].append(span.row)
    return {row: rows for row, rows in lent.items() if rows}


def _first(links: deque[Span] | None, span: Span, lent: Mapping[int, Sequence[int]] | None = None) -> Span | None:
    """The first link that overlaps the range, of those that have not ``lent`` yet if that is given. Links that it
    cannot be, for this range and all that begin after it, are dropped on the way.
    """
    while links and (links[0].end_ns <= span.start_ns or (lent and lent[links[0].row])):
        links.popleft()
    return links[0] if links and links[0].start_ns < span.end_ns else None


def payload_bytes(kind: Kind, issuer: Tensors | None, own: Tensors | None, group_size: int | None) -> int | None:
    """The full size of what a collective carries; None where the file does not say.

    That is what a range sends, all its tensors together, save for an all-gather: it sends a shard. How many make the
    whole the operator that issued it tells, unless it gathers into a list of tensors; then ``group_size`` does.
    """
    sent = own.total_bytes if own else None
    if sent is None:
        return _bytes_of_operator(kind, issuer, group_size) if issuer and issuer.elements else None
    if kind is not Kind.ALL_GATHER:
        return sent
    shard = sum(own.elements) if own else 0
    if shard and issuer and len(issuer.elements) > 1:
        return sent * max(issuer.elements) // shard
    return sent * group_size if group_size else None


def _bytes_of_operator(kind: Kind, issuer: Tensors, group_size: int | None) -> int | None:
    """The same by the operator alone. An all-to-all sends the second of two tensors; an only one is an input."""
    elements, dtype = issuer.elements, next(filter(None, issuer.dtypes), None)
    if dtype is None:
        return None
    if kind is Kind.ALL_TO_ALL:
        return elements[1 if len(elements) == 2 else 0] * ITEM_BYTES_OF[dtype]
    whole = max(elements) * ITEM_BYTES_OF[dtype]
    if kind is not Kind.ALL_GATHER or len(elements) > 1:
        return whole
    return whole * group_size if group_size else None


def element_type(issuer: Tensors | None, own: Tensors | None) -> str | None:
    """The element type of what a range sends, else of its operator's first tensor; None where it sends several."""
    if own and any(own.dtypes):
        return own.dtypes[0] if len(set(own.dtypes)) == 1 else None
    return next(filter(None, issuer.dtypes), None) if issuer else None


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
