"""Where nothing may be deleted `<bkspc>` is not offered; and with `hold_back` that floor moves, so that a stream is final."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from sequencematch.policy import Policy
from tests.policy.tiny_models import exact_llama, llama

BK = 48


def deleting() -> Policy:
    policy = Policy(llama())
    with torch.no_grad():
        policy.backspace.row.copy_(torch.randn(32, generator=torch.Generator().manual_seed(1)) * 0.8)
    return policy


def test_greedy_decoding_does_not_choose_a_backspace_that_changes_nothing() -> None:
    policy = deleting()
    options: dict[str, Any] = {"temperature": 0.0, "protect_prompt": True, "backspace_bias": 30.0, "max_new_tokens": 16}
    (stuck,) = policy.generate([5, 6], self_loops=True, **options).trajectories
    assert set(stuck.chosen) == {BK}  # as before: it gave up after 65 actions
    (free,) = policy.generate([5, 6], **options).trajectories
    assert free.chosen[0] != BK
    assert len(set(free.chosen)) > 1


def final_texts(
    policy: Policy, prompt: list[int], depth: int, *, self_loops: bool, temperature: float
) -> dict[Any, float]:
    """The exact distribution of the final text: the linear equations of a chain over all states of up to `depth` new tokens."""
    eos = policy.space.eos
    states = [tuple(prompt)]
    tokens = [3, 4]  # a vocabulary of two, by masking the rest
    for state in states:
        if len(state) < len(prompt) + depth:
            states.extend((*state, token) for token in tokens)
    index = {state: n for n, state in enumerate(states)}
    step = numpy.zeros((len(states), len(states)))
    ends = numpy.zeros(len(states))
    for state, n in index.items():
        with torch.no_grad():
            hidden = policy.base.base_model(input_ids=torch.tensor([state])).last_hidden_state[0, -1]
            logits = policy.action_logits(hidden).double() / temperature
        is_full, at_floor = len(state) == len(prompt) + depth, len(state) == len(prompt)
        offered = [eos] + ([] if is_full else tokens) + ([BK] if self_loops or not at_floor else [])
        chances = dict(zip(offered, logits[offered].softmax(-1).tolist(), strict=True))
        ends[n] = chances.pop(eos)
        for action, chance in chances.items():
            after = (*state, action) if action != BK else state if at_floor else state[:-1]
            step[n, index[after]] += chance
    visits = numpy.linalg.solve((numpy.eye(len(states)) - step).T, numpy.eye(len(states))[0])
    return dict(zip(states, visits * ends, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_leaving_out_self_loops_keeps_the_distribution_of_the_final_text(temperature: float) -> None:
    """p(a | not a self-loop) at the floor: a self-loop only repeats the draw. Exact in a small chain; top-p would differ."""
    policy = Policy(exact_llama())
    with torch.no_grad():
        policy.backspace.row.normal_(generator=torch.Generator().manual_seed(0))
    with_loops, without = (
        final_texts(policy, [5, 6], 3, self_loops=loops, temperature=temperature) for loops in (True, False)
    )
    assert abs(sum(without.values()) - 1) < 1e-12
    assert max(abs(with_loops[text] - without[text]) for text in without) < 1e-12


def test_log_probs_are_of_what_was_offered_and_values_of_all_actions() -> None:
    policy = deleting()
    with torch.no_grad():
        hidden = policy.base.base_model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
        policy.backspace.row.copy_(hidden / hidden.norm() * 2)  # likely there
        logits = policy.action_logits(hidden)
    done = policy.generate([[5, 6, 7]], seed=1, protect_prompt=True, max_new_tokens=6)
    first = done.trajectories[0].chosen[0]
    torch.testing.assert_close(done.values[0][0], logits.logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(done.log_probs[0][0], logits[:BK].log_softmax(-1)[first], atol=1e-4, rtol=0)
    assert float(logits.softmax(-1)[BK]) > 0.01  # leaving it out matters


@pytest.mark.parametrize("hold_back", [0, 1, 3])
def test_a_token_with_so_many_above_it_is_never_deleted_and_a_stream_can_be_sent(hold_back: int) -> None:
    policy, deleted = deleting(), 0
    for seed, prompt in enumerate([[5], [6, 7, 8], [9, 10]]):
        options: dict[str, Any] = {"seed": seed, "backspace_bias": 6.0, "hold_back": hold_back, "max_new_tokens": 12}
        done = policy.generate([prompt], **options)
        (trajectory,) = done.trajectories
        sent, deepest = list[int](), len(prompt)
        for event in policy.stream(prompt, **options):
            deepest = max(deepest, len(event.tokens))
            sent += event.tokens[len(sent) : deepest - hold_back]
            assert list(event.tokens[: len(sent)]) == sent, "something that was sent was taken back"
        final = list(trajectory.final_state.tokens)
        assert final[: len(sent)] == sent
        assert len(final) - len(sent) <= hold_back
        deleted += trajectory.executed.count(BK)
    assert (deleted > 0) == (hold_back > 0)


def test_an_infinite_hold_back_changes_nothing() -> None:
    policy = deleting()
    options: dict[str, Any] = {"seed": 3, "backspace_bias": 6.0, "max_new_tokens": 10}
    prompts = [[5], [6, 7, 8], [9, 10]]
    free, far = policy.generate(prompts, **options), policy.generate(prompts, hold_back=10**6, **options)
    assert [t.chosen for t in free.trajectories] == [t.chosen for t in far.trajectories]
    held = policy.generate(prompts, hold_back=1, **options)
    assert [t.chosen for t in free.trajectories] != [t.chosen for t in held.trajectories]


def test_at_the_floor_a_processor_sees_no_backspace() -> None:
    seen: list[float] = []

    def watch(_: Tensor, logits: Tensor) -> Tensor:
        seen.append(float(logits[0, BK]))
        return logits

    deleting().generate([[5]], seed=0, max_new_tokens=1, max_actions=1, logits_processor=watch)
    assert seen == [-torch.inf]
