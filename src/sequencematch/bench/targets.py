"""What the numbers are held against. A number of another machine, or of smaller shapes, is not judged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from sequencematch.bench.measure import Row

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """The range a number must lie in, and the smaller one it would ideally lie in."""

    must: Bounds
    stretch: Bounds | None = None


class Verdict(StrEnum):
    """How a number stands."""

    stretch = "stretch"
    met = "met"
    missed = "missed"
    not_judged = "not judged"  # there is a target, but for another machine, or for whole shapes and more rounds
    none = ""


def at_most(must: float, stretch: float | None = None) -> Target:
    """Less is better."""
    return Target((-math.inf, must), None if stretch is None else (-math.inf, stretch))


def at_least(must: float, stretch: float | None = None) -> Target:
    """More is better."""
    return Target((must, math.inf), None if stretch is None else (stretch, math.inf))


CONTROL = Target((0.95, 1.05))
#: A machine (a CPU, or part of a GPU's name) → the targets of rows measured there, by `Row.target`.
TARGETS: Mapping[str, Mapping[str, Target]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {
                "same rows, BC": at_most(1.05, 1.0),
                "same rows, equal": at_most(1.05, 1.0),
                "step, equal": at_most(2.2, 2.05),
                "step, shared": at_most(1.6, 1.4),
                "decoding, dynamic": at_least(1.0, 1.3),
                "control": CONTROL,
            }
        ),
        "H200": MappingProxyType(
            {
                "amortised, equal": at_most(2.2, 2.05),
                "amortised, short": at_most(1.8, 1.65),
                "amortised, shared": at_most(1.6, 1.35),
                "paper": at_least(2, 3),
                "roofline": at_least(0.6, 0.75),
                "decoding, dynamic": at_least(3, 6),
                "decoding, static": at_least(1.2, 2),
                "memory": at_most(1.0, 0.7),
                "length": at_most(1.1),
                "control": CONTROL,
            }
        ),
    }
)
MIN_ROUNDS = 11


def targets_of(machine: str) -> Mapping[str, Target]:
    """The targets of a machine, none for most."""
    return next((targets for kind, targets in TARGETS.items() if kind in machine), {})


def judge(row: Row, machine: str, *, is_full: bool) -> Verdict:
    """Whether a row reaches its target, if it has one here."""
    target = targets_of(machine).get(row.target or "")
    if target is None or not is_full or (row.target == "control" and row.rounds < MIN_ROUNDS):
        has_target = any(row.target in targets for targets in TARGETS.values())
        return Verdict.not_judged if has_target else Verdict.none
    for verdict, bounds in ((Verdict.stretch, target.stretch), (Verdict.met, target.must)):
        if bounds is not None and bounds[0] <= row.value <= bounds[1]:
            return verdict
    return Verdict.missed
