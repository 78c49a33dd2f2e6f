"""Every order is answered once, in order, whatever happens to workers."""

import itertools
import logging
import random
from typing import Any

import pytest

from sequencematch.training.rollouts.pool import ERRORS, LOSSES, Done, Pool, RolloutWorkerError
from sequencematch.training.rollouts.worker import Made
from tests.training.memory_engine import SPACE, Clock, MemoryEngine, order, rollouts


def pool(workers: int = 2, *, waits: bool = True, **options: Any) -> tuple[Pool, MemoryEngine, Clock]:
    clock = Clock()
    engine = MemoryEngine(clock, **options)
    made = Pool(engine, SPACE, workers, limit_s=30, waits=waits, clock=clock)
    made.tend()
    return made, engine, clock


def test_answers_come_back_in_the_order_of_the_orders() -> None:
    """Two workers; the second is done first. Rollouts 0 to 3: two orders of two."""
    made, engine, _ = pool()
    numbers = [made.submit(order(made.new_number(), first), None) for first in (0, 2)]
    made.tend()
    assert made.depth == 4
    engine.answer(2)
    made.tend()
    engine.answer(1)
    found = made.collect(numbers)
    assert found == [*rollouts(order(1, 0)), *rollouts(order(2, 2))]
    assert [e.trajectory.initial for e in found] == [(11, 0), (11, 1), (11, 2), (11, 3)]
    assert (made.depth, made.counts.received, made.reported) == (0, 4, 4)


def test_the_order_of_a_dead_worker_goes_to_another_one_under_its_number() -> None:
    made, engine, _ = pool()
    number = made.submit(order(made.new_number(), version=7), "weights")
    made.tend()
    assert list(engine.working) == [1]
    engine.die(1)
    made.tend()
    assert engine.killed == [1]
    assert engine.launched == [1, 2, 3]
    assert engine.working == {2: order(number, version=7)}
    engine.answer(2)
    assert made.collect([number]) == rollouts(order(number, version=7))
    assert (made.counts.replaced, made.counts.duplicates) == (1, 0)


def test_a_hung_worker_is_replaced_after_the_limit_and_not_before(caplog: pytest.LogCaptureFixture) -> None:
    made, engine, clock = pool(1)
    made.submit(order(made.new_number()), None)
    made.tend()
    clock.now = 30
    made.tend()
    assert engine.killed == []
    clock.now = 30.5
    with caplog.at_level(logging.WARNING):
        made.tend()
    assert "Rollout worker 1 (process 1001) has not answered for 30 s; it is replaced." in caplog.text
    assert engine.killed == [1]
    made.tend()
    assert list(engine.working) == [2]


def test_an_answer_that_comes_after_its_worker_was_replaced_is_used_once() -> None:
    """The first answer counts, whoever gives it. The second one is a duplicate."""
    made, engine, clock = pool(1)
    number = made.submit(order(made.new_number()), None)
    made.tend()
    late = engine.working[1]
    clock.now = 31
    made.tend()
    made.tend()
    assert list(engine.working) == [2]
    engine.say(1, late)
    made.tend()
    engine.answer(2)
    made.tend()
    assert len(made.collect([number])) == 2
    assert (made.counts.received, made.reported, made.counts.duplicates) == (4, 4, 2)


def test_an_answer_given_twice_is_dropped_and_counted() -> None:
    made, engine, _ = pool(1)
    numbers = [made.submit(order(made.new_number(), first), None) for first in (0, 2)]
    made.tend()
    first = engine.answer(1)
    engine.say(1, first)
    made.tend()
    engine.answer(1)
    assert len(made.collect(numbers)) == 4
    assert (made.counts.received, made.reported, made.counts.duplicates) == (6, 6, 2)


def test_an_answer_that_got_lost_shows_in_the_counts() -> None:
    """A negative control: the worker's total runs ahead of what was received."""
    made, engine, _ = pool(1)
    number = made.submit(order(made.new_number()), None)
    made.tend()
    engine.totals[1] = 5
    engine.answer(1)
    made.collect([number])
    assert (made.counts.received, made.reported) == (2, 7)


def test_dropped_orders_are_stale_whether_they_are_done_or_not() -> None:
    made, engine, _ = pool()
    numbers = [made.submit(order(made.new_number(), first), None) for first in (0, 2, 4)]
    made.tend()
    engine.answer(1)
    made.tend()
    assert list(engine.working) == [2, 1]  # the first worker has the third order
    made.drop(numbers)
    assert made.counts.stale == 2
    assert made.depth == 0
    engine.answer(1)
    engine.answer(2)
    made.tend()
    assert (made.counts.stale, made.counts.duplicates, made.counts.received) == (6, 0, 6)


def test_an_error_fails_the_run_after_a_few_repeats_with_its_text() -> None:
    made, engine, _ = pool(1)
    number = made.submit(order(made.new_number()), None)
    for _ in range(ERRORS - 1):
        made.tend()
        made.tend()
        engine.fail(next(iter(engine.working)))
    made.tend()
    made.tend()
    engine.fail(next(iter(engine.working)))
    with pytest.raises(RolloutWorkerError, match=r"failed 3 times. The last time:\n.*\nRuntimeError: out of memory"):
        made.collect([number])


