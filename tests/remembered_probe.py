"""Policies of one kind of model are probed once, but in the tests of what a probe finds."""

import os
from typing import Any

from sequencematch.policy import policy as policy_module
from sequencematch.policy.probe import select_attention

#: Tests of the probe and of what it probes: there each policy is probed.
PROBING = tuple(
    f"tests/policy/test_{name}.py"
    for name in (
        "architectures",
        "causal_prefix",
        "cuda",
        "fusing",
        "masks",
        "modes",
        "policy",
        "quantized",
        "verdicts",
    )
)
#: A kind of model that passed → the attention that was selected for it.
_passed: dict[tuple[object, ...], str] = {}


def select_remembered_attention(policy: Any) -> None:
    """`select_attention`, but for a model of a class, configuration and dtype that passed before."""
    config = policy.base.config
    kind = (
        type(policy.model),
        type(policy.base),
        policy.base.dtype,
        config._attn_implementation,
        config.to_json_string(),
    )
    if os.environ.get("PYTEST_CURRENT_TEST", "").startswith(PROBING):
        select_attention(policy)
    elif kind in _passed:
        config._attn_implementation = _passed[kind]
    else:
        select_attention(policy)
        _passed[kind] = config._attn_implementation


def remember_probes() -> None:
    """From now on, in this process."""
    policy_module.select_attention = select_remembered_attention  # type: ignore[attr-defined]
