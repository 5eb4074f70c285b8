"""What a recording means: frozen values with units in their names, and the intervals behind each."""

from .breakdown import StepBreakdown
from .compare import Comparison, compare
from .report import Mean, Measures, Report, report

__all__ = ["Comparison", "Mean", "Measures", "Report", "StepBreakdown", "compare", "report"]
