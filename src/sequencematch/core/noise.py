"""Noise that teaches `<bkspc>`: wrong tokens pushed into data, each followed by its deletion (§4.2)."""

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sequencematch.core.mdp import ActionSpace, Trajectory

#: (clean steps, the actions chosen there, generator) → a wrong token for each. Equal steps in a row are one burst.
NoiseSource = Callable[[Sequence[int], Sequence[int], torch.Generator], list[int]]


def token_noise(
    space: ActionSpace, tokens: Iterable[int] | Int[Tensor, "token"] | None = None, *, exclude_right: bool = True
) -> NoiseSource:
    """Uniform noise: over the vocabulary ("random noise"), or over `tokens` given for an example ("ground-truth noise")   (§6.1).

    Never `<eos>`, `<bos>` or padding, nor the right token: drawing it would teach the policy to delete right tokens.
    `exclude_right=False` restores the paper's plain draw.
    """
    candidates = _candidates("tokens", range(space.vocab_size) if tokens is None else tokens, space, 1 + exclude_right)
    return partial(_draw_tokens, candidates, exclude_right)


def step_noise(
    space: ActionSpace, tokens_by_step: Sequence[Iterable[int]], *, exclude_right: bool = True
) -> NoiseSource:
    """Noise that looks right where it stands: the i-th wrong token of a burst at step t is uniform over `tokens_by_step[t + i]`.

    The paper has one set of tokens for an example (§6.1). Behind the last list, as at `<eos>`, that list holds. A list may hold
    the right token, which is not drawn; where a list holds no other, the token is drawn from all lists together.
    `exclude_right=False` allows the right token.
    """
    every = _candidates("tokens_by_step", itertools.chain(*tokens_by_step), space, 1 + exclude_right)
    return partial(_draw_by_step, tokens_by_step, every, space.special, exclude_right)


def burst_end_noise(
    space: ActionSpace, source: NoiseSource, ends: Iterable[int] | Int[Tensor, "token"], *, exclude_right: bool = True
) -> NoiseSource:
    """Noise of `source`, but half of all bursts end in a token of `ends`: w_k ~ ½ source + ½ uniform over `ends`.

    The paper pushes one token at random (§4.2); such ends are knowledge of a task. An example: in a path through a graph
    every right answer ends in the goal, so other noise never contradicts a policy that jumps to the goal from a wrong node.
    The last token of a burst is never the right one: where `ends` holds no other, the burst keeps that of `source`.
    `exclude_right=False` allows the right one.
    """
    return partial(_draw_with_ends, source, _candidates("ends", ends, space, 1), exclude_right)


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

    def draw(steps: Sequence[int], rights: Sequence[int], generator: torch.Generator) -> list[int]:
        if max(steps) >= len(kept):
            raise ValueError(f"`logits` must have a row for every clean step: more than {max(steps)}. Got {len(kept)}.")
        scores = kept[torch.tensor(steps)]
        if exclude_right:
            is_right = torch.arange(space.vocab_size) == torch.tensor(rights)[:, None]
            scores = scores.masked_fill(is_right, -torch.inf)
        if not bool(scores.amax(1).isfinite().all()):
            raise ValueError(
                "`logits` must leave some wrong token possible at every step. Got a row that is NaN or all -inf."
            )
        return torch.multinomial(scores.softmax(1), 1, generator=generator).squeeze(1).tolist()

    return draw


