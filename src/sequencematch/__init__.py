"""SequenceMatch: language models that can delete what they wrote (Cundy & Ermon, ICLR 2024)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequencematch.policy import Policy as Policy
    from sequencematch.policy import backtrack as generate

__version__ = "0.1.0"
__all__ = ["Policy", "__version__", "generate"]

_LAZY = {"Policy": "Policy", "generate": "backtrack"}


def __getattr__(name: str) -> Any:
    """`Policy`, and `generate` for `custom_generate=`: looked up on first use, since they import transformers."""
    if name in _LAZY:
        from sequencematch import policy

        return getattr(policy, _LAZY[name])
    raise AttributeError(f"module 'sequencematch' has no attribute {name!r}")
