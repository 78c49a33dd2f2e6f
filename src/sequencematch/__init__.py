"""SequenceMatch: language models that can delete what they wrote (Cundy & Ermon, ICLR 2024)."""

from typing import TYPE_CHECKING

from sequencematch.lazy import lazy

if TYPE_CHECKING:
    from sequencematch.policy import Policy as Policy
    from sequencematch.policy import backtrack as generate
    from sequencematch.training import SequenceMatchConfig as SequenceMatchConfig
    from sequencematch.training import SequenceMatchTrainer as SequenceMatchTrainer

__version__ = "0.1.0"
__all__ = ["Policy", "SequenceMatchConfig", "SequenceMatchTrainer", "__version__", "generate"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Policy": "sequencematch.policy",
        "SequenceMatchConfig": "sequencematch.training",
        "SequenceMatchTrainer": "sequencematch.training",
        "generate": "sequencematch.policy:backtrack",  # for `custom_generate=`
    },
)
