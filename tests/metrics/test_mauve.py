"""MAUVE, against mauve-text called directly."""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import mauve as mauve_text
import numpy as np
import pytest

from sequencematch.metrics.encoders import Encoder, hub_model
from sequencematch.metrics.mauve import histogram_mauve, mauve
from tests.policy.tiny_models import character_tokenizer, tiny

importlib.import_module("faiss").omp_set_num_threads(1)  # more threads wait for each other where tests run side by side

#: A text is the numbers of its features.
ENCODER = Encoder("numbers", lambda texts: np.array([text.split() for text in texts], dtype=np.float32))


def write(features: np.ndarray) -> list[str]:
    return [" ".join(map(str, row)) for row in features]


def gaussian(seed: int, count: int = 60, shift: float = 0.0) -> list[str]:
    """Texts around eight centres, moved along the first."""
    centres = np.random.default_rng(0).normal(size=(8, 6))
    generator = np.random.default_rng(seed)
    features = centres[generator.integers(0, 8, count)] + shift * centres[0]
    return write((features + generator.normal(size=(count, 6)) / 2).astype(np.float32))


def test_texts_in_disjoint_clusters_score_one_in_252_by_hand() -> None:
    """Then KL(q‖r) = −log(1 − w) and KL(p‖r) = −log w, and ∫ w^5 · 5 (1 − w)^4 dw = 5 · 5! 4! / 10! = 1/252.

    24 trapezia of width 1/24 are off by about a fiftieth. Resampling can't change such histograms: the interval has no width.
    """
    here, far = (write(np.array([[side, 0.01 * n] for n in range(20)])) for side in (1.0, -1.0))
    measure = mauve(far, here, ENCODER)
    assert measure.value == pytest.approx(1 / 252, rel=0.05)
    assert (measure.low, measure.high) == pytest.approx((measure.value, measure.value))


def test_equal_histograms_have_the_whole_area() -> None:
    """Every r is p, so every point of the curve is (1, 1)."""
    halves, thirds = np.array([[0.5, 0.5, 0], [1, 1, 1]]) / [[1], [3]]
    assert histogram_mauve(halves[None], halves[None]) == 1
    assert histogram_mauve(thirds[None], thirds[None]) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("seed", [25, 3])
def test_the_value_is_that_of_mauve_text(seed: int) -> None:
    generated, human = gaussian(1, shift=0.5), gaussian(2, count=75)
    theirs = mauve_text.compute_mauve(
        p_features=ENCODER.features(human), q_features=ENCODER.features(generated), seed=seed
    )
    measure = mauve(generated, human, ENCODER, seed=seed)
    assert measure.value == theirs.mauve
    assert measure.count == 60


def test_the_value_is_that_of_mauve_text_from_the_texts_on(tmp_path: Path) -> None:
    """Through a GPT-2 in a folder, with mauve-text's own features and its own way with empty texts."""
    folder = tmp_path / "tiny-gpt2"
    tiny("GPT-2", vocab_size=48).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    generator = np.random.default_rng(0)
    generated, human = (
        ["".join(generator.choice(list(letters), size=generator.integers(3, 20))) for _ in range(40)]
        for letters in ("abcdef", "defghi")
    )
    generated[7] = ""
    theirs = mauve_text.compute_mauve(
        p_text=human, q_text=generated, featurize_model_name=str(folder), max_text_length=16, device_id=-1
    )
    measure = mauve(generated, human, hub_model(str(folder), max_length=16))
    assert measure.value == theirs.mauve
    assert measure.count == 39


@pytest.mark.parametrize("shift", [0.0, 0.3, 2.0])
def test_the_score_of_histograms_is_that_of_mauve_text(shift: float) -> None:
    """Exact but for float64 rounding, with empty buckets on either side."""
    p, q = ENCODER.features(gaussian(1, 300)), ENCODER.features(gaussian(2, 200, shift))
    theirs = mauve_text.compute_mauve(p_features=p, q_features=q)
    assert histogram_mauve(theirs.p_hist[None], theirs.q_hist[None]) == pytest.approx(theirs.mauve, rel=1e-12)


def test_each_resample_is_scored_for_itself() -> None:
    p, q = np.random.default_rng(0).dirichlet(np.ones(5), size=(2, 7))
    alone = [histogram_mauve(p[n : n + 1], q[n : n + 1])[0] for n in range(7)]
    np.testing.assert_allclose(histogram_mauve(p, q), alone, rtol=1e-12)
    assert len(set(alone)) == 7


