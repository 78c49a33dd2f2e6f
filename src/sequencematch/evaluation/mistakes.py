"""Prompts with a mistake: wrong tokens drawn at random, or the likeliest wrong ones by a fixed scorer (§6.1)."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.core import Trajectory, encode
from sequencematch.data.pieces import Decode, text_behind
from sequencematch.data.seeds import hash_seed
from sequencematch.evaluation.cases import Case, tokenizer_decode
from sequencematch.metrics import append_mistake
from sequencematch.policy import Policy


def with_mistakes(policy: Policy, cases: Sequence[Case], seed: int, mistakes: int) -> list[tuple[int, ...]]:
    """Each prompt, followed by a correct prefix of its reference and `mistakes` wrong tokens   (§6.1).

    Wrong tokens come from the row's `noise_tokens`, or else from the whole vocabulary. An answer's leading space is never
    replaced: a digit in its place would be an error of format, and might even be the answer. The draws of a row depend only
    on its number and the seed.
    """
    special = _special(policy)
    vocabulary = [token for token in range(_num_tokens(policy)) if token not in special]
    generators = (torch.Generator().manual_seed(hash_seed("mistake", seed, number)) for number in range(len(cases)))
    found = []
    for case, generator in zip(cases, generators, strict=True):
        space, rest = _leading_space(policy, case)
        found.append(case.prompt + space + append_mistake(rest, case.noise_tokens or vocabulary, generator, mistakes))
    return found


def source_of_mistakes(cases: Sequence[Case]) -> str:
    """Where `with_mistakes` draws from."""
    has_own = {case.noise_tokens is not None for case in cases}
    return " or ".join(text for own, text in ((True, "noise_tokens"), (False, "the vocabulary")) if own in has_own)


def load_scorer(scorer: str | Policy, policy: Policy) -> Policy:
    """The scorer, by its name, its folder, or as it is; its vocabulary must be the policy's."""
    if isinstance(scorer, str):
        try:
            scorer = Policy.from_pretrained(scorer, device=policy.device)
        except OSError as error:
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"`scorer` must be a folder or a model on the hub. Got {scorer!r}, which can't be loaded: {reason}"
            ) from error
    ours, theirs = (cast(Any, model.tokenizer) for model in (policy, scorer))
    if theirs is None or ours.get_vocab() != theirs.get_vocab():
        raise ValueError(
            "`scorer` must have the vocabulary of the policy: its tokens are given to the policy. Got another; name the model "
            "that all compared policies were trained from."
        )
    return scorer


def plausible(
    scorer: Policy, cases: Sequence[Case], mistaken: Sequence[tuple[int, ...]], mistakes: int, batch_size: int
) -> list[tuple[int, ...]]:
    """The prompts of `with_mistakes` with other wrong tokens in the same places: those that `scorer` finds likeliest.

    For a scorer that knows the answer this is its second choice. Special tokens are left out, and tokens that spell a beginning
    of what is right. After the first wrong token any token is wrong: the scorer continues as it likes.
    """
    decode = tokenizer_decode(scorer)
    found = [prompt[:-mistakes] for prompt in mistaken]
    answers = [case.prompt + case.reference for case in cases]
    rest = [text_behind(decode, answer[: len(p)], answer[len(p) :]) for answer, p in zip(answers, found, strict=True)]
    banned = sorted(_special(scorer))
    for place in range(mistakes):
        for first in range(0, len(found), batch_size):
            rows = range(first, min(first + batch_size, len(found)))
            logits = _next_logits(scorer, [found[row] for row in rows])[:, : _num_tokens(scorer)]
            logits[:, banned] = -torch.inf
            for row, likeliest in zip(rows, logits.argsort(descending=True, stable=True).tolist(), strict=True):
                right = rest[row] if place == 0 else ""
                found[row] += (next(token for token in likeliest if not _begins(decode, token, found[row], right)),)
    return found


def _begins(decode: Decode, token: int, before: tuple[int, ...], right: str) -> bool:
    """Whether a token's text begins the right text, or is empty."""
    return right.startswith(text_behind(decode, before, (token,))) if right else False


@torch.no_grad()
def _next_logits(scorer: Policy, states: Sequence[tuple[int, ...]]) -> Float[Tensor, "row action"]:
    encoding = encode([Trajectory.demonstration(scorer.space, state, ()) for state in states], device=scorer.device)
    with scorer.for_scoring():
        return scorer.action_logits(scorer.encoded_hidden_states(encoding, encoding.visit[:, 0])).float().cpu()


def _special(policy: Policy) -> set[int]:
    return set(policy.space.special) | set(cast(Any, policy.tokenizer).all_special_ids)


def _num_tokens(policy: Policy) -> int:
    """Tokens that both the model and the tokenizer know."""
    return min(policy.space.vocab_size, len(cast(Any, policy.tokenizer)))


def _leading_space(policy: Policy, case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A reference in two parts: its leading spaces, and the rest."""
    decode = tokenizer_decode(policy)
    start = next((n for n in range(len(case.reference)) if decode(case.reference[n : n + 1]).strip()), 0)
    return case.reference[:start], case.reference[start:]
