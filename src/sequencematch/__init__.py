"""SequenceMatch: language models that can delete what they wrote (Cundy & Ermon, ICLR 2024)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequencematch.policy import Policy as Policy
    from sequencematch.policy import backtrack as generate
    from sequencematch.training import SequenceMatchConfig as SequenceMatchConfig
    from sequencematch.training import SequenceMatchTrainer as SequenceMatchTrainer

__version__ = "0.1.0"
__all__ = ["Policy", "SequenceMatchConfig", "SequenceMatchTrainer", "__version__", "generate"]

#: What is looked up on first use, since it imports transformers: its module, and its name there.
_LAZY = {
    "Policy": ("sequencematch.policy", "Policy"),
    "SequenceMatchConfig": ("sequencematch.training", "SequenceMatchConfig"),
    "SequenceMatchTrainer": ("sequencematch.training", "SequenceMatchTrainer"),
    "generate": ("sequencematch.policy", "backtrack"),
}


def __getattr__(name: str) -> Any:
    """`Policy`, the trainer and its configuration, and `generate` for `custom_generate=`."""
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'sequencematch' has no attribute {name!r}")
