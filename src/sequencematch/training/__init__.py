"""Algorithm 1: data with noise, rollouts from a replay buffer, the loss of Eq. 4, and its baselines."""

from typing import TYPE_CHECKING

from sequencematch.lazy import lazy

if TYPE_CHECKING:
    from sequencematch.training.callbacks import NonFiniteError
    from sequencematch.training.config import SequenceMatchConfig
    from sequencematch.training.stopping import StoppedEarlyError
    from sequencematch.training.trainer import SequenceMatchTrainer

__all__ = ["NonFiniteError", "SequenceMatchConfig", "SequenceMatchTrainer", "StoppedEarlyError"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "NonFiniteError": "sequencematch.training.callbacks",
        "SequenceMatchConfig": "sequencematch.training.config",
        "SequenceMatchTrainer": "sequencematch.training.trainer",
        "StoppedEarlyError": "sequencematch.training.stopping",
    },
)