def add_noise(
    trajectory: Trajectory, rate: float, source: NoiseSource, generator: torch.Generator, *, burst: int = 1
) -> Trajectory:
    """With probability η = `rate` per decision, push a wrong token w and delete it again   (§4.2).

    A clean step (s_t, a_t) becomes three visits: s_t with a_t chosen but w executed, s_t·w with `<bkspc>` chosen and
    executed, and s_t once more. Only decisions are touched, so a prompt in the initial state stays clean. With `burst` > 1
    the number of wrong tokens pushed in a row is uniform from 1 to `burst`; once one is pushed, the right action is `<bkspc>`.
    The paper pushes one.
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
    bkspc, right = trajectory.space.bkspc, trajectory.chosen
    uniform = torch.rand(len(trajectory), generator=generator, dtype=torch.float64).tolist()
    noisy = [t for t, u in enumerate(uniform) if u < rate]
    if not noisy:
        return trajectory
    lengths = (
        [1] * len(noisy) if burst == 1 else torch.randint(1, burst + 1, (len(noisy),), generator=generator).tolist()
    )
    steps: list[int] = []
    rights: list[int] = []
    for t, length in zip(noisy, lengths, strict=True):
        steps += [t] * length
        rights += [right[t]] + [bkspc] * (length - 1)
    wrong = source(steps, rights, generator)
    if len(wrong) != len(steps):
        raise ValueError(f"`source` must draw a token for each of {len(steps)} places. Got {len(wrong)}.")
    if min(wrong) < 0 or max(wrong) >= bkspc or not trajectory.space.special.isdisjoint(wrong):
        raise ValueError(
            f"`source` must draw token ids in [0, {bkspc}) other than <eos>, <bos> and padding: they are pushed and deleted "
            f"again. Got ids from {min(wrong)} to {max(wrong)}."
        )

    chosen: list[int] = []
    executed: list[int] = []
    policy_chosen: list[bool] = []
    begin = drawn = 0
    for t, length in zip(noisy, lengths, strict=True):
        chosen += right[begin : t + 1]
        chosen += [bkspc] * (2 * length - 1)
        executed += trajectory.executed[begin:t]
        executed += wrong[drawn : drawn + length]
        executed += [bkspc] * length
        policy_chosen += trajectory.policy_chosen[begin:t]
        policy_chosen += [False] * (2 * length)
        begin, drawn = t, drawn + length
    return Trajectory._unchecked(
        trajectory.space,
        trajectory.initial,
        (*chosen, *right[begin:]),
        (*executed, *trajectory.executed[begin:]),
        (*policy_chosen, *trajectory.policy_chosen[begin:]),
        trajectory.floor,
    )


def _draw_tokens(
    candidates: Sequence[int],
    exclude_right: bool,
    steps: Sequence[int],
    rights: Sequence[int],
    generator: torch.Generator,
) -> list[int]:
    uniform = torch.rand(len(steps), generator=generator, dtype=torch.float64).tolist()
    return [_pick(candidates, u, right, exclude_right) for u, right in zip(uniform, rights, strict=True)]


def _draw_by_step(
    tokens_by_step: Sequence[Iterable[int]],
    every: Sequence[int],
    special: Set[int],
    exclude_right: bool,
    steps: Sequence[int],
    rights: Sequence[int],
    generator: torch.Generator,
) -> list[int]:
    uniform = torch.rand(len(steps), generator=generator, dtype=torch.float64).tolist()
    places = (step + i for step, burst in itertools.groupby(steps) for i, _ in enumerate(burst))
    drawn = []
    for place, right, u in zip(places, rights, uniform, strict=True):
        here = sorted(set(map(operator.index, tokens_by_step[min(place, len(tokens_by_step) - 1)])) - special)
        has_wrong = bool(here) and not (exclude_right and here == [right])
        drawn.append(_pick(here if has_wrong else every, u, right, exclude_right))
    return drawn


def _draw_with_ends(
    source: NoiseSource,
    ends: list[int],
    exclude_right: bool,
    steps: Sequence[int],
    rights: Sequence[int],
    generator: torch.Generator,
) -> list[int]:
    wrong = source(steps, rights, generator)
    last = [i for i, after in enumerate((*steps[1:], None)) if steps[i] != after]
    uniform = torch.rand(len(last), 2, generator=generator, dtype=torch.float64).tolist()
    for i, (coin, u) in zip(last, uniform, strict=True):
        if coin < 0.5 and not (exclude_right and ends == [rights[i]]):
            wrong[i] = _pick(ends, u, rights[i], exclude_right)
    return wrong


def _candidates(name: str, tokens: Iterable[int] | Tensor, space: ActionSpace, least: int) -> list[int]:
    """The tokens that may be drawn, sorted, each once: without <eos>, <bos> and padding, and at least `least`."""
    candidates = sorted(set(map(operator.index, tokens)) - space.special)
    if len(candidates) < least:
        raise ValueError(
            f"`{name}` must hold at least {least} besides <eos>, <bos> and padding, or there may be no wrong token "
            f"to draw. Got {candidates}."
        )
    if candidates[0] < 0 or candidates[-1] >= space.vocab_size:
        raise ValueError(
            f"`{name}` must hold token ids in [0, {space.vocab_size}); <bkspc> can't be noise. "
            f"Got ids from {candidates[0]} to {candidates[-1]}."
        )
    return candidates


def _pick(candidates: Sequence[int], uniform: float, right: int, exclude_right: bool) -> int:
    """The candidate at a uniform number in [0, 1), with the right token left out of the sorted candidates if excluded."""
    place = bisect_left(candidates, right)
    skips = exclude_right and place < len(candidates) and candidates[place] == right
    index = int(uniform * (len(candidates) - skips))
    return candidates[index + (skips and index >= place)]
