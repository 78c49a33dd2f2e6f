"""Where rollouts come from: the policy itself between two steps, or workers that hold copies of it   (Alg. 1)."""

from sequencematch.training.rollouts.prompts import as_stored, correction, is_right, prompt_of, right_action
from sequencematch.training.rollouts.source import InlineRollouts, Request, RolloutSource

__all__ = [
    "InlineRollouts",
    "Request",
    "RolloutSource",
    "as_stored",
    "correction",
    "is_right",
    "prompt_of",
    "right_action",
]
