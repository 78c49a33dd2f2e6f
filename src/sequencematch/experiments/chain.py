"""The paper's motivating chain: what divergences say as errors compound, and what they say about deleting   (Fig. 1, App. B).

Data takes n steps, each with one right token, and ends. A model errs at each step with probability ε: it writes a wrong token that
no text of the data has. In the paper it ends there. With `<bkspc>` it deletes the wrong token with probability δ, and ends
otherwise.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.data.files import write_files
from sequencematch.data.json_text import json_text
from sequencematch.data.markdown import table_lines
from sequencematch.extras import require

RESULTS, FIGURE = "results.json", "chain.png"
#: The error rate of the figure, its lengths, the length of its last panel, and the paper's discount for text.
ERROR, LENGTHS, LENGTH, GAMMA = 0.02, tuple(range(1, 201)), 50, 0.998
#: Probabilities of deleting a wrong token: of the second panel, and of the last one.
DELETES, DOSES = (0.0, 0.5, 0.9, 0.99), tuple(n / 50 for n in range(51))
#: Lengths in the table.
SHOWN = (1, 10, 50, 100, 200)

Distribution = Mapping[str, float]


@dataclass(frozen=True)
class Chain:
    """A chain of `length` steps; its model errs with probability `error` and deletes a wrong token with probability `deletes`."""

    length: int
    error: float
    deletes: float = 0.0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"`length` must be at least 1. Got {self.length}.")
        if not 0 < self.error < 1:
            raise ValueError(f"`error` must lie strictly between 0 and 1. Got {self.error}.")
        if not 0 <= self.deletes <= 1:
            raise ValueError(f"`deletes` must be a probability in [0, 1]. Got {self.deletes}.")

    @property
    def right(self) -> float:
        """The probability that the model ends in the data's text: ((1 − ε)/(1 − εδ))ⁿ."""
        return ((1 - self.error) / (1 - self.error * self.deletes)) ** self.length

    @property
    def likelihood_loss(self) -> float:
        """−log of the probability of the data's actions in the data's states, −n log(1 − ε): δ does not occur in it."""
        return -self.length * math.log1p(-self.error)


def texts(chain: Chain) -> tuple[Distribution, Distribution]:
    """P of the data and Q of the model, as text → probability; a wrong token is `x`   (App. B)."""
    slip = chain.error * (1 - chain.deletes) / (1 - chain.error * chain.deletes)
    model = {"a" * step + "x": (1 - slip) ** step * slip for step in range(chain.length)}
    model["a" * chain.length] = (1 - slip) ** chain.length
    return {"a" * chain.length: 1.0}, model


def kl(p: Distribution, q: Distribution) -> float:
    """KL(P‖Q) = Σ P log(P/Q); infinite where P has mass and Q has none."""
    seen = [text for text, mass in p.items() if mass]
    if any(not q.get(text) for text in seen):
        return math.inf
    return sum(p[text] * math.log(p[text] / q[text]) for text in seen)


def chi2(p: Distribution, q: Distribution) -> float:
    """χ²(P‖Q) = E_Q[(P/Q − 1)²] = Σ P²/Q − 1; infinite where P has mass and Q has none   (App. B.3)."""
    if any(mass and not q.get(text) for text, mass in p.items()):
        return math.inf
    return sum(mass**2 / q[text] for text, mass in p.items() if mass) - 1


def total_variation(p: Distribution, q: Distribution) -> float:
    """½ Σ |P − Q|."""
    return sum(abs(p.get(text, 0.0) - q.get(text, 0.0)) for text in {**p, **q}) / 2


def mixture(p: Distribution, q: Distribution) -> Distribution:
    """(P + Q)/2."""
    return {text: (p.get(text, 0.0) + q.get(text, 0.0)) / 2 for text in {**p, **q}}


def on_data_alone(p: Distribution, q: Distribution) -> float:
    """E_P[(Q/P − 1)²], which the paper's §2.1.1 prints: the part of χ²(Q‖P) that lies on the data's texts."""
    return sum(mass * (q.get(text, 0.0) / mass - 1) ** 2 for text, mass in p.items() if mass)


def transitions(chain: Chain) -> tuple[Float[Tensor, "pair pair"], Float[Tensor, "pair"], list[str]]:
    """The chain of pairs (state, action) under the model: transition probabilities, the first pair's, and names.

    `aaa→a` is the right action behind three tokens, `aaa→x` a wrong one, `aaax→<bkspc>` and `aaax→<eos>` what follows it. `aaa.`
    and `aaax.` are absorbing.
    """
    names = [f"{'a' * n}→{action}" for n in range(chain.length) for action in "ax"]
    names += [f"{'a' * n}x→{action}" for n in range(chain.length) for action in ("<bkspc>", "<eos>")]
    names += ["a" * chain.length + ".", *("a" * n + "x." for n in range(chain.length))]
    index = {name: place for place, name in enumerate(names)}
    matrix, first = (
        torch.zeros(len(names), len(names), dtype=torch.float64),
        torch.zeros(len(names), dtype=torch.float64),
    )

    def act(from_: int | None, text: str) -> None:
        row = first if from_ is None else matrix[from_]
        if len(text) == chain.length and "x" not in text:
            row[index[f"{text}."]] = 1
        elif "x" in text:
            row[index[f"{text}→<bkspc>"]], row[index[f"{text}→<eos>"]] = chain.deletes, 1 - chain.deletes
        else:
            row[index[f"{text}→a"]], row[index[f"{text}→x"]] = 1 - chain.error, chain.error

    act(None, "")
    for name, place in index.items():
        text, arrow, action = name.partition("→")
        if not arrow:
            matrix[place, place] = 1
        elif action == "<eos>":
            matrix[place, index[f"{text}."]] = 1
        else:
            act(place, text[:-1] if action == "<bkspc>" else text + action)
    return matrix, first, names


