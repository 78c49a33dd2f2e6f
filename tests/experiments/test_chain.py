"""The paper's motivating chain: divergences in closed form, occupancies by hand, and where the paper's algebra slips."""

import json
import math
from pathlib import Path

import pytest
import torch

from sequencematch.experiments import chain
from sequencematch.experiments.chain import (
    Chain,
    chi2,
    data_occupancy,
    kl,
    mixture,
    occupancy,
    on_data_alone,
    texts,
    total_variation,
    transitions,
)

ROOT = Path(__file__).parents[2]


def test_two_steps_by_hand() -> None:
    """ε = 0.1: the model writes aa with 0.81, ax with 0.09 and x with 0.1."""
    p, q = texts(Chain(2, 0.1))
    assert p == {"aa": 1.0}
    assert q == pytest.approx({"x": 0.1, "ax": 0.09, "aa": 0.81})
    assert kl(p, q) == pytest.approx(-math.log(0.81))
    assert chi2(p, q) == pytest.approx(1 / 0.81 - 1)
    assert total_variation(p, q) == pytest.approx(0.19)
    assert chi2(p, mixture(p, q)) == pytest.approx(1 / 0.905 - 1)
    assert on_data_alone(p, q) == pytest.approx(0.19**2)


@pytest.mark.parametrize("length", [1, 7, 60])
@pytest.mark.parametrize("error", [0.3, 0.01])
def test_every_divergence_is_a_function_of_the_probability_of_a_right_text(length: int, error: float) -> None:
    """q = (1 − ε)ⁿ: KL is −log q, χ² 1/q − 1, with the mixture (1 − q)/(1 + q) = tanh(KL/2), total variation 1 − q."""
    (p, q), right = texts(Chain(length, error)), (1 - error) ** length
    assert sum(q.values()) == pytest.approx(1)
    assert kl(p, q) == pytest.approx(-length * math.log(1 - error))
    assert chi2(p, q) == pytest.approx(1 / right - 1)
    assert total_variation(p, q) == pytest.approx(1 - right)
    assert chi2(p, mixture(p, q)) == pytest.approx(math.tanh(kl(p, q) / 2))
    assert chi2(q, mixture(p, q)) == pytest.approx(chi2(p, mixture(p, q)))


def test_where_the_model_goes_and_data_does_not_the_divergences_from_the_model_are_infinite() -> None:
    """App. B.2. The χ² of §2.1.1 is finite only because its expectation leaves wrong texts out: it is (1 − q)²."""
    p, q = texts(Chain(30, 0.02))
    assert kl(q, p) == chi2(q, p) == math.inf
    assert on_data_alone(p, q) == pytest.approx((1 - 0.98**30) ** 2)


def test_the_paper_names_the_probability_of_an_error_where_it_means_that_of_none() -> None:
    """§2.1.1: "the probability of getting to the end … is 1 − (1 − ε)ⁿ". That is the probability of leaving the chain."""
    chained = Chain(30, 0.02)
    assert chained.right == pytest.approx((1 - 0.02) ** 30)
    assert chained.right != pytest.approx(1 - (1 - 0.02) ** 30, abs=0.05)


def test_the_occupancy_without_deleting_by_hand() -> None:
    """ρ(aaa, a) = (1 − γ) γ³ (1 − ε)⁴, and the tail of the right text is (γ(1 − ε))ⁿ."""
    found = occupancy(Chain(5, 0.1), 0.9)
    assert found["aaa→a"] == pytest.approx(0.1 * 0.9**3 * 0.9**4)
    assert found["aaaaa."] == pytest.approx((0.9 * 0.9) ** 5)
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("deletes", [0.0, 0.4, 1.0])
def test_an_occupancy_is_the_discounted_sum_over_time(deletes: float) -> None:
    """The linear equation against 400 steps of the chain; 0.9⁴⁰⁰ is 5e-19."""
    chained, gamma = Chain(4, 0.2, deletes), 0.9
    matrix, now, names = transitions(chained)
    assert torch.allclose(matrix.sum(1), torch.ones(len(names), dtype=torch.float64))
    total = torch.zeros_like(now)
    for step in range(400):
        total += (1 - gamma) * gamma**step * now
        now = now @ matrix
    assert occupancy(chained, gamma) == pytest.approx(dict(zip(names, total.tolist(), strict=True)), abs=1e-12)
    absorbed = now[names.index("aaaa.")]  # γ = 1: what is left after 400 steps has ended
    assert float(absorbed) == pytest.approx(chained.right)


def test_the_kl_of_occupancies_in_closed_form() -> None:
    """A visit returns by a wrong token and its deletion with γ²εδ, so ρ_θ/ρ_data at step i is cⁱ⁺¹, c = (1 − ε)/(1 − γ²εδ)."""
    length, error, deletes, gamma = 12, 0.05, 0.7, 0.97
    c = (1 - error) / (1 - gamma**2 * error * deletes)
    steps = sum((1 - gamma) * gamma**i * (i + 1) for i in range(length)) + gamma**length * length
    found = kl(data_occupancy(length, gamma), occupancy(Chain(length, error, deletes), gamma))
    assert found == pytest.approx(-steps * math.log(c))


def test_likelihood_does_not_see_deleting_and_the_divergences_of_occupancies_do() -> None:
    data = data_occupancy(20, 0.99)
    before, after = Chain(20, 0.05, 0.1), Chain(20, 0.05, 0.9)
    assert before.likelihood_loss == after.likelihood_loss == pytest.approx(-20 * math.log(0.95))
    assert after.right > before.right + 0.2
    rho = [occupancy(chained, 0.99) for chained in (before, after)]
    assert kl(data, rho[1]) < 0.3 * kl(data, rho[0])
    assert chi2(data, mixture(data, rho[1])) < 0.3 * chi2(data, mixture(data, rho[0]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"length": 0, "error": 0.1}, "`length` must be at least 1. Got 0."),
        ({"length": 3, "error": 0.0}, "`error` must lie strictly between 0 and 1. Got 0.0."),
        ({"length": 3, "error": 0.1, "deletes": 1.5}, r"`deletes` must be a probability in \[0, 1\]. Got 1.5."),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Chain(**settings)  # type: ignore[arg-type]


def test_the_page_its_figure_and_the_record_are_what_the_code_gives(tmp_path: Path) -> None:
    chain.run(tmp_path, "sequencematch reproduce chain --out results/chain")
    folder = ROOT / "results" / "chain"
    found, recorded = (json.loads((place / chain.RESULTS).read_text()) for place in (tmp_path, folder))
    assert found["settings"] == recorded["settings"]
    for part in ("by_length", "right", "by_dose"):
        assert found[part].keys() == recorded[part].keys()
        for name, values in found[part].items():
            assert values == pytest.approx(recorded[part][name], rel=1e-9), name
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert chain.markdown(recorded) in page
    shares = [f"{100 * Chain(200, chain.ERROR, deletes).right:.1f} %" for deletes in (0.0, 0.9)]
    assert f"turns {shares[0]} into {shares[1]}" in page
    assert (folder / chain.FIGURE).read_bytes() == (ROOT / "docs" / "images" / chain.FIGURE).read_bytes()


def test_the_figure_is_drawn_from_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / chain.RESULTS).write_text((ROOT / "results" / "chain" / chain.RESULTS).read_text())
    chain.draw(tmp_path)
    assert (tmp_path / chain.FIGURE).stat().st_size > 20_000
