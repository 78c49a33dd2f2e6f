"""Targets: the acceptance numbers of the benchmark. They hold for full shapes on the machine they name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from benchmarks.timing import Measurement

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Target:
    """The range a number must lie in, and a narrower range to strive for."""

    must: Bounds
    stretch: Bounds | None = None


class Verdict(StrEnum):
    """How a measurement compares with its target."""

    stretch = "stretch"
    met = "met"
    missed = "missed"
    not_judged = "not judged"  # the target is for another machine, for full shapes, or for more rounds
    none = ""


def at_most(must: float, stretch: float | None = None) -> Target:
    """Upper bounds."""
    return Target((-math.inf, must), None if stretch is None else (-math.inf, stretch))


def at_least(must: float, stretch: float | None = None) -> Target:
    """Lower bounds."""
    return Target((must, math.inf), None if stretch is None else (stretch, math.inf))


CONTROL = Target((0.95, 1.05))
#: A machine (a CPU, or part of a GPU's name) → the targets of measurements there, by `Measurement.target`.
TARGETS: Mapping[str, Mapping[str, Target]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {
                "same rows, BC": at_most(1.05, 1.0),
                "same rows, equal": at_most(1.05, 1.0),
                "step, equal": at_most(2.2, 2.05),
                "step, shared": at_most(1.6, 1.4),
                "decoding, dynamic": at_least(1.0, 1.3),
                "search": at_least(0.95),
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
                "search": at_least(0.9),
                "memory": at_most(1.0, 0.7),
                "length": at_most(1.1),
                "control": CONTROL,
            }
        ),
    }
)
MIN_ROUNDS = 11


def targets_of(machine: str) -> Mapping[str, Target]:
    """The targets of a machine; most machines have none."""
    return next((targets for kind, targets in TARGETS.items() if kind in machine), {})


def judge(measurement: Measurement, machine: str, *, is_full: bool) -> Verdict:
    """Compare a measurement with its target on this machine, if it has one."""
    target = targets_of(machine).get(measurement.target or "")
    if target is None or not is_full or (measurement.target == "control" and measurement.rounds < MIN_ROUNDS):
        has_target = any(measurement.target in targets for targets in TARGETS.values())
        return Verdict.not_judged if has_target else Verdict.none
    for verdict, bounds in ((Verdict.stretch, target.stretch), (Verdict.met, target.must)):
        if bounds is not None and bounds[0] <= measurement.value <= bounds[1]:
            return verdict
    return Verdict.missed
