"""What was recorded: one reader a format, and one table of spans that they all fill."""

from .opener import open_trace
from .table import Note, Trace

__all__ = ["Note", "Trace", "open_trace"]
