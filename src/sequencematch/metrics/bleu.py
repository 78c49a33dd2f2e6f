"""Corpus BLEU by sacrebleu, the measure of the translation task (App. G.2)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sequencematch.extras import require
from sequencematch.metrics.bootstrap import METHOD, check_some, interval
from sequencematch.metrics.measure import Measure, signature


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Measure:
    """`sacrebleu.corpus_bleu` with its defaults, one reference per sentence, in percent   (App. G.2).

    The interval resamples sentences. BLEU is a function of sums over sentences (matched and total n-grams, lengths), so a
    resample adds up the statistics of its sentences; sentence scores are never averaged.
    """
    require("sacrebleu", "bleu", "BLEU")
    from sacrebleu.metrics import BLEU

    check_some("hypotheses", len(hypotheses))
    if len(hypotheses) != len(references):
        raise ValueError(
            f"`hypotheses` and `references` must have one entry per sentence. Got {len(hypotheses)} and {len(references)}."
        )
    corpus = BLEU()
    value = float(corpus.corpus_score(list(hypotheses), [list(references)]).score)

    # The effective order changes a sentence's score but not its counts; without it sacrebleu logs a warning for each.
    sentence = BLEU(effective_order=True)
    scores = [sentence.sentence_score(h, [r]) for h, r in zip(hypotheses, references, strict=True)]
    statistics = np.array([[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores])

    def corpus_bleu(index: Int[np.ndarray, "sample"]) -> float:
        sys_len, ref_len, *ngrams = statistics[index].sum(0).tolist()
        correct, total = ngrams[: corpus.max_ngram_order], ngrams[corpus.max_ngram_order :]
        return float(BLEU.compute_bleu(correct, total, sys_len, ref_len, smooth_method=corpus.smooth_method).score)

    assert corpus_bleu(np.arange(len(scores))) == value
    low, high = interval(corpus_bleu, len(scores))
    theirs = dict(fact.split(":", 1) for fact in str(corpus.get_signature()).split("|"))
    text = signature("BLEU", {**theirs, "n": len(scores), "interval": METHOD})
    return Measure("BLEU", value, low, high, len(scores), text)
