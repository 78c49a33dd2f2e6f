"""Algorithm 1: data with noise, rollouts from a replay buffer, the loss of Eq. 4, and its baselines."""

from sequencematch.training.callbacks import NonFiniteError
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.stopping import StoppedEarlyError
from sequencematch.training.trainer import SequenceMatchTrainer

__all__ = ["NonFiniteError", "SequenceMatchConfig", "SequenceMatchTrainer", "StoppedEarlyError"]
