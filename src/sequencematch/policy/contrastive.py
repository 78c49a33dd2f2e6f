"""Contrastive search (Su et al. 2022), a baseline of the paper that penalises repetition and never deletes (§6.2)."""

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize
from transformers import DynamicCache

from sequencematch.core.mdp import Trajectory
from sequencematch.policy.attention import cache_mask
from sequencematch.policy.generation import prompt_tokens
from sequencematch.policy.sampling import Sampling
from sequencematch.policy.scoring import Scorer


def contrastive_search(
    policy: Scorer, prompt: Sequence[int], *, max_new_tokens: int, top_k: int = 4, penalty_alpha: float = 0.6
) -> Trajectory:
    """argmax over the k likeliest x of (1 − α) p(x|s) − α max_j cos(h_x, h_j), with h_j the hidden vectors of the context.

    `<bkspc>` is left out. Each token takes one forward pass over k candidates.
    """
    (found,) = contrastive_searches(
        policy, [prompt], max_new_tokens=max_new_tokens, top_k=top_k, penalty_alpha=penalty_alpha
    )
    return found


@torch.no_grad()
def contrastive_searches(
    policy: Scorer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, top_k: int = 4, penalty_alpha: float = 0.6
) -> list[Trajectory]:
    """`contrastive_search` from prompts of one length, side by side. Rows that have ended compute until the last one ends."""
    if not 1 <= top_k <= policy.space.vocab_size:
        raise ValueError(
            f"`top_k` must lie between 1 and the vocabulary's size: it is the number of candidates. Got {top_k}."
        )
    if not 0 <= penalty_alpha <= 1:
        raise ValueError(
            f"`penalty_alpha` must lie in [0, 1]: it weighs repetition against likelihood. Got {penalty_alpha}."
        )
    lengths = sorted({len(prompt) for prompt in prompts})
    if len(lengths) != 1:
        raise ValueError(f"`prompts` must be at least one, all of one length: they share a cache. Got {lengths}.")
    sampling = Sampling(max_new_tokens=max_new_tokens)
    given = [prompt_tokens(policy, prompt, sampling, room_for_end=True) for prompt in prompts]
    config, device, cache = policy.base.config, policy.device, DynamicCache()
    unembedding = policy.unembedding()

    def forward(tokens: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + tokens.shape[1], device=device).expand(len(tokens), -1)
        seen = torch.arange(first + tokens.shape[1], device=device).expand(len(tokens), -1)
        mask = cache_mask(config, seen[:, None, :] <= positions[:, :, None], seen, positions, policy.base.dtype)
        return policy.hidden_states(tokens, mask, positions, past_key_values=cache, use_cache=True).last_hidden_state

    context = forward(torch.tensor(given, device=device), 0)
    last, directions = context[:, -1], normalize(context.float(), dim=-1)
    rows = torch.arange(len(given), device=device)
    ends = torch.tensor(sorted(policy.space.ends), device=device)
    chosen, ended = list[torch.Tensor](), torch.zeros(len(given), dtype=torch.bool, device=device)
    while len(chosen) <= max_new_tokens and not bool(ended.all()):
        probability, candidates = unembedding.logits(last).softmax(-1).topk(top_k)
        cache.batch_repeat_interleave(top_k)
        hidden = forward(candidates.reshape(-1, 1), lengths[0] + len(chosen)).reshape(len(given), top_k, -1)
        cosine = normalize(hidden.float(), dim=-1) @ directions.mT
        best = ((1 - penalty_alpha) * probability - penalty_alpha * cosine.amax(-1)).argmax(-1)
        chosen.append(candidates[rows, best])
        ended |= torch.isin(chosen[-1], ends)
        cache.batch_select_indices(rows * top_k + best)
        last = hidden[rows, best]
        directions = torch.cat([directions, normalize(last.float(), dim=-1)[:, None]], 1)
    written = torch.stack(chosen, 1).tolist()
    return [
        Trajectory.rollout(policy.space, prompt, _until_end(actions, policy.space.ends))
        for prompt, actions in zip(given, written, strict=True)
    ]


def _until_end(actions: list[int], ends: frozenset[int]) -> list[int]:
    """The actions up to the first that ends the text."""
    last = next((place for place, action in enumerate(actions) if action in ends), len(actions))
    return actions[: last + 1]
