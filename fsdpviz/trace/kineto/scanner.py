"""The door to the compiled scanner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

from .scanned import Scanned

try:
    _scan = import_module(f"{__package__}.scan")  # not a module that import-linter could look for
except ImportError:  # there was no compiler: see its [Note: one language, two readers]
    _scan = None


class Scanner(Protocol):
    """Scans blocks of one file; the same text has the same code in all of them."""

    def scan(self, text: bytes, start: int, is_inside: bool, /) -> Scanned:
        """The whole events of the text from ``start`` on. ``is_inside`` says that an event came before, so that a comma
        comes first.
        """
        ...


def scanner_of(codes: Sequence[Mapping[str, int]]) -> Scanner | None:
    """A scanner for one file; None where fsdpviz was installed without a compiler. ``codes``, of category, name,
    process and thread, number a text when it is new.
    """
    return None if _scan is None else _scan.Scanner(codes)


def is_compiled() -> bool:
    """False where there was no compiler when fsdpviz was installed."""
    return _scan is not None
