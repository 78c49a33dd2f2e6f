"""A cost model of a run on given hardware: its step, its memory and its rollouts, from measured constants."""

from sequencematch.training.planning.costs import Workload
from sequencematch.training.planning.hardware import HARDWARE, Hardware
from sequencematch.training.planning.plan import Plan, plan
from sequencematch.training.planning.shapes import SHAPES, Shape, shape_of

__all__ = ["HARDWARE", "SHAPES", "Hardware", "Plan", "Shape", "Workload", "plan", "shape_of"]
