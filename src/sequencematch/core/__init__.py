"""The paper's definitions, as pure functions of tensors and frozen values. Needs torch, but no Hugging Face package."""

from sequencematch.core.divergences import CHI2_MIXTURE, DIVERGENCES, Divergence
from sequencematch.core.encoding import Encoding, attend, encode
from sequencematch.core.integral_metrics import INTEGRAL_METRICS, IntegralMetric, Points
from sequencematch.core.mdp import ActionSpace, State, Trajectory, step
from sequencematch.core.noise import NoiseSource, add_noise, burst_end_noise, model_noise, step_noise, token_noise
from sequencematch.core.objectives import (
    Scores,
    SequenceMatchLoss,
    bc_loss,
    mle_loss,
    repeat_candidates,
    repeated_ngrams,
    sequence_unlikelihood_loss,
    sequencematch_loss,
    unlikelihood_loss,
)

__all__ = [
    "CHI2_MIXTURE",
    "DIVERGENCES",
    "INTEGRAL_METRICS",
    "ActionSpace",
    "Divergence",
    "Encoding",
    "IntegralMetric",
    "NoiseSource",
    "Points",
    "Scores",
    "SequenceMatchLoss",
    "State",
    "Trajectory",
    "add_noise",
    "attend",
    "bc_loss",
    "burst_end_noise",
    "encode",
    "mle_loss",
    "model_noise",
    "repeat_candidates",
    "repeated_ngrams",
    "sequence_unlikelihood_loss",
    "sequencematch_loss",
    "step",
    "step_noise",
    "token_noise",
    "unlikelihood_loss",
]
