"""Perplexity of held-out text under a policy that may also delete."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.metrics.bootstrap import METHOD, check_some, interval_of_ratio
from sequencematch.metrics.measure import Measure, signature

Bkspc = Literal["left out", "kept"]


def perplexity(
    log_probs: Sequence[Float[Tensor, "_"] | Float[np.ndarray, "_"]],
    *,
    bkspc: Bkspc,
) -> Measure:
    """exp(−Σ log p / Σ tokens), both sums over all tokens of all sequences: the perplexity per token, not per sequence.

    `log_probs` has one array per sequence, with the natural log p of each of its tokens, and of `<eos>` if it was scored.
    `bkspc` says how p was normalised, which the numbers themselves do not show:

    - "left out": over the vocabulary, p(x|s) / (1 − p(<bkspc>|s)). Comparable with a plain language model.
    - "kept": over vocabulary and `<bkspc>`. Probability of deleting right text counts against the policy.

    The interval resamples whole sequences, since the tokens of one depend on each other.
    """
    if bkspc not in get_args(Bkspc):
        raise ValueError(f"`bkspc` must be 'left out' or 'kept'. Got bkspc={bkspc!r}.")
    check_some("log_probs", len(log_probs))
    sequences = [torch.as_tensor(sequence, dtype=torch.float64) for sequence in log_probs]
    tokens = np.array([len(sequence) for sequence in sequences], dtype=np.float64)
    losses = np.array([-float(sequence.sum()) for sequence in sequences], dtype=np.float64)
    if not tokens.all():
        raise ValueError(
            f"`log_probs` must hold at least one token per sequence. Got none in sequence {int(tokens.argmin())}."
        )
    if not np.isfinite(losses).all() or losses.sum() < 0:
        raise ValueError(
            f"`log_probs` must hold finite log-probabilities, so their sum is at most 0. Got a sum of {-losses.sum():g}; "
            f"negate losses first."
        )
    low, high = np.exp(interval_of_ratio(losses, tokens))
    facts = {
        "<bkspc>": bkspc,
        "per": "token",
        "tokens": int(tokens.sum()),
        "ratio": "sums over sequences",
        "n": len(sequences),
        "interval": METHOD,
    }
    value = float(np.exp(losses.sum() / tokens.sum()))
    return Measure("perplexity", value, float(low), float(high), len(sequences), signature("perplexity", facts))
