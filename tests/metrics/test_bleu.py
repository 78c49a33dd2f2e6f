"""Corpus BLEU, against sacrebleu called directly."""

import importlib.util
import math
import random
import re

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from sequencematch.metrics.bleu import bleu
from sequencematch.metrics.bootstrap import interval

WORDS = ["il", "faisait", "froid", "dans", "la", "maison", ",", "et", "Meaulnes", "n'était", "pas", "là", "."]
_random = random.Random(0)
REFERENCES = [" ".join(_random.choices(WORDS, k=_random.randint(4, 14))) for _ in range(60)]
#: Every fifth word is wrong, a few sentences are cut, one is empty.
HYPOTHESES = [" ".join("x" if _random.random() < 0.2 else word for word in line.split()) for line in REFERENCES]
HYPOTHESES = ["", "il", *(line[: 20 if n % 7 == 0 else None] for n, line in enumerate(HYPOTHESES[2:]))]

sentences = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def test_one_sentence_by_hand() -> None:
    """a b c d e against a b c d x: precisions 4/5, 3/4, 2/3, 1/2, no brevity penalty: (1/5)^(1/4) = 66.87."""
    measure = bleu(["a b c d e"], ["a b c d x"])
    assert measure.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert (measure.low, measure.high, measure.count) == (measure.value, measure.value, 1)


def test_a_short_hypothesis_is_punished_by_hand() -> None:
    """a b c d against a b c d e: all n-grams match, brevity penalty exp(1 − 5/4)."""
    assert bleu(["a b c d"], ["a b c d e"]).value == pytest.approx(100 * math.exp(-0.25))


def test_the_value_is_sacrebleus() -> None:
    assert bleu(HYPOTHESES, REFERENCES).value == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score


@settings(max_examples=20)
@given(st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4))
def test_the_value_is_sacrebleus_for_any_sentences(pairs: list[tuple[str, str]]) -> None:
    """Also where sentences are short or empty, so that smoothing decides."""
    hypotheses, references = ([pair[side] for pair in pairs] for side in (0, 1))
    assert bleu(hypotheses, references).value == sacrebleu.corpus_bleu(hypotheses, [references]).score


def test_the_interval_is_that_of_whole_scores_of_resampled_sentences() -> None:
    """The slow way: sacrebleu run anew on every resample, with the same draws. Of twenty sentences."""
    hypotheses, references = HYPOTHESES[:20], REFERENCES[:20]

    def slow(index: np.ndarray) -> float:
        return float(sacrebleu.corpus_bleu([hypotheses[i] for i in index], [[references[i] for i in index]]).score)

    measure = bleu(hypotheses, references)
    assert (measure.low, measure.high) == interval(slow, len(hypotheses))
    assert measure.low < measure.value < measure.high


def test_the_mean_of_sentence_scores_is_something_else() -> None:
    scores = [
        BLEU(effective_order=True).sentence_score(h, [r]).score for h, r in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    assert bleu(HYPOTHESES, REFERENCES).value != pytest.approx(np.mean(scores), abs=1)


def test_the_signature_holds_sacrebleus_own() -> None:
    metric = BLEU()
    metric.corpus_score(HYPOTHESES, [REFERENCES])
    signature = bleu(HYPOTHESES, REFERENCES).signature
    assert signature.startswith(f"BLEU|{metric.get_signature()}|n:60|interval:bootstrap 95%")
    assert f"|tok:13a|smooth:exp|version:{sacrebleu.__version__}|" in signature


def test_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bleu(HYPOTHESES, REFERENCES)
    assert caplog.records == []


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`hypotheses` must give at least one sample")):
        bleu([], [])
    with pytest.raises(ValueError, match=re.escape("must have one entry per sentence. Got 1 and 2.")):
        bleu(["a"], ["a", "b"])


def test_a_missing_sacrebleu_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sacrebleu" else real(name, *rest)
    )
    with pytest.raises(
        ValueError, match=re.escape("BLEU needs the package sacrebleu: pip install 'sequencematch[bleu]'.")
    ):
        bleu(["a"], ["a"])
