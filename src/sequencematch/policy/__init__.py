"""A Hugging Face causal language model as p(a|s): scored in one pass, sampled with rollback, saved and exported."""

from sequencematch.policy.contrastive import contrastive_search
from sequencematch.policy.decoding.custom_generate import backtrack
from sequencematch.policy.generation import Generation
from sequencematch.policy.policy import Policy
from sequencematch.policy.sampling import Sampling, SamplingOptions

__all__ = ["Generation", "Policy", "Sampling", "SamplingOptions", "backtrack", "contrastive_search"]
