"""Noise that teaches `<bkspc>`: wrong tokens pushed into data, each followed by its deletion (§4.2)."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sequencematch.core.mdp import ActionSpace, Trajectory

#: (clean steps, the actions chosen there, generator) → a wrong token for each.
NoiseSource = Callable[[Int[Tensor, "noisy"], Int[Tensor, "noisy"], torch.Generator], Int[Tensor, "noisy"]]


def token_noise(
    space: ActionSpace, tokens: Iterable[int] | Int[Tensor, "token"] | None = None, *, exclude_right: bool = True
) -> NoiseSource:
    """Uniform noise: over the vocabulary ("random noise"), or over `tokens` given for an example ("ground-truth noise")   (§6.1).

    Never `<eos>`, `<bos>` or padding, nor the right token: drawing it would teach the policy to delete right tokens.
    `exclude_right=False` restores the paper's plain draw.
    """
    given = range(space.vocab_size) if tokens is None else map(operator.index, tokens)
    candidates = sorted(set(given) - space.special)
    if len(candidates) < 1 + exclude_right:
        raise ValueError(
            f"`tokens` must hold at least {1 + exclude_right} besides <eos>, <bos> and padding, or there may be no wrong token "
            f"to draw. Got {candidates}."
        )
    if candidates[0] < 0 or candidates[-1] >= space.vocab_size:
        raise ValueError(
            f"`tokens` must hold token ids in [0, {space.vocab_size}); <bkspc> can't be noise. "
            f"Got ids from {candidates[0]} to {candidates[-1]}."
        )
    pool = torch.tensor(candidates)

    def draw(
        step: Int[Tensor, "noisy"], right: Int[Tensor, "noisy"], generator: torch.Generator
    ) -> Int[Tensor, "noisy"]:
        uniform = torch.rand(len(step), generator=generator, dtype=torch.float64)
        place = torch.searchsorted(pool, right).clamp(max=len(pool) - 1)
        skipped = (pool[place] == right) & exclude_right
        index = (uniform * (len(pool) - skipped.long())).long()
        return pool[index + (skipped & (index >= place))]

    return draw


def model_noise(space: ActionSpace, logits: Float[Tensor, "step vocab"], *, exclude_right: bool = True) -> NoiseSource:
    """The model's own mistakes: tokens drawn from its logits at the clean states s_0 … s_{T−1}   (suggested in App. G.2).

    `logits` may have a column for `<bkspc>`; like `<eos>`, `<bos>`, padding and the right token, it is never drawn.
    """
    if logits.ndim != 2 or logits.shape[1] not in (space.vocab_size, space.size):
        raise ValueError(
            f"`logits` must have {space.vocab_size} columns, or {space.size} with <bkspc>. Got shape {tuple(logits.shape)}."
        )
    never = torch.tensor(sorted(space.special))
    kept = logits.detach().cpu()[:, : space.vocab_size].float().index_fill(1, never, -torch.inf)

    def draw(
        step: Int[Tensor, "noisy"], right: Int[Tensor, "noisy"], generator: torch.Generator
    ) -> Int[Tensor, "noisy"]:
        if len(step) and int(step.max()) >= len(kept):
            raise ValueError(
                f"`logits` must have a row for every clean step: more than {int(step.max())}. Got {len(kept)}."
            )
        scores = kept[step]
        if exclude_right:
            scores = scores.masked_fill(torch.arange(space.vocab_size) == right[:, None], -torch.inf)
        if not bool(scores.amax(1).isfinite().all()):
            raise ValueError(
                "`logits` must leave some wrong token possible at every step. Got a row that is NaN or all -inf."
            )
        return torch.multinomial(scores.softmax(1), 1, generator=generator).squeeze(1) if len(step) else step

    return draw


def add_noise(
    trajectory: Trajectory, rate: float, source: NoiseSource, generator: torch.Generator, *, burst: int = 1
) -> Trajectory:
    """With probability η = `rate` per decision, push a wrong token w and delete it again   (§4.2).

    A clean step (s_t, a_t) becomes three visits: s_t with a_t chosen but w executed, s_t·w with `<bkspc>` chosen and
    executed, and s_t once more. Only decisions are touched, so a prompt in the initial state stays clean. With `burst` > 1
    that many wrong tokens are pushed in a row; once one is pushed, the right action is `<bkspc>`. The paper pushes one.
    """
    if not 0 <= rate <= 1:
        raise ValueError(
            f"`rate` must be a probability in [0, 1]. Got rate={rate}. The paper uses 0.001 for text and up to 0.2 for arithmetic."
        )
    if burst < 1:
        raise ValueError(f"`burst` must be at least 1 wrong token. Got burst={burst}.")
    if trajectory.floor > len(trajectory.initial):
        raise ValueError(
            f"`trajectory` must have a floor of at most its initial state, or noise could not be deleted again. "
            f"Got floor={trajectory.floor} above {len(trajectory.initial)} initial tokens. Add noise before `score_prompt`."
        )
    bkspc = trajectory.space.bkspc
    noisy = torch.rand(len(trajectory), generator=generator, dtype=torch.float64) < rate
    step = noisy.nonzero().squeeze(1).repeat_interleave(burst)
    right = torch.tensor(trajectory.chosen)[step]
    right[torch.arange(len(step)) % burst > 0] = bkspc
    wrong = iter(source(step, right, generator).view(-1, burst).tolist())

    chosen: list[int] = []
    executed: list[int] = []
    policy_chosen: list[bool] = []
    for t, is_noisy in enumerate(noisy.tolist()):
        if is_noisy:
            tokens = next(wrong)
            chosen += [trajectory.chosen[t]] + [bkspc] * (2 * burst - 1)
            executed += tokens + [bkspc] * burst
            policy_chosen += [False] * (2 * burst)
        chosen.append(trajectory.chosen[t])
        executed.append(trajectory.executed[t])
        policy_chosen.append(trajectory.policy_chosen[t])
    return replace(trajectory, chosen=tuple(chosen), executed=tuple(executed), policy_chosen=tuple(policy_chosen))
