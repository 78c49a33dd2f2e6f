"""Threads that share a policy get what they would get alone: generating, scoring, adapters merged and not."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.policy.changes import lock_of
from tests.policy.test_adapters import adapted
from tests.policy.tiny_models import llama

#: Calls of each thread.
CALLS = 8
GENERATING = 4


def encoding_of(policy: Policy) -> Encoding:
    space = policy.space
    return encode([Trajectory.rollout(space, (5, 6), (7, space.bkspc, 8, 9, space.bkspc, 10, space.eos))])


def generated(policy: Policy, seed: int) -> Any:
    result = policy.generate([5, 6, 7], max_new_tokens=6, seed=seed, backspace_bias=2.0)
    return result.trajectories[0].chosen, result.log_probs[0].tolist()


def scored(policy: Policy, seed: int) -> Any:
    """Dropout draws from torch's global generator, which nothing else here uses."""
    torch.manual_seed(seed)
    with torch.no_grad():
        return policy(encoding_of(policy)).value.tolist()


def rolled_out(policy: Policy, seed: int) -> Any:
    with policy.for_rollouts():
        return generated(policy, seed)


def differences(policy: Policy, jobs: Sequence[Callable[[Policy, int], Any]], calls: int = CALLS) -> int:
    """How many calls gave another result beside the other threads than alone."""
    alone = [[job(policy, seed) for seed in range(calls)] for job in jobs]
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[Policy, int], Any]) -> list[Any]:
        start.wait()
        return [job(policy, seed) for seed in range(calls)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(run, jobs))
    return sum(a != b for mine, others in zip(alone, together, strict=True) for a, b in zip(mine, others, strict=True))


def is_free(policy: Policy) -> bool:
    """Whether another thread could run a forward pass now."""

    def try_lock() -> bool:
        lock = lock_of(policy.base)
        is_locked = lock.acquire(blocking=False)
        if is_locked:
            lock.release()
        return bool(is_locked)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(try_lock).result()


def dropping_out() -> Policy:
    return Policy(llama(attention_dropout=0.3))


@pytest.mark.parametrize("is_training", [True, False], ids=["train mode", "eval mode"])
def test_threads_that_generate_and_score_get_what_they_get_alone(is_training: bool) -> None:
    policy = dropping_out().train(is_training)
    assert differences(policy, [*[generated] * GENERATING, scored]) == 0
    assert policy.training == is_training
    assert all(module.training == is_training for module in policy.modules())


def test_threads_wait_while_an_adapter_is_merged() -> None:
    """Merged and unmerged weights round differently, so a call at the wrong moment would show."""
    policy = adapted(llama(attention_dropout=0.3), lora_dropout=0.3).train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    assert rolled_out(policy, 0) != generated(policy, 0)
    assert differences(policy, [rolled_out, rolled_out, generated, scored], calls=8) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_a_training_step_keeps_other_threads_out() -> None:
    policy = adapted(llama(attention_dropout=0.3).bfloat16()).eval()

    def stepped(policy: Policy, seed: int) -> Any:
        with policy.for_training(), torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(seed)
            value = policy(encoding_of(policy)).value
            return value.tolist()

    assert differences(policy, [stepped, generated, generated], calls=8) == 0
    assert not any(module.training for module in policy.modules())


def test_without_the_lock_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def none() -> Iterator[None]:
        yield

    for module in ("changes", "scoring"):
        monkeypatch.setattr(f"sequencematch.policy.{module}.lock_of", lambda _: none())
    policy, jobs = dropping_out().train(), [*[generated] * GENERATING, scored]
    assert any(differences(policy.train(), jobs) for _ in range(50))  # a race need not show at once


def test_a_paused_stream_blocks_nobody() -> None:
    policy = dropping_out().train()
    stream = policy.stream([5, 6, 7], max_new_tokens=8, seed=0)
    next(stream)
    assert is_free(policy)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(scored, policy, 0).result()
    assert len(list(stream)) > 0
    with policy.for_rollouts():
        assert not is_free(policy)  # control
