"""MAUVE by mauve-text: how near generated text is to human text, the main measure of text generation (§6.2)."""

import importlib.metadata
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from sequencematch.extras import require
from sequencematch.metrics.bootstrap import LEVEL
from sequencematch.metrics.encoders import Encoder
from sequencematch.metrics.measure import Measure, signature

#: mauve-text makes one bucket per ten samples, and needs two buckets.
MIN_SAMPLES = 20
SCALING_FACTOR = 5
CLUSTERINGS, RESAMPLES = 10, 100
METHOD = f"{LEVEL:.0%} of {CLUSTERINGS} k-means seeds × {RESAMPLES} resampled histograms, centred on the value"


def mauve(generated: Sequence[str], human: Sequence[str], encoder: Encoder, *, seed: int = 25) -> Measure:
    """`mauve.compute_mauve` with its defaults on the encoder's features, P being human and Q generated: between 0 and 1   (§6.2).

    Scores are comparable only between equal encoders and equal numbers of samples: mauve-text's authors advise a few thousand,
    and the fewer there are, the higher the score. The paper has 1,000 (§6.2). Empty texts have no features and are left out,
    as mauve-text does; the signature counts them.

    The interval says how far the score would move with other samples and other clusters. k-means is repeated with ten seeds,
    and on each clustering both histograms are resampled a hundred times. Resampling adds noise, which lowers the scores; so
    the interval is the central 95 % of all thousand scores, shifted so that their mean is the value, and clipped to [0, 1].
    It is approximate, and too narrow for a few dozen samples. A single clustering would make it narrower still, and without
    the shift it would often exclude the value.

    Two quirks of mauve-text: with its number of buckets, faiss always warns on standard error of too few samples per cluster;
    and histograms that agree exactly, possible with tiny samples, may score 0.75 because ties are sorted arbitrarily.
    """
    require("mauve", "mauve", "MAUVE")
    from mauve import compute_mauve

    humans, generations = ([text for text in texts if text] for texts in (human, generated))
    _check_enough("generated", len(generations))
    _check_enough("human", len(humans))
    p, q = encoder.features(humans), encoder.features(generations)
    clusterings = [
        compute_mauve(p_features=p, q_features=q, mauve_scaling_factor=SCALING_FACTOR, seed=seed + again)
        for again in range(CLUSTERINGS)
    ]
    value = float(clusterings[0].mauve)

    generator = np.random.default_rng(seed)
    scores = np.concatenate(
        [
            histogram_mauve(
                generator.multinomial(len(p), clustering.p_hist, RESAMPLES) / len(p),
                generator.multinomial(len(q), clustering.q_hist, RESAMPLES) / len(q),
            )
            for clustering in clusterings
        ]
    )
    spread = np.quantile(scores, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) - scores.mean()
    low, high = np.clip(value + spread, 0, 1)

    empty = len(generated) - len(generations), len(human) - len(humans)
    facts = {
        "encoder": encoder.name,
        "comparable": "with this encoder only, published scores are by gpt2-large",
        "P": "human",
        "buckets": clusterings[0].num_buckets,
        "c": SCALING_FACTOR,
        "seed": seed,
        "mauve-text": importlib.metadata.version("mauve-text"),
        "left out": f"{empty[0]} generated and {empty[1]} human empty" if any(empty) else None,
        "n": f"{len(q)} generated, {len(p)} human",
        "interval": METHOD,
    }
    return Measure("MAUVE", value, float(low), float(high), len(q), signature("MAUVE", facts))


def histogram_mauve(
    p: Float[np.ndarray, "resample bucket"], q: Float[np.ndarray, "resample bucket"]
) -> Float[np.ndarray, "resample"]:
    """MAUVE of quantised texts: the area under (e^{−c KL(q‖r)}, e^{−c KL(p‖r)}) for r = w p + (1 − w) q and w from 0 to 1.

    By the trapezoidal rule over 25 weights, as in mauve-text, whose mean of the areas over both axes is the same.
    """
    w = np.linspace(1e-6, 1 - 1e-6, 25)[:, None]  # mauve-text's ends: at 0 and 1 a KL may be infinite
    p, q = p[:, None], q[:, None]
    r = w * p + (1 - w) * q
    ends = [(0, 0), (1, 1)]  # nothing along the resamples, one point at each end of the curve
    x = np.pad(np.exp(-SCALING_FACTOR * _kl(q, r)), ends, constant_values=((0, 0), (1, 0)))
    y = np.pad(np.exp(-SCALING_FACTOR * _kl(p, r)), ends, constant_values=((0, 0), (0, 1)))
    return np.asarray(-(np.diff(x) * (y[:, 1:] + y[:, :-1])).sum(1) / 2)


def _kl(
    p: Float[np.ndarray, "resample 1 bucket"], r: Float[np.ndarray, "resample weight bucket"]
) -> Float[np.ndarray, "resample weight"]:
    """KL(p‖r), where a bucket that is empty in p adds nothing."""
    filled = p > 0
    return np.asarray((p * np.log(np.where(filled, p, 1) / np.where(filled, r, 1))).sum(-1))


def _check_enough(argument: str, count: int) -> None:
    if count < MIN_SAMPLES:
        raise ValueError(
            f"`{argument}` must hold at least {MIN_SAMPLES} texts that are not empty: mauve-text makes a bucket of every ten "
            f"samples and needs two. Got {count}. Its authors advise a few thousand."
        )
