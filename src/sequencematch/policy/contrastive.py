"""Contrastive search (Su et al. 2022), a baseline of the paper that penalises repetition and never deletes (§6.2)."""

import torch
from transformers import DynamicCache

from sequencematch.core.mdp import Trajectory
from sequencematch.policy.attention import cache_mask
from sequencematch.policy.generation import prompt_tokens
from sequencematch.policy.sampling import Sampling
from sequencematch.policy.scoring import Scorer


@torch.no_grad()
def contrastive_search(
    policy: Scorer, prompt: list[int], *, max_new_tokens: int, top_k: int = 4, penalty_alpha: float = 0.6
) -> Trajectory:
    """argmax over the k likeliest x of (1 − α) p(x|s) − α max_j cos(h_x, h_j), with h_j the hidden vectors of the context.

    `<bkspc>` is left out. Each token takes one forward pass over k candidates.
    """
    if not 1 <= top_k <= policy.space.vocab_size:
        raise ValueError(
            f"`top_k` must lie between 1 and the vocabulary's size: it is the number of candidates. Got {top_k}."
        )
    if not 0 <= penalty_alpha <= 1:
        raise ValueError(
            f"`penalty_alpha` must lie in [0, 1]: it weighs repetition against likelihood. Got {penalty_alpha}."
        )
    prompt = prompt_tokens(policy, prompt, Sampling(max_new_tokens=max_new_tokens), room_for_end=True)
    config, device, cache = policy.base.config, policy.device, DynamicCache()
    unembedding = policy.unembedding()

    def forward(tokens: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + tokens.shape[1], device=device).expand(len(tokens), -1)
        seen = torch.arange(first + tokens.shape[1], device=device).expand(len(tokens), -1)
        mask = cache_mask(config, seen[:, None, :] <= positions[:, :, None], seen, positions, policy.base.dtype)
        return policy.hidden_states(tokens, mask, positions, past_key_values=cache, use_cache=True).last_hidden_state

    context = forward(torch.tensor([prompt], device=device), 0)[0]
    tokens = list(prompt)
    while True:
        probability, candidates = unembedding.logits(context[-1]).softmax(-1).topk(top_k)
        cache.batch_repeat_interleave(top_k)
        hidden = forward(candidates[:, None], len(tokens))[:, 0]
        similarity = torch.nn.functional.cosine_similarity(hidden[:, None].float(), context[None].float(), dim=-1).amax(
            1
        )
        best = int(((1 - penalty_alpha) * probability - penalty_alpha * similarity).argmax())
        token = int(candidates[best])
        tokens.append(token)
        if token in policy.space.ends or len(tokens) - len(prompt) > max_new_tokens:
            return Trajectory.rollout(policy.space, prompt, tokens[len(prompt) :])
        cache.batch_select_indices(torch.tensor([best], device=device))
        context = torch.cat([context, hidden[best : best + 1]])
