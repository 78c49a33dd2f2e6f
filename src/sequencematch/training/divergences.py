"""The divergence that a run is told: one of the library's, an integral metric, or one of your own (§3.2, App. D)."""

from collections.abc import Mapping
from types import MappingProxyType

from sequencematch.core.divergences import DIVERGENCES, Divergence, chi2_mixture
from sequencematch.core.integral_metrics import INTEGRAL_METRICS, wasserstein
from sequencematch.data.modules import load_module
from sequencematch.data.spelling import check_choice, did_you_mean

_KNOWN: Mapping[str, Divergence] = MappingProxyType({**DIVERGENCES, **INTEGRAL_METRICS})


def find_divergence(name: str, mixture_weight: float, lipschitz_weight: float) -> Divergence:
    """A divergence by its name, or your own as `path/to/file.py:VALUE` or `package.module:VALUE`."""
    if name == "wasserstein":
        return wasserstein(lipschitz_weight)
    if name == "chi2_mixture":
        return chi2_mixture(mixture_weight)
    place, _, member = name.rpartition(":")
    if not place:
        check_choice("divergence", name, _KNOWN)
        return _KNOWN[name]
    module = load_module("divergence", place)
    found = getattr(module, member, None)
    if not isinstance(found, Divergence):
        got = "has none" if found is None else f"has a {type(found).__name__}"
        near = did_you_mean(member, vars(module)) if found is None else ""
        raise ValueError(f"`divergence` must name a `Divergence`, {member!r} here. {place} {got}{near or '.'}")
    return found
