"""Floor 5: figures and the report page, from records and tables alone."""

from kvpress_prob.plots.report import write_report

__all__ = ["write_report"]
