"""A report of a compiled network: facts of its plan (``schema.py``) → one HTML page that needs nothing else."""

from souffle.report.facts import report_of
from souffle.report.page import page_of
from souffle.report.schema import FORMAT, Report, TeFacts

__all__ = ["FORMAT", "Report", "TeFacts", "page_of", "report_of"]
