"""A probe at loading: a model that would be silently wrong with deleted tokens in its rows is refused."""

from contextlib import suppress

import torch

from sequencematch.core import Trajectory, encode
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.scoring import Scorer


def select_attention(policy: Scorer) -> None:
    """Switch from SDPA to causal-prefix attention if the model computes the same with it; else probe the attention it has."""
    config = policy.base.config
    if config._attn_implementation == "sdpa" and policy.base._supports_attention_backend:
        config._attn_implementation = CAUSAL_PREFIX
        with suppress(ValueError):
            probe(policy)
            return
        config._attn_implementation = "sdpa"
    probe(policy)


@torch.no_grad()
def probe(policy: Scorer) -> None:
    """Compare one pass over a dozen nodes with deletions to a pass over each state alone; refuse a model where they differ."""
    space, name = policy.space, type(policy.base).__name__
    tokens = torch.randint(0, space.vocab_size, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    a, b, c, d, e, f, g, h, i = (token + (token == space.eos) * (1 if space.eos == 0 else -1) for token in tokens)
    bk = space.bkspc
    trajectory = Trajectory.rollout(space, (a, b, c), (d, e, bk, f, g, bk, bk, bk, bk, h, i, space.eos))
    encoding = encode([trajectory], device=policy.device)
    states = [torch.tensor([state.tokens], device=policy.device) for state in trajectory.states()]
    try:
        with policy.for_scoring():
            hidden = policy.encoded_hidden_states(encoding, encoding.visit[0], reorders_from=0)
            encoded = policy.action_logits(hidden)[:, :-1]
            alone = [policy.model(input_ids=tokens).logits[0, -1, : space.vocab_size] for tokens in states]
        fresh = torch.stack(alone).to(encoded.dtype)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{name} can't be given a mask with deleted tokens left out ({error}), so it can't delete. Use another model."
        ) from error
    # Rounding is at most a few times the dtype's; a mask that is not honoured changes logits in the first or second digit.
    # Quantised layers may compute in another dtype than the model's.
    dtypes = {policy.base.dtype, *(getattr(layer, "compute_dtype", None) for layer in policy.base.modules())} - {None}
    tolerance = 1e-4 if dtypes <= {torch.float32, torch.float64} else 0.05
    error_size = float((encoded - fresh).norm() / fresh.norm())
    if not error_size <= tolerance:
        raise ValueError(
            f"{name} gives other logits when tokens are deleted from its context than when they were never there: relative "
            f"difference {error_size:.1g}, at most {tolerance:g} is rounding. It can't be used as a policy."
        )
