"""The engine is `policy.generate` for rows that come, go and differ: same actions, whoever the neighbours are."""

import copy
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from sequencematch.policy import Policy, Sampling
from sequencematch.policy.decoding.slots import SlotDecoder, warp_rows
from sequencematch.serving.engine import Engine
from sequencematch.serving.jobs import ClosedError, Job, QueueFullError, RowFailedError, Update
from tests.oracles.naive_sampler import fresh_logits, log_sum_exp
from tests.serving.rows import VOCAB, Collected, policy, random_settings, submit

LONG: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "temperature": 0.0, "backspace_bias": -1000.0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = Engine(policy(), slots=16, queue=100).start()
    yield running
    running.close()


@pytest.fixture
def one_slot() -> Iterator[Engine]:
    """Not started: jobs can be queued first."""
    found = Engine(policy(), slots=1, queue=2)
    yield found
    found.close(timeout_s=0)


def alone(prompt: list[int], options: dict[str, Any], of: Policy | None = None) -> list[int]:
    return list((of or policy()).generate(prompt, **options).trajectories[0].chosen)


def random_rows(count: int, seed: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng = numpy.random.default_rng(seed)
    settings = [random_settings(rng) for _ in range(count)]
    return [rng.integers(0, VOCAB, rng.integers(1, 12)).tolist() for _ in settings], settings


def counted(engine: Engine) -> list[int]:
    """A list that grows with each step of the engine."""
    steps, advance = list[int](), engine.decoder.advance

    def count() -> None:
        steps.append(len(steps))
        advance()

    engine.decoder.advance = count  # type: ignore[method-assign]
    return steps


# Neighbours


def test_64_concurrent_rows_with_different_settings_equal_the_same_rows_alone(engine: Engine) -> None:
    prompts, settings = random_rows(64, seed=0)
    together = submit(engine, prompts, settings)
    assert sum(VOCAB in row.chosen for row in together) > 25, "too few rows delete"
    for prompt, options, row in zip(prompts, settings, together, strict=True):
        assert row.error is None
        assert row.chosen == alone(prompt, options), options


def test_a_setting_that_leaks_to_neighbours_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: every row has the bias of the first."""
    prompts, settings = random_rows(16, seed=1)
    real = SlotDecoder._real

    def first(self: SlotDecoder, name: str) -> Tensor:
        found = real(self, name)
        return found[:1].expand_as(found) if name == "backspace_bias" else found

    monkeypatch.setattr(SlotDecoder, "_real", first)
    with_leak = Engine(policy(), slots=16).start()
    together = submit(with_leak, prompts, settings)
    with_leak.close()
    assert any(row.chosen != alone(p, s) for p, s, row in zip(prompts, settings, together, strict=True))


def test_warping_rows_is_what_transformers_warpers_do_to_each(generator: torch.Generator) -> None:
    logits = torch.randn(40, 48, generator=generator, dtype=torch.float64) * 3
    logits[::3, 5] = -torch.inf  # as a <bkspc> that is not offered
    rng = numpy.random.default_rng(0)
    options: list[dict[str, Any]] = [
        {"temperature": float(rng.choice([0.5, 1.0, 2.0]))}
        | {k: v for k, v in {"top_k": 7, "top_p": 0.8, "min_p": 0.1}.items() if rng.random() < 0.5}
        for _ in logits
    ]
    columns = {"temperature": 1.0, "top_k": 2**40, "top_p": 1.0, "min_p": 0.0}
    given = [torch.tensor([o.get(name, default) for o in options]) for name, default in columns.items()]
    found = warp_rows(logits, *(column.double() if n != 1 else column.long() for n, column in enumerate(given)))
    for row, (wanted, option) in enumerate(zip(logits, options, strict=True)):
        warp = Sampling(**option).choice().warp
        assert torch.equal(found[row], wanted if warp is None else warp(wanted[None].clone())[0]), option


def test_probabilities_and_values_are_the_models_own(engine: Engine) -> None:
    """log p(a|s), V(s), log p(<bkspc>|s) and the likeliest actions, each from a fresh forward pass over the state."""
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 3, "temperature": 1.7, "top_k": 9, "backspace_bias": 8.0}
    told = Collected()
    engine.submit([Job([5, 6, 7], Sampling(**options), told, alternatives=4)])
    assert told.done.wait(600)
    stack, deleted = [5, 6, 7], 0
    updates = [update.actions for update in told.updates]
    for actions in updates:
        rows = zip(
            actions.chosen,
            actions.log_probs,
            actions.values,
            actions.bkspc_log_probs,
            actions.alternatives,
            strict=True,
        )
        for chosen, log_prob, value, bkspc, likely in rows:
            logits = fresh_logits(policy(), stack)
            total = log_sum_exp(logits)
            # float64, with logits of size 10
            assert value == pytest.approx(total, abs=1e-12)
            assert log_prob == pytest.approx(logits[chosen] - total, abs=1e-12)
            assert bkspc == pytest.approx(logits[VOCAB] - total, abs=1e-12)
            order = sorted(range(len(logits)), key=lambda action: -logits[action])[:4]
            assert [action for action, _ in likely] == order
            assert [p for _, p in likely] == pytest.approx([logits[a] - total for a in order], abs=1e-12)
            if chosen == VOCAB:
                stack, deleted = stack[:-1], deleted + 1
            else:
                stack = [*stack, chosen]
    assert deleted > 2


def test_tokens_already_written_may_be_deleted_and_count_as_written(engine: Engine) -> None:
    sampling = Sampling(max_new_tokens=3, temperature=0, protect_prompt=True, backspace_bias=1000.0, ban_deleted=True)
    told = Collected()
    engine.submit([Job([5, 6], sampling, told, prefix=[9, 9, 9])])
    assert told.done.wait(600)
    assert told.chosen[:3] == [VOCAB] * 3
    assert told.chosen[3] != VOCAB  # the prompt is protected
    full = Collected()
    engine.submit([Job([5, 6], Sampling(max_new_tokens=3, **_NEVER), full, prefix=[9, 9, 9])])
    assert full.done.wait(600)
    assert len(full.chosen) == 1  # at full length already


_NEVER: dict[str, Any] = {"temperature": 0.0, "backspace_bias": -1000.0}


# Joining and leaving


def test_a_new_row_joins_at_the_next_step_and_a_cancelled_one_frees_its_slot_at_once(one_slot: Engine) -> None:
    engine, second, steps = one_slot, Collected(), counted(one_slot)
    places: dict[str, int] = {}

    def first(_: Update) -> None:
        assert "cancelled" not in places, "a cancelled job was told more"
        if len(steps) == 5:
            engine.submit([Job([8, 9], Sampling(max_new_tokens=4, **_NEVER), tell_second)])
            engine.cancel(job)
            places["cancelled"] = len(steps)

    def tell_second(update: Update) -> None:
        places.setdefault("second", len(steps))
        second(update)

    job = Job([5, 6], Sampling(**LONG), first)
    engine.submit([job])
    engine.start()
    assert second.done.wait(600)
    assert places == {"cancelled": 5, "second": 6}
    assert second.chosen == alone([8, 9], {"max_new_tokens": 4, **_NEVER})
    assert engine.counts.ended == {"done": 1, "cancelled": 1, "timeout": 0, "error": 0}


def test_rows_that_arrive_one_by_one_equal_rows_alone() -> None:
    engine = Engine(policy(), slots=6)
    prompts, settings = random_rows(24, seed=2)
    told = [Collected() for _ in prompts]
    left = iter(range(len(prompts)))

    def submit_next() -> None:
        if (row := next(left, None)) is not None:
            engine.submit([Job(prompts[row], Sampling(**settings[row]), tell(row))])

    def tell(row: int) -> Callable[[Update], None]:
        def deliver(update: Update) -> None:
            if not told[row].updates:
                submit_next()  # in the middle of everybody's steps
            told[row](update)

        return deliver

    submit_next()
    engine.start()
    for row, collected in enumerate(told):
        assert collected.done.wait(600)
        assert collected.chosen == alone(prompts[row], settings[row])
    engine.close()


def test_a_row_out_of_time_ends_with_an_error_and_the_others_go_on() -> None:
    now = [0.0]
    engine = Engine(policy(), slots=2, clock=lambda: now[0])
    late, other = Collected(), Collected()

    def tell(update: Update) -> None:
        late(update)
        now[0] += 1

    engine.submit([Job([5], Sampling(**LONG), tell, timeout_s=3), Job([6], Sampling(**LONG), other)])
    engine.start()
    assert late.done.wait(600)
    assert other.done.wait(600)
    engine.close()
    assert isinstance(late.error, TimeoutError)
    assert len(late.chosen) == 3
    assert other.chosen == alone([6], LONG)


def test_a_full_queue_takes_all_rows_of_a_request_or_none(one_slot: Engine) -> None:
    one_slot.start()
    gate = threading.Event()
    first = Collected()

    def hold(update: Update) -> None:
        gate.wait(600)
        first(update)

    one_slot.submit([Job([5], Sampling(**LONG), hold)])
    while not one_slot.running:
        pass
    rest = [Collected() for _ in range(3)]
    jobs = [Job([6], Sampling(max_new_tokens=2, **_NEVER), told) for told in rest]
    with pytest.raises(QueueFullError, match="the queue holds 2"):
        one_slot.submit(jobs)
    assert not one_slot.waiting
    one_slot.submit(jobs[:2])
    gate.set()
    for told in (first, *rest[:2]):
        assert told.done.wait(600)
    assert one_slot.counts.rejected == 3


def test_closing_finishes_what_was_submitted_and_takes_no_more() -> None:
    engine = Engine(policy(), slots=1)
    told = [Collected() for _ in range(3)]
    engine.submit([Job([5, n], Sampling(max_new_tokens=6, **_NEVER), collected) for n, collected in enumerate(told)])
    engine.start()
    engine.close()
    for n, collected in enumerate(told):
        assert collected.chosen == alone([5, n], {"max_new_tokens": 6, **_NEVER})
    with pytest.raises(ClosedError, match="shutting down"):
        engine.submit([Job([5], Sampling(**LONG), told[0])])


# Faults of one row


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda _, logits: logits * math.nan, "must leave an action possible"),
        (lambda _, logits: logits - math.inf, "must leave an action possible"),
        (lambda _, logits: logits[:, :-1], r"must return one logit per action, \[1, 49\]. Got \[1, 48\]"),
        (lambda *_: [].pop(), "raised IndexError: pop from empty list"),
    ],
)
def test_a_fault_in_one_rows_processor_ends_that_row_alone(engine: Engine, processor: Any, text: str) -> None:
    prompts, settings = random_rows(6, seed=3)
    settings[2] = {**LONG, "logits_processor": _after(5, processor)}
    together = submit(engine, prompts, settings)
    for row, (prompt, options) in enumerate(zip(prompts, settings, strict=True)):
        if row == 2:
            error = together[row].error
            assert isinstance(error, RowFailedError)
            assert re.search(text, str(error))
            assert len(together[row].chosen) == 5
        else:
            assert together[row].chosen == alone(prompt, options)


def _after(count: int, processor: Any) -> Any:
    """A processor that does nothing `count` times."""
    calls = iter(range(10**6))
    return lambda state, logits: logits if next(calls) < count else processor(state, logits)


def poisoned() -> Policy:
    """A model with a NaN in the embedding of token 47."""
    found = copy.deepcopy(policy())
    with torch.no_grad():
        found.base.get_input_embeddings().weight[47] = math.nan
    return found


@pytest.mark.parametrize("wipes", [True, False])
def test_nan_in_one_row_spoils_neither_its_neighbours_nor_the_next_row_of_its_slot(
    wipes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not wiped, the control, the slot's cache has NaN in columns that are masked for the next row, and 0 · NaN is NaN."""
    if not wipes:
        monkeypatch.setattr(SlotDecoder, "wipe", lambda *_: None)
    model = poisoned()
    options = {**LONG, "max_new_tokens": 20, "min_new_tokens": 20, "logits_processor": _never_47}
    engine = Engine(model, slots=2)
    wrong, neighbour, later = Collected(), Collected(), Collected()
    long = [5 + n % 7 for n in range(30)]
    engine.submit(
        [
            Job([6, 7, 8, 47, 9, 10], Sampling(**options), wrong),
            Job(long, Sampling(**options), neighbour),
            Job([11, 12], Sampling(**options), later),
        ]
    )
    engine.start()
    for told in (wrong, neighbour, later):
        assert told.done.wait(600)
    engine.close()
    assert isinstance(wrong.error, RowFailedError)
    assert "logits are NaN" in str(wrong.error)
    assert neighbour.chosen == alone(long, options, model)
    if wipes:
        assert later.chosen == alone([11, 12], options, model)
    else:
        assert later.error is not None


def _never_47(_: Tensor, logits: Tensor) -> Tensor:
    logits[:, 47] = -torch.inf
    return logits


def test_when_a_step_fails_everybody_is_told_and_nothing_more_is_taken() -> None:
    engine = Engine(policy(), slots=1)

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine.decoder.advance = fail  # type: ignore[method-assign]
    told = [Collected(), Collected()]
    engine.submit([Job([5], Sampling(**LONG), collected) for collected in told])
    silence, threading.excepthook = threading.excepthook, lambda _: None
    try:
        engine.start()
        for collected in told:
            assert collected.done.wait(600)
            assert isinstance(collected.error, ClosedError)
        engine._thread.join()
    finally:
        threading.excepthook = silence
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(ClosedError, match="has failed"):
        engine.submit([Job([5], Sampling(**LONG), told[0])])


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"prompt": []}, "`prompt` must not be empty"),
        ({"prompt": [48]}, r"must hold token ids in \[0, 48\)"),
        ({"prompt": [5] * 60}, "must fit the context of 64 tokens. Got a prompt of 60 and max_new_tokens=8"),
        ({"prefix": [5] * 9}, "`prefix` must not be longer than `max_new_tokens`. Got 9 and 8"),
        ({"options": {"max_actions": 10**6}}, "`max_actions` must be at most 2049. Got 1000000"),
        ({"options": {"stop_tokens": [4]}}, "`stop_tokens` must be left out"),
        ({"alternatives": 21}, "`alternatives` must be from 0 to 20. Got 21"),
        ({"options": {"seed": None}}, "`seed` must be set"),
    ],
)
def test_what_cannot_be_decoded_is_refused(engine: Engine, job: dict[str, Any], text: str) -> None:
    options = {"max_new_tokens": 8, "seed": 0, **job.pop("options", {})}
    with pytest.raises(ValueError, match=text):
        engine.submit([Job(job.pop("prompt", [5]), Sampling(**options), Collected(), **job)])


def test_an_engine_needs_slots_a_queue_and_a_context_that_the_model_has() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"slots": 0}, "`slots` must be at least 1"),
        ({"queue": 0}, "`queue` must be at least 1"),
        ({"context": 65}, "`context` must be from 2 to the model's own 64 tokens. Got 65"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            Engine(policy(), **options)
