"""A table as aligned text and as HTML, from the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.provenance import Provenance
from .palette import BADGE_COLOURS, INK
from .text import cut, safe

UNKNOWN = "–"  # stands where a number is not known; zero is a number

# colours follow the notebook's theme: text and lines take the surrounding colour, only the badge has its own
_STYLE = (
    ".fsdpviz-table{font-variant-numeric:tabular-nums;max-width:100%;overflow-x:auto;margin:.5em 0}"
    ".fsdpviz-table p{margin:.35em 0;text-align:left}"
    ".fsdpviz-table table{border-collapse:collapse;margin:.6em 0;font-size:.95em;background:transparent}"
    ".fsdpviz-table th,.fsdpviz-table td{padding:.28em .8em;text-align:right;white-space:nowrap;border:0;"
    "border-bottom:1px solid rgba(128,128,128,.3);color:inherit;background:transparent}"
    ".fsdpviz-table th{font-weight:600;border-bottom:2px solid rgba(128,128,128,.6);vertical-align:bottom}"
    ".fsdpviz-table th:first-child,.fsdpviz-table td:first-child{text-align:left}"
    ".fsdpviz-table tr.fsdpviz-strong td{font-weight:600}"
    ".fsdpviz-columns{display:flex;flex-wrap:wrap;gap:0 3em;align-items:flex-start}"
    ".fsdpviz-table .fsdpviz-note{opacity:.75;font-size:.88em}"
    ".fsdpviz-badge{display:inline-block;padding:.1em .55em;border-radius:.3em;border:1.5px solid;"
    "font-size:.88em;margin-right:.6em}"
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, already with their units. ``strong`` are the rows to see first."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()

    def text(self) -> str:
        """Aligned columns: the first to the left, numbers to the right."""
        cells = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.header))]
        lines = [_line(row, widths) for row in cells]
        return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])

    def html(self) -> str:
        head = "".join(f"<th>{safe(cell)}</th>" for cell in self.header)
        body = "".join(
            f"<tr{' class=fsdpviz-strong' if index in self.strong else ''}>"
            + "".join(f"<td>{safe(cell)}</td>" for cell in row)
            + "</tr>"
            for index, row in enumerate(self.rows)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()


def badge_html(provenance: Provenance) -> str:
    background, border = BADGE_COLOURS[provenance]
    style = f"background:{background};border-color:{border};color:{INK}"
    return f'<span class="fsdpviz-badge" style="{style}">{safe(provenance.value)}</span>'


def as_text(badges: Sequence[Provenance], headline: str, tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Badge and headline, the tables, and what was dropped or guessed, parted by empty lines."""
    label = " / ".join(dict.fromkeys(f"[{badge.value}]" for badge in badges))
    parts = [f"{label} {headline}", *(table.text() for table in tables)]
    if notes:
        parts.append("\n".join(f"note: {cut(note, 400)}" for note in notes))
    return "\n\n".join(parts)


def as_html(badges: Sequence[Provenance], headline: str, tables: Sequence[Table], notes: Sequence[str]) -> str:
    """The same as a fragment that needs nothing from outside and takes the colours around it."""
    label = "".join(badge_html(badge) for badge in dict.fromkeys(badges))
    remarks = "".join(f'<p class="fsdpviz-note">Note: {safe(note, 400)}</p>' for note in notes)
    body = "".join(table.html() for table in tables)
    return (
        f'<div class="fsdpviz-table"><style>{_STYLE}</style>'
        f"<p>{label}<strong>{safe(headline, 400)}</strong></p>"
        f'<div class="fsdpviz-columns">{body}</div>{remarks}</div>'
    )
