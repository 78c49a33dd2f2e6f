"""Sampling from a policy, with deletions: batches of ragged prompts in, trajectories out (§4.1)."""

import numbers
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import chat_prompt
from sequencematch.data.pieces import text_behind
from sequencematch.policy.decoding.choice import uniforms
from sequencematch.policy.decoding.cuda_graphs import GraphDecoder, addresses, can_capture
from sequencematch.policy.decoding.decoder import ActionEvent, Decoder, Limits
from sequencematch.policy.display import decoder, plain
from sequencematch.policy.sampling import Sampling
from sequencematch.policy.scoring import Scorer

#: Text, token ids (a list, tensor or array), or the messages of a conversation, dicts with role and content.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Tensor | numpy.ndarray
#: The share of slots that must be free before waiting prompts start: a pass over one prompt costs almost as much as over many.
REFILL = 1 / 8
#: Prompt lengths are rounded up to a multiple of this, so that few CUDA graphs are captured.
PROMPT_STEP = 64


@dataclass(frozen=True)
class Rollout:
    """A row that has ended: its number, its trajectory, and a log-probability and a value per action."""

    row: int
    trajectory: Trajectory
    log_probs: Float[Tensor, "step"]
    values: Float[Tensor, "step"]
    forward_passes: int  # of all rows so far


@dataclass(frozen=True)
class Generation:
    """Results row by row: final text, everything written, trajectory, scores; and the cost of all rows.

    `texts` holds the text after the part of the prompt that was not deleted. `actions` spells out what was written and deleted,
    as ` 2 9<bkspc> 7<eos>`. `log_probs` and `values` have one entry per action.
    """

    texts: list[str]
    actions: list[str]
    trajectories: list[Trajectory]
    log_probs: list[Float[Tensor, "_"]]
    values: list[Float[Tensor, "_"]]
    seconds: float
    forward_passes: int

    @property
    def actions_per_second(self) -> float:
        """Throughput, deletions counted."""
        return sum(map(len, self.trajectories)) / self.seconds


def generate(
    policy: Scorer, prompts: Sequence[Prompt], sampling: Sampling, *, batch_size: int = 64, progress: bool = False
) -> Generation:
    """Roll the policy out from each prompt   (Alg. 1, populate B)."""
    start = time.perf_counter()
    ended = tqdm(
        rollouts(policy, prompts, sampling, batch_size, room_for_end=True),
        total=len(prompts),
        disable=not progress,
        unit="prompt",
    )
    rows = sorted(ended, key=lambda rollout: rollout.row)
    return Generation(
        texts=[completion(policy, rollout.trajectory) for rollout in rows],
        actions=[written(policy, rollout.trajectory) for rollout in rows],
        trajectories=[rollout.trajectory for rollout in rows],
        log_probs=[rollout.log_probs for rollout in rows],
        values=[rollout.values for rollout in rows],
        seconds=time.perf_counter() - start,
        forward_passes=max(rollout.forward_passes for rollout in rows),
    )


def rollouts(
    policy: Scorer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch_size: int = 64,
    *,
    rows: Sequence[int] | None = None,
    room_for_end: bool = False,
) -> Iterator[Rollout]:
    """Rows as they end. They start in order of prompt length. Batch composition affects results only through rounding.

    A row's number, from `rows` or counted from 0, fixes its random numbers: parts of one job can run in several places, or later.
    """
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt. Got none.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1. Got {batch_size}.")
    row_numbers = range(len(prompts)) if rows is None else rows
    if len(row_numbers) != len(prompts):
        raise ValueError(f"`rows` must have one number per prompt. Got {len(row_numbers)} for {len(prompts)}.")
    tokens = [prompt_tokens(policy, prompt, sampling, room_for_end=room_for_end) for prompt in prompts]
    return _rollouts(policy, tokens, row_numbers, sampling, batch_size)


def _rollouts(
    policy: Scorer, tokens: list[list[int]], row_numbers: Sequence[int], sampling: Sampling, batch_size: int
) -> Iterator[Rollout]:
    seed = int(torch.randint(2**31, ())) if sampling.seed is None else sampling.seed
    waiting = sorted(range(len(tokens)), key=lambda row: (len(tokens[row]), row), reverse=True)  # popped from the end
    slots = min(batch_size, len(tokens))
    with _decoder(policy, sampling, slots, max(map(len, tokens))) as decoder:
        while waiting or any(number is not None for number in decoder.numbers):
            free = decoder.free()
            if waiting and len(free) >= REFILL * slots:
                starting = [waiting.pop() for _ in range(min(len(free), len(waiting)))]
                _fill(decoder, free, starting, tokens, row_numbers, seed)
            decoder.advance()
            for row, chosen, log_probs, values in decoder.ended():
                floor = len(tokens[row]) if sampling.protect_prompt else 1
                trajectory = Trajectory.rollout(policy.space, tokens[row], chosen, floor)
                yield Rollout(row_numbers[row], trajectory, log_probs, values, decoder.forwards)
            if not waiting:
                decoder.drop_ended()


