"""A divergence of your own: Neyman's χ², which the paper does not have.

    sequencematch train examples/train_small.yaml --divergence examples/new_divergence.py:NEYMAN

A divergence D_f(ρ_θ, ρ_data) = E_data[f(ρ_θ/ρ_data)] enters the loss as φ(x) = −f*(−x), where f*(y) = sup_t (ty − f(t)) is the
convex conjugate. For f(t) = (t − 1)²/t the supremum is at t = 1/√(1 − y), so f*(y) = 2 − 2√(1 − y) and φ(x) = 2√(1 + x) − 2, which
ends at x = −1. It has φ(0) = 0 and φ'(0) = 1, as all of this library have. This script compares φ with the conjugate on a grid.
"""

import math

import torch

from sequencematch.core import Divergence

NEYMAN = Divergence(
    "neyman",
    f=lambda t: (t - 1) ** 2 / t,
    phi=lambda x: 2 * torch.sqrt(1 + x) - 2,
    phi_prime=lambda x: 1 / torch.sqrt(1 + x),
    domain=(-1.0, math.inf),
    delta=0.1,  # left of −0.9 a line continues φ: its slope would go to infinity
)


def largest_error(divergence: Divergence) -> float:
    """The largest difference of φ and −f*(−x) for x from −0.8 to 3, the supremum taken over 200,000 ratios."""
    ratios = torch.logspace(-4, 4, 200_000, dtype=torch.float64)
    points = torch.linspace(-0.8, 3, 39, dtype=torch.float64)
    conjugates = torch.stack([(-x * ratios - divergence.f(ratios)).max() for x in points])
    return float((divergence(points) + conjugates).abs().max())


if __name__ == "__main__":
    print(f"largest difference of φ and −f*(−x): {largest_error(NEYMAN):.0e}")
