"""Perplexity, against a fresh forward pass."""

import math
import re
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sequencematch.metrics.perplexity import perplexity
from tests.policy.tiny_models import DECODED, llama

VOCAB = DECODED["vocab_size"]


def test_two_sequences_by_hand() -> None:
    """p = ½, ½, ½ and ⅛: exp((3 log 2 + log 8) / 4) = exp(1.5 log 2) = 2^1.5. A mean over sequences would have √(2 · 8) = 4."""
    measure = perplexity([np.log([0.5, 0.5, 0.5]), np.log([0.125])], bkspc="left out")
    assert measure.value == pytest.approx(2**1.5)
    assert (measure.low, measure.high) == pytest.approx((2, 8))  # both resamples of one sequence alone
    assert measure.count == 2
    assert measure.signature == (
        "perplexity|<bkspc>:left out|per:token|tokens:4|ratio:sums over sequences|n:2|"
        "interval:bootstrap 95%, 1000 resamples, seed 0"
    )


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    uniform = [torch.full((length,), -math.log(32_000)) for length in (3, 5, 1)]
    assert perplexity(uniform, bkspc="left out").value == pytest.approx(32_000, rel=1e-5)  # float32 log-probabilities
    assert "|<bkspc>:kept|" in perplexity(uniform, bkspc="kept").signature


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=draws) for length in (5, 12, 30, 2)]


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@torch.no_grad()
def token_log_probs(model: Any, tokens: Tensor, columns: int = VOCAB) -> Tensor:
    """log p of every token but the first, normalised over the first `columns` actions."""
    logits: Tensor = model(tokens[None]).logits[0, :-1, :columns]
    return logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)


def test_perplexity_is_the_exponential_of_the_models_own_loss(model: Any, sequences: list[Tensor]) -> None:
    """The model's loss is a mean over a sequence's tokens; weighted by their number, they add up to the corpus loss."""
    tokens = [len(sequence) - 1 for sequence in sequences]
    with torch.no_grad():
        losses = [float(model(sequence[None], labels=sequence[None]).loss) for sequence in sequences]
    corpus = sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
    measure = perplexity([token_log_probs(model, sequence) for sequence in sequences], bkspc="left out")
    assert measure.value == pytest.approx(math.exp(corpus), rel=1e-5)  # float32 losses
    assert measure.value != pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-2)  # a mean over sequences


def test_what_is_kept_for_backspace_counts_against_the_policy(model: Any, sequences: list[Tensor]) -> None:
    """Let the last column be <bkspc>: cross entropy over the others is "left out", over all "kept".

    From "kept" to "left out" it takes log p − log(1 − p(<bkspc>)).
    """
    texts = [sequence.clamp(max=VOCAB - 2) for sequence in sequences]
    kept = [token_log_probs(model, text) for text in texts]
    with torch.no_grad():
        logits = torch.cat([model(text[None]).logits[0, :-1] for text in texts])
    labels = torch.cat([text[1:] for text in texts])
    values = {
        "left out": torch.nn.functional.cross_entropy(logits[:, :-1], labels),
        "kept": torch.nn.functional.cross_entropy(logits, labels),
    }
    deleting = logits.softmax(-1)[:, -1].split([len(text) - 1 for text in texts])
    left_out = [log_p - (-p).log1p() for log_p, p in zip(kept, deleting, strict=True)]
    assert perplexity(left_out, bkspc="left out").value == pytest.approx(float(values["left out"].exp()), rel=1e-5)
    assert perplexity(kept, bkspc="kept").value == pytest.approx(float(values["kept"].exp()), rel=1e-5)
    assert values["left out"] < values["kept"]


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=9), min_size=1, max_size=6))
def test_perplexity_equals_the_formula_written_out(log_probs: list[list[float]]) -> None:
    flat = [log_p for sequence in log_probs for log_p in sequence]
    measure = perplexity([np.array(sequence) for sequence in log_probs], bkspc="kept")
    assert measure.value == pytest.approx(math.exp(-sum(flat) / len(flat)))
    assert measure.low <= measure.value * (1 + 1e-12)
    assert measure.value <= measure.high * (1 + 1e-12)


def test_sequences_and_not_tokens_are_resampled() -> None:
    """Half of the sequences at p = ½, half at ¼: the interval does not narrow when each gets 50 times longer."""
    short = perplexity([np.log([p]) for p in [0.5, 0.25] * 20], bkspc="kept")
    long = perplexity([np.log([p] * 50) for p in [0.5, 0.25] * 20], bkspc="kept")
    assert (long.low, long.high) == pytest.approx((short.low, short.high))
    assert long.high - long.low > 0.5


def test_half_precision_is_summed_in_double() -> None:
    """4,096 times −0.1 in bfloat16 (−0.10009765625): summed in bfloat16 the total would stop growing."""
    measure = perplexity([torch.full((4096,), -0.1, dtype=torch.bfloat16)], bkspc="kept")
    assert measure.value == pytest.approx(math.exp(0.10009765625), rel=1e-12)


def test_wrong_arguments_are_refused() -> None:
    good = np.log([0.5])
    with pytest.raises(
        ValueError, match=re.escape("`log_probs` must give at least one sample to measure on. Got none.")
    ):
        perplexity([], bkspc="kept")
    with pytest.raises(ValueError, match=re.escape("at least one token per sequence. Got none in sequence 1.")):
        perplexity([good, np.array([])], bkspc="kept")
    for wrong, got in ((-good, "0.693147; negate losses first."), (good * np.inf, "-inf"), (good * np.nan, "nan")):
        with pytest.raises(ValueError, match=re.escape(f"Got a sum of {got}")):
            perplexity([wrong], bkspc="kept")


def test_an_unknown_treatment_of_backspace_is_refused() -> None:
    """By the shape checker in tests, by a ValueError without it."""
    unknown: Literal["kept"] = "dropped"  # type: ignore[assignment]
    unchecked: Any = getattr(perplexity, "__wrapped__", perplexity)
    with pytest.raises(ValueError, match=re.escape("`bkspc` must be 'left out' or 'kept'. Got bkspc='dropped'.")):
        unchecked([np.log([0.5])], bkspc=unknown)
