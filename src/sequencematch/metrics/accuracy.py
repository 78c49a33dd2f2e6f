"""Accuracy, the measure of the arithmetic tasks (§6.1, App. G)."""

from collections.abc import Sequence

import numpy as np

from sequencematch.metrics.bootstrap import check_some
from sequencematch.metrics.measure import Measure, mean_of


def accuracy(is_right: Sequence[bool]) -> Measure:
    """The share of right answers among all questions, unanswered ones included: between 0 and 1   (§6.1).

    The task decides which answers are right: by default those equal to the completion, ignoring surrounding spaces.
    """
    check_some("is_right", len(is_right))
    return mean_of("accuracy", np.array(is_right, dtype=np.float64), {"mean": "questions"})
