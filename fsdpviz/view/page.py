"""One HTML page that holds everything it needs: opened without a network it shows all there is."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ..base.atomic import write_atomically
from ..base.errors import FsdpvizError
from ..base.provenance import Provenance
from .table_format import UNKNOWN, badge_html
from .text import safe

# nothing is fetched: scripts and styles are those in the page, pictures those that Plotly makes
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; base-uri 'none'; form-action 'none'"
)
_CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False, "showSendToCloud": False}
_PRINT_PX = 1020  # A4 on its side between the margins

# Plotly draws for the window's width; paper has another
_PRINT_SCRIPT = f"""
const figures = document.querySelectorAll(".js-plotly-plot");
const resize = (size) => figures.forEach((figure) => Plotly.relayout(figure, size));
addEventListener("beforeprint", () => resize({{width: {_PRINT_PX}}}));
addEventListener("afterprint", () => resize({{width: null, autosize: true}}));
"""


@runtime_checkable
class ShowsHtml(Protocol):
    """An object of ours that shows itself as an HTML fragment whose strings are escaped."""

    def _repr_html_(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Section:
    """A heading, a paragraph and what is under it. ``text`` and ``heading`` are plain text."""

    heading: str
    content: go.Figure | ShowsHtml | None = None
    text: str = ""


@dataclass(frozen=True)
class Highlight:
    """A number to see first: ``value`` already with its unit, ``detail`` under it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, eq=False)
class SettingsTable:
    """The settings of several runs side by side; those that differ stand first and are marked."""

    names: Sequence[str]
    settings: Sequence[Mapping[str, Any]]

    def _repr_html_(self) -> str:
        flat = [_flatten(one) for one in self.settings]
        keys = list(dict.fromkeys(key for one in flat for key in one))
        differing = [key for key in keys if len({one.get(key) for one in flat}) > 1]
        equal = [key for key in keys if key not in differing]
        head = "".join(f"<th>{safe(name)}</th>" for name in ("setting", *self.names))
        marked = "".join(_settings_row(key, flat, "differs") for key in differing)
        others = "".join(_settings_row(key, flat) for key in equal)
        table = "<table class=settings><thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
        shown = table.format(head, marked) if marked else "<p>All settings are equal.</p>"
        if not others:
            return shown
        count = f"{len(equal)} equal setting{'s' if len(equal) > 1 else ''}"
        return f"{shown}<details><summary>{count}</summary>{table.format(head, others)}</details>"


def page(
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    provenance: Sequence[Provenance] = (),
    highlights: Sequence[Highlight] = (),
) -> str:
    """A whole HTML page with Plotly inside; every string given is escaped.

    ``lead`` is the paragraph under the title that says what the page is.
    """
    badges = "".join(badge_html(one) for one in dict.fromkeys(provenance))
    cards = "".join(
        f"<div class=card><div class=label>{safe(card.label)}</div><div class=value>{safe(card.value)}</div>"
        f"<div class=detail>{safe(card.detail)}</div></div>"
        for card in highlights
    )
    style = resources.files("fsdpviz.view").joinpath("page.css").read_text(encoding="utf-8")
    has_figure = any(isinstance(section.content, go.Figure) for section in sections)
    body = "".join(_section(number, section) for number, section in enumerate(sections, start=1))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{style}</style>\n"
        + (f"<script>{get_plotlyjs()}</script>\n" if has_figure else "")
        + f"</head><body><header><h1>{safe(title)}</h1>"
        + (f"<p class=lead>{html.escape(lead)}</p>" if lead else "")
        + (f"<p>{badges}</p>" if badges else "")
        + "</header><main>"
        + (f"<div class=cards>{cards}</div>" if cards else "")
        + f"{body}</main>"
        + (f"<script>{_PRINT_SCRIPT}</script>" if has_figure else "")
        + "</body></html>\n"
    )


def write_page(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    provenance: Sequence[Provenance] = (),
    highlights: Sequence[Highlight] = (),
) -> Path:
    """The path of the page, written so that it is either absent, the old page or the whole new one.

    Raises FsdpvizError when it cannot be written.
    """
    target = Path(path)
    content = page(title, sections, lead=lead, provenance=provenance, highlights=highlights)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise FsdpvizError(f"a page needs a place it can be written: {target}: {cause}. Choose another") from error
    return target


def _section(number: int, section: Section) -> str:
    text = f"<p>{html.escape(section.text)}</p>" if section.text else ""
    return f"<section><h2>{safe(section.heading)}</h2>{text}{_content(number, section.content)}</section>"


def _content(number: int, content: go.Figure | ShowsHtml | None) -> str:
    if content is None:
        return ""
    if isinstance(content, go.Figure):
        drawn = content.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=f"figure-{number}",
            config=_CONFIG,
            default_width="100%",
        )
        return f"<div class=figure>{drawn}</div>"
    return f"<div class=scroll>{content._repr_html_()}</div>"


def _settings_row(key: str, flat: Sequence[Mapping[str, str]], mark: str = "") -> str:
    cells = "".join(f"<td>{safe(one.get(key, UNKNOWN))}</td>" for one in flat)
    return f"<tr{f' class={mark}' if mark else ''}><td>{safe(key)}</td>{cells}</tr>"


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"mesh": {"shard": 2}}`` as ``{"mesh.shard": "2"}``; a bool and None are written as JSON does."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _written(value)
    return flat


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
