"""Metrics, timing, intervals and reports of scored trajectories. No JAX."""

from jaxguard.evaluation.evaluate import Baseline, Evaluation, evaluate
from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.report import ReportError, write_report
from jaxguard.evaluation.table import render

__all__ = ["Baseline", "Evaluation", "EvaluationError", "ReportError", "evaluate", "render", "write_report"]