def occupancy(chain: Chain, gamma: float) -> Distribution:
    """ρ(s, a) = (1 − γ) Σ γᵗ P(s_t = s, a_t = a), exactly; an absorbing state is one pair   (Eq. 1)."""
    matrix, first, names = transitions(chain)
    identity = torch.eye(len(names), dtype=torch.float64)
    found = (1 - gamma) * torch.linalg.solve(identity - gamma * matrix.T, first)
    return dict(zip(names, found.tolist(), strict=True))


def data_occupancy(length: int, gamma: float) -> Distribution:
    """ρ_data: the right action at each step, then the absorbing text."""
    found = {f"{'a' * n}→a": (1 - gamma) * gamma**n for n in range(length)}
    return found | {"a" * length + ".": gamma**length}


def run(folder: Path, command: str) -> None:
    """Compute every line of the figure."""
    by_length = {
        "kl": [kl(*texts(Chain(n, ERROR))) for n in LENGTHS],
        "chi2": [chi2(*texts(Chain(n, ERROR))) for n in LENGTHS],
        "chi2_mixture": [_chi2_mixture(*texts(Chain(n, ERROR))) for n in LENGTHS],
        "on_data_alone": [on_data_alone(*texts(Chain(n, ERROR))) for n in LENGTHS],
        "total_variation": [total_variation(*texts(Chain(n, ERROR))) for n in LENGTHS],
    }
    right = {str(deletes): [Chain(n, ERROR, deletes).right for n in LENGTHS] for deletes in DELETES}
    data = data_occupancy(LENGTH, GAMMA)
    models = [occupancy(Chain(LENGTH, ERROR, dose), GAMMA) for dose in DOSES]
    by_dose = {
        "likelihood": [Chain(LENGTH, ERROR, dose).likelihood_loss for dose in DOSES],
        "occupancy_kl": [kl(data, model) for model in models],
        "occupancy_chi2_mixture": [_chi2_mixture(data, model) for model in models],
    }
    results = {
        "command": command,
        "settings": {"error": ERROR, "gamma": GAMMA, "length": LENGTH, "lengths": LENGTHS, "doses": DOSES},
        "by_length": by_length,
        "right": right,
        "by_dose": by_dose,
    }
    write_files(folder, {RESULTS: json_text(results)})


def _chi2_mixture(p: Distribution, q: Distribution) -> float:
    return chi2(p, mixture(p, q))


def markdown(results: Mapping[str, Any]) -> str:
    """A table of some lengths: the probability of a right text, and every divergence."""
    rows = []
    for n in SHOWN:
        at = results["settings"]["lengths"].index(n)
        found = {name: values[at] for name, values in results["by_length"].items()}
        numbers = [found[name] for name in ("kl", "chi2", "chi2_mixture", "on_data_alone")]
        rows.append((str(n), f"{100 * (1 - found['total_variation']):.1f} %", *(f"{number:.3g}" for number in numbers)))
    headings = ("n", "ends right", "KL(data‖model)", "χ²(data‖model)", "χ²(data‖mixture)", "as §2.1.1 prints χ²")
    return "\n".join(table_lines(headings, rows)) + "\n"


def draw(folder: Path) -> None:
    """Three panels: divergences against length, right texts against length, objectives against the probability of deleting."""
    require("matplotlib", "plot", "The figure")
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    results = json.loads((folder / RESULTS).read_text())
    settings, lengths, doses = results["settings"], results["settings"]["lengths"], results["settings"]["doses"]
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.8), layout="constrained")
    _lines(
        panels[0],
        lengths,
        {
            "χ²(data‖model)": results["by_length"]["chi2"],
            "KL(data‖model)": results["by_length"]["kl"],
            "χ²(data‖mixture)": results["by_length"]["chi2_mixture"],
        },
        ("#c0392b", "#1f5fa8", "#1e8449"),
    )
    panels[0].set(yscale="log", xlabel="steps n", title=f"without deleting, ε = {settings['error']:g}")
    _lines(
        panels[1],
        lengths,
        {f"δ = {float(deletes):g}": shares for deletes, shares in results["right"].items()},
        ("#7f8c9a", "#8e6bb0", "#1f5fa8", "#1e8449"),
    )
    panels[1].set(ylim=(0, 1.03), xlabel="steps n", title="texts that end right")
    names = {
        "likelihood": "−log likelihood of data",
        "occupancy_kl": "KL of occupancies",
        "occupancy_chi2_mixture": "χ² of occupancies, mixture",
    }
    relative = {name: [value / values[0] for value in values] for name, values in results["by_dose"].items()}
    _lines(
        panels[2], doses, {label: relative[name] for name, label in names.items()}, ("#7f8c9a", "#1f5fa8", "#1e8449")
    )
    panels[2].set(
        ylim=(0, 1.08), xlabel="δ = p(<bkspc> | wrong token)", title=f"relative to δ = 0, n = {settings['length']}"
    )
    figure.savefig(folder / FIGURE, dpi=140)
    plt.close(figure)


def _lines(axes: Any, x: Sequence[float], lines: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    for (label, y), colour in zip(lines.items(), colours, strict=True):
        axes.plot(x, y, label=label, color=colour, lw=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", lw=0.6)
    axes.legend(frameon=False, fontsize="small")
