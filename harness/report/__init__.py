"""``report.html`` of a run: what it says, what it rests on, and how far it may be believed."""

from harness.report.document import write_report

__all__ = ["write_report"]
