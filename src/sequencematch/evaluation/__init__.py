"""Evaluation of a policy on a task: generations, measures, and one record of both with all settings."""

from sequencematch.evaluation.evaluate import describe_saved, documentation, evaluate
from sequencematch.evaluation.options import find_task
from sequencematch.evaluation.record import Record
from sequencematch.evaluation.registry import METRICS, Evidence, Metric, metric_names
from sequencematch.evaluation.report import report, save, table
from sequencematch.evaluation.samples import Sample

__all__ = [
    "METRICS",
    "Evidence",
    "Metric",
    "Record",
    "Sample",
    "describe_saved",
    "documentation",
    "evaluate",
    "find_task",
    "metric_names",
    "report",
    "save",
    "table",
]
