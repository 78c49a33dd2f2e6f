"""A probe at loading: a model that would be silently wrong with deleted tokens in its rows is refused."""

from contextlib import suppress

import torch

from sequencematch.core import Trajectory, encode
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.decoding.decoder import Limits
from sequencematch.policy.decoding.decoder_probe import REFUSALS, check_equal, fresh_logits, probe_decoder, tolerance
from sequencematch.policy.scoring import Scorer


def select_attention(policy: Scorer) -> None:
    """Switch from SDPA to causal-prefix attention if the model computes the same with it; else probe the attention it has."""
    config = policy.base.config
    if config._attn_implementation == "sdpa" and policy.base._supports_attention_backend:
        config._attn_implementation = CAUSAL_PREFIX
        with suppress(*REFUSALS):
            probe(policy)
            return
        config._attn_implementation = "sdpa"
    probe(policy)


@torch.no_grad()
def probe(policy: Scorer) -> None:
    """Score and decode a dozen tokens with deletions; refuse a model whose logits are not those of passes over each state."""
    space, name = policy.space, type(policy.base).__name__
    drawn = torch.randint(0, space.vocab_size, (99,), generator=torch.Generator().manual_seed(0)).tolist()
    a, b, c, d, e, f, g, h, i = [token for token in drawn if token not in space.ends][:9]
    bk = space.bkspc
    trajectory = Trajectory.rollout(space, (a, b, c), (d, e, bk, f, g, bk, bk, bk, bk, h, i, space.eos))
    encoding = encode([trajectory], device=policy.device)
    states = [state.tokens for state in trajectory.states()]
    with policy.for_scoring():
        try:
            hidden = policy.encoded_hidden_states(encoding, encoding.visit[0], reorders_from=0)
        except REFUSALS as error:
            raise ValueError(
                f"{name} can't be given a mask with deleted tokens left out ({error}), so it can't delete. Use another model."
            ) from error
        fresh = fresh_logits(policy.base, policy.action_logits, states, space.vocab_size)
        encoded = policy.action_logits(hidden)[:, :-1].float()
        expected = torch.stack([fresh[state] for state in states])
        check_equal(name, "after tokens are deleted", encoded, expected, tolerance(policy.base))
        limits = Limits(space.eos, space.ends, space.bkspc, 1, 1)
        probe_decoder(policy.base, policy.action_logits, limits, space.vocab_size)