def test_an_error_that_passes_does_not_fail_the_run() -> None:
    made, engine, _ = pool(1)
    number = made.submit(order(made.new_number()), None)
    for _ in range(ERRORS - 1):
        made.tend()
        made.tend()
        engine.fail(next(iter(engine.working)))
    engine.answers = True
    assert len(made.collect([number])) == 2
    assert made.counts.replaced == ERRORS - 1


def test_a_worker_that_can_never_start_fails_the_run() -> None:
    made, engine, _ = pool(1, room=0)
    made.submit(order(made.new_number()), None)
    for attempt in range(1, ERRORS + 1):
        assert engine.launched[-1] == attempt
        engine.fail(attempt, "ImportError: no torch")
        if attempt < ERRORS:
            made.tend()
    with pytest.raises(RolloutWorkerError, match="ImportError: no torch"):
        made.tend()


def test_an_order_that_kills_every_worker_fails_the_run() -> None:
    made, engine, _ = pool(1)
    made.submit(order(made.new_number(), 64, 32), None)
    for _ in range(LOSSES):
        made.tend()
        made.tend()
        engine.die(next(iter(engine.working)))
    with pytest.raises(
        RolloutWorkerError, match=r"Rollouts 64 to 95 were given to 10 workers.* lower `generation_batch_size`"
    ):
        made.tend()


def test_workers_that_die_while_they_start_are_started_again_at_growing_intervals() -> None:
    made, engine, clock = pool(1, room=0)
    times = []
    for _ in range(6):
        engine.die(engine.launched[-1])
        before = len(engine.launched)
        while len(engine.launched) == before:
            made.tend(timeout_s=1)
        times.append(clock.now)
    assert [b - a for a, b in itertools.pairwise(times)] == [1, 3, 7, 15, 30]


def test_a_worker_that_waits_for_room_in_a_cluster_is_not_hung() -> None:
    for has_queue in (True, False):
        made, engine, clock = pool(1, room=0, has_queue=has_queue)
        clock.now = 1000
        made.tend()
        assert engine.killed == ([] if has_queue else [1])


def test_without_workers_training_waits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made, engine, clock = pool(2, room=0, answers=True, has_queue=True)
    number = made.submit(order(made.new_number()), None)
    events = engine.events

    def room_after_some_time(timeout_s: float) -> Any:
        engine.room = 1 if clock.now > 200 else 0
        return events(timeout_s)

    engine.events = room_after_some_time  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert len(made.collect([number])) == 2
    said = [r.message for r in caplog.records]
    assert (
        said == ["There is no rollout worker: training waits. 2 of 2 are starting or wait for room in the cluster."] * 3
    )
    assert made.counts.waited_s > 199


def test_without_workers_training_fails_if_that_is_asked_for() -> None:
    made, _, clock = pool(2, room=0, has_queue=True, waits=False)
    number = made.submit(order(made.new_number()), None)
    with pytest.raises(
        RolloutWorkerError, match=r"no rollout worker for 31 s, and `rollout_without_workers` is 'fail'. 2 of 2"
    ):
        made.collect([number])
    assert clock.now == 31


@pytest.mark.parametrize("seed", range(20))
def test_every_rollout_is_received_once_under_random_faults(seed: int) -> None:
    """Workers die, hang, fail once, answer late and answer twice; orders are dropped. The oracle is the list of orders."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    made, engine, clock = pool(3)
    expected, found, dropped = [], [], 0
    for number in range(60):
        orders = [made.submit(order(made.new_number(), 2 * (3 * number + part)), None) for part in range(3)]
        engine.answers, late = False, []
        for _ in range(chance.randrange(4)):
            made.tend()
            for worker in list(engine.working):
                fate = chance.choice(["answer", "answer", "twice", "die", "hang", "late", "wait"])
                if fate in ("answer", "twice"):
                    done = engine.answer(worker)
                    if fate == "twice":
                        engine.say(worker, done)
                elif fate == "die":
                    engine.die(worker)
                elif fate == "late":
                    late.append((worker, engine.working[worker]))
                elif fate == "hang":
                    clock.now += 31
                    made.tend()
                    break
        for worker, done in late:
            if worker not in engine.working:
                engine.say(worker, done)
        engine.answers = True
        for worker in list(engine.working):
            engine.answer(worker)
        if chance.random() < 0.2:
            made.drop(orders)
            dropped += 1
            continue
        found += made.collect(orders)
        expected += [
            e for n, first in zip(orders, range(3), strict=True) for e in rollouts(order(n, 2 * (3 * number + first)))
        ]
    assert dropped
    assert found == expected
    assert made.counts.received == made.reported
    made.drop(list(made.open))
    engine.answers = True
    assert made.counts.received == len(found) + made.counts.stale + made.counts.duplicates


def test_stopping_kills_every_worker() -> None:
    made, engine, _ = pool(3)
    made.submit(order(made.new_number()), None)
    made.tend()
    made.stop()
    assert sorted(engine.killed) == [1, 2, 3]
    assert made.depth == 0


def test_an_answer_to_no_order_is_a_duplicate() -> None:
    made, engine, _ = pool(1)
    engine.pending.append(Done(77, Made(99, b"", 4, 4)))
    made.tend()
    assert (made.counts.duplicates, made.counts.received, made.reported) == (4, 4, 4)
