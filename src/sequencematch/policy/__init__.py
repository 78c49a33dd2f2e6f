"""A Hugging Face causal language model as p(a|s): scored in one pass, sampled with deletions, saved and exported."""

from typing import TYPE_CHECKING

from sequencematch.lazy import lazy

if TYPE_CHECKING:
    from sequencematch.policy.contrastive import contrastive_search
    from sequencematch.policy.decoding.custom_generate import backtrack
    from sequencematch.policy.generation import Generation
    from sequencematch.policy.policy import Policy
    from sequencematch.policy.sampling import Sampling, SamplingOptions

__all__ = ["Generation", "Policy", "Sampling", "SamplingOptions", "backtrack", "contrastive_search"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Generation": "sequencematch.policy.generation",
        "Policy": "sequencematch.policy.policy",
        "Sampling": "sequencematch.policy.sampling",
        "SamplingOptions": "sequencematch.policy.sampling",
        "backtrack": "sequencematch.policy.decoding.custom_generate",
        "contrastive_search": "sequencematch.policy.contrastive",
    },
)
