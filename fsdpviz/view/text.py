"""Words from recordings, made safe and short. Every name, unit and lane comes from a stranger's file."""

from __future__ import annotations

import re

MAX_NAME = 120  # characters shown of any name

_UNSHOWABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;", "$": "&#36;", "`": "&#96;"}
)


def cut(text: str, limit: int = MAX_NAME) -> str:
    """``text`` on one line with at most ``limit`` characters; an ellipsis stands for what was left out.

    Control characters and marks that reverse the direction of writing become one space.
    """
    line = _UNSHOWABLE.sub(" ", text[: 4 * limit]).strip()
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1].rstrip() + "…"


def safe(text: str, limit: int = MAX_NAME) -> str:
    """``text`` cut, then escaped for HTML, for an attribute in quotes and for plotly.

    plotly reads ``<a href>``, ``<br>`` and entities in any text it draws, and hands ``$…$`` to MathJax where
    a notebook has loaded it. Of the named entities it knows few, not ``&quot;``.
    """
    return cut(text, limit).translate(_ESCAPES)


def short_unit(unit: str) -> str:
    """The last component of a fully qualified name, and the one before it where the last is a number."""
    parts = unit.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def short_name(name: str) -> str:
    """An operator's name without its namespace: ``aten::addmm`` → ``addmm``."""
    return name.rsplit("::", 1)[-1] or name