def stream(policy: Scorer, prompt: Prompt, sampling: Sampling) -> Iterator[ActionEvent]:
    """Every action as it happens."""
    seed = int(torch.randint(2**31, ())) if sampling.seed is None else sampling.seed
    tokens = prompt_tokens(policy, prompt, sampling, room_for_end=True)
    with _decoder(policy, sampling, 1, len(tokens), watched=True) as decoder:
        _fill(decoder, [0], [0], [tokens], [0], seed)
        yield from decoder.run()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many → a list of prompts. The rows of a 2-D tensor or array are prompts without padding."""
    found: Any = _as_list(prompts)
    if isinstance(found, Mapping):
        raise ValueError(
            f"`prompts` must be text, token ids, or a list of messages. Got a mapping with {', '.join(found)}."
        )
    is_one = isinstance(found, str) or (
        len(found) > 0 and (isinstance(found[0], Mapping | numbers.Number) or getattr(found[0], "ndim", None) == 0)
    )
    return [found] if is_one else list(found)


def _as_list(prompt: Any) -> Any:
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def prompt_tokens(policy: Scorer, prompt: Prompt, sampling: Sampling, *, room_for_end: bool = False) -> list[int]:
    """A prompt's token ids, checked against the vocabulary and the context, where `<eos>` needs room if it is to be scored."""
    prompt = _as_list(prompt)
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str) or is_chat:
        if policy.tokenizer is None:
            raise ValueError(
                "`prompts` must be lists of token ids: this policy was made without a tokenizer. Got text."
            )
        text = chat_prompt(cast(Any, prompt), policy.tokenizer) if is_chat else prompt
        ids = list(policy.tokenizer(text, add_special_tokens=not is_chat)["input_ids"])
        if not ids and policy.space.bos is not None:
            ids = [policy.space.bos]
    else:
        try:
            ids = [operator.index(token) for token in cast(Any, prompt)]
        except TypeError as error:
            raise ValueError(
                f"`prompts` must be text, token ids, which are whole numbers, or messages. Got {prompt!r}."
            ) from error
    if not ids:
        raise ValueError(
            "`prompts` must not be empty: the policy needs a state to act in. Got a prompt without a token and no <bos>."
        )
    if min(ids) < 0 or max(ids) >= policy.space.vocab_size:
        raise ValueError(
            f"`prompts` must hold token ids in [0, {policy.space.vocab_size}). Got {min(ids)} to {max(ids)}."
        )
    if len(ids) + sampling.max_new_tokens + room_for_end > policy.max_positions:
        raise ValueError(
            f"`prompts` and `max_new_tokens` must fit the model's context of {policy.max_positions} tokens"
            f"{', with room for <eos>' if room_for_end else ''}. "
            f"Got a prompt of {len(ids)} and max_new_tokens={sampling.max_new_tokens}. Shorten one of them."
        )
    return ids


def completion(policy: Scorer, trajectory: Trajectory) -> str:
    """The text after the part of the prompt that was not deleted, without `<eos>`; empty without a tokenizer."""
    if policy.tokenizer is None:
        return ""
    decode = partial(policy.tokenizer.decode, skip_special_tokens=True)
    return text_behind(decode, *trajectory.final_parts)


def written(policy: Scorer, trajectory: Trajectory) -> str:
    """Everything written and deleted, spelled out; as token ids without a tokenizer."""
    return trajectory.render() if policy.tokenizer is None else plain(trajectory, decoder(policy.tokenizer))


@contextmanager
def _decoder(
    policy: Scorer, sampling: Sampling, slots: int, longest_prompt: int, *, watched: bool = False
) -> Iterator[Decoder]:
    """A decoder with all slots free; on a GPU one that replays CUDA graphs, where a step needs nothing from the host."""
    space, choice = policy.space, sampling.choice()
    limits = Limits(
        eos=space.eos,
        ends=space.ends,
        bkspc=space.bkspc,
        max_new_tokens=sampling.max_new_tokens,
        max_actions=sampling.action_limit,
        min_new_tokens=sampling.min_new_tokens,
        protect_prompt=sampling.protect_prompt,
        hold_back=sampling.hold_back,
        self_loops=sampling.self_loops,
        stop_tokens=frozenset(sampling.stop_tokens),
    )

    def make(kind: type[Decoder]) -> Any:
        return kind(policy.base, policy.action_logits, limits, choice, slots=slots, longest_prompt=longest_prompt)

    if watched or choice.process is not None or not can_capture(policy, policy.base):
        yield make(Decoder)
        return
    longest_prompt = -(-longest_prompt // PROMPT_STEP) * PROMPT_STEP
    # A graph captured under autocast or in inference mode holds tensors of that mode: its decoder isn't pooled.
    if torch.is_autocast_enabled("cuda") or torch.is_inference_mode_enabled():
        yield make(GraphDecoder)
        return
    same = replace(sampling, seed=None, stop_tokens=tuple(sampling.stop_tokens))
    key = (same, slots, longest_prompt, addresses(policy), space)
    decoder = policy.decoders.take(key, lambda: make(GraphDecoder))
    try:
        yield decoder
    except GeneratorExit:  # the caller stopped early
        policy.decoders.put_back(key, decoder)
        raise
    policy.decoders.put_back(key, decoder)


def _fill(
    decoder: Decoder,
    free: list[int],
    starting: list[int],
    tokens: list[list[int]],
    row_numbers: Sequence[int],
    seed: int,
) -> None:
    """Start rows in free slots, each with its own random numbers."""
    drawn = [] if decoder.choice.greedy else [uniforms(seed, row_numbers[row], decoder.actions) for row in starting]
    decoder.fill(free[: len(starting)], starting, [tokens[row] for row in starting], drawn)
