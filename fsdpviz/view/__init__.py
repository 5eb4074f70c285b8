"""What is seen: timelines, tables and a page, drawn from a Trace and from what the analyses found."""

from .compare_timeline import compare_timeline
from .page import Highlight, Section, SettingsTable, write_page
from .report_table import ComparisonTable, ReportTable
from .timeline import timeline

__all__ = [
    "ComparisonTable",
    "Highlight",
    "ReportTable",
    "Section",
    "SettingsTable",
    "compare_timeline",
    "timeline",
    "write_page",
]
