"""Records of the speed benchmarks as tables, the comparison of two runs, and a report. No JAX, no torch."""

from jaxguard.benchmarks.compare import compare, render_comparison
from jaxguard.benchmarks.records import RecordsError, Run, read_run
from jaxguard.benchmarks.report import write_report

__all__ = ["RecordsError", "Run", "compare", "read_run", "render_comparison", "write_report"]