def test_like_texts_score_higher_than_unlike_ones() -> None:
    scores = [mauve(gaussian(1, shift=shift), gaussian(2), ENCODER) for shift in (0.0, 1.0, 4.0)]
    assert scores[0].value > scores[1].value > scores[2].value
    assert scores[0].low > scores[2].high


@pytest.mark.parametrize(("count", "shift"), [(200, 1.0), (200, 3.0)])
def test_the_interval_is_about_as_wide_as_the_score_varies(count: int, shift: float) -> None:
    """24 independent samples with mean scores of 0.55 and 0.04; widths of 1.01 and 0.88 times the spread of the scores.

    Of the intervals 83 % hold the mean score. With 40 samples and a shift of 3 it is 63 %: too few to see clusters move.
    """
    measures = [mauve(gaussian(2 * n, count, shift), gaussian(2 * n + 1, count), ENCODER) for n in range(24)]
    spread = float(np.subtract(*np.quantile([m.value for m in measures], [0.975, 0.025])))
    width = float(np.mean([m.high - m.low for m in measures]))
    assert 0.7 < width / spread < 1.4
    mean = np.mean([m.value for m in measures])
    assert np.mean([m.low <= mean <= m.high for m in measures]) > 0.75
    # About in the middle; unmoved scores would have many a value at the upper end or beyond.
    places = [(m.value - m.low) / (m.high - m.low) for m in measures]
    assert all(0.3 < place < 0.6 for place in places)


def test_a_single_clustering_would_understate_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without other k-means seeds the interval is a fifth to a third narrower."""
    texts = [(gaussian(2 * n, 200, 1.0), gaussian(2 * n + 1, 200)) for n in range(8)]

    def width() -> float:
        measures = [mauve(generated, human, ENCODER) for generated, human in texts]
        return float(np.mean([m.high - m.low for m in measures]))

    ten = width()
    module = importlib.import_module("sequencematch.metrics.mauve")
    monkeypatch.setattr(module, "CLUSTERINGS", 1)
    monkeypatch.setattr(module, "RESAMPLES", 1000)
    assert width() < 0.85 * ten


def test_the_interval_is_a_function_of_the_seed() -> None:
    first, second, other = (mauve(gaussian(1), gaussian(2), ENCODER, seed=seed) for seed in (0, 0, 1))
    assert first == second
    assert (first.low, first.high) != (other.low, other.high)


def test_the_signature_names_the_encoder_and_what_it_can_be_compared_with() -> None:
    measure = mauve([*gaussian(1), "", ""], gaussian(2, count=75), ENCODER)
    assert measure.signature == (
        "MAUVE|encoder:numbers|comparable:with this encoder only, published scores are by gpt2-large|P:human|buckets:6|c:5|"
        f"seed:25|mauve-text:{importlib.metadata.version('mauve-text')}|left out:2 generated and 0 human empty|"
        "n:60 generated, 75 human|interval:95% of 10 k-means seeds × 100 resampled histograms, centred on the value"
    )


def test_nothing_is_printed_but_faiss_own_warning(capfd: pytest.CaptureFixture[str]) -> None:
    mauve(gaussian(1), gaussian(2), ENCODER)
    out, err = capfd.readouterr()
    assert out == ""
    assert all(line.startswith("WARNING clustering") for line in err.splitlines())


def test_too_few_texts_are_refused() -> None:
    enough = gaussian(1, count=20)

    def refuses(argument: str, generated: Sequence[str], human: Sequence[str], got: int) -> None:
        text = f"`{argument}` must hold at least 20 texts that are not empty: mauve-text makes a bucket of every ten samples"
        with pytest.raises(ValueError, match=re.escape(text) + rf".* Got {got}\."):
            mauve(generated, human, ENCODER)

    refuses("generated", [], enough, 0)
    refuses("generated", [*enough[:19], ""], enough, 19)
    refuses("human", enough, enough[:5], 5)
    assert mauve(enough, gaussian(2, count=20), ENCODER).count == 20


def test_a_missing_mauve_text_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mauve" else real(name, *rest))
    with pytest.raises(
        ValueError, match=re.escape("MAUVE needs the package mauve: pip install 'sequencematch[mauve]'.")
    ):
        mauve(gaussian(1), gaussian(2), ENCODER)
