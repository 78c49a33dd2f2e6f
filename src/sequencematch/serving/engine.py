"""Continuous batching: one thread owns the model, and requests join and leave its running batch at any step."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from sequencematch.policy.decoding.cuda_graphs import can_capture
from sequencematch.policy.decoding.decoder import MAX_RECORD_BYTES
from sequencematch.policy.decoding.search import action_limit
from sequencematch.policy.decoding.slot_graphs import GraphSlotDecoder
from sequencematch.policy.decoding.slots import SlotDecoder, Snapshot, row_settings
from sequencematch.policy.scoring import Scorer
from sequencematch.policy.threads import limit_threads
from sequencematch.serving.jobs import (
    NOTHING,
    Actions,
    ClosedError,
    Counts,
    Job,
    QueueFullError,
    RowFailedError,
    Update,
    random_numbers,
)

#: Default number of slots: rows that are decoded at the same time.
SLOTS = 32
#: Default number of rows that may wait for a slot.
QUEUE = 256
#: The longest default context: memory for all slots is allocated for it, and some models have contexts of 100,000 tokens.
CONTEXT = 4096


class Engine:
    """A policy, its slots, and the thread that decodes.

    Submit jobs from any thread. A job starts at the next step if a slot is free. A row that ends, is cancelled, runs out of time or
    has NaN logits frees its slot at once; the others go on.
    """

    def __init__(
        self,
        policy: Scorer,
        *,
        slots: int = SLOTS,
        queue: int = QUEUE,
        context: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate slots for rows of `context` tokens, by default the model's own, at most `CONTEXT`. `start` starts the thread."""
        for name, value in (("slots", slots), ("queue", queue)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1. Got {value}.")
        self.context = min(policy.max_positions, CONTEXT) if context is None else context
        if not 2 <= self.context <= policy.max_positions:
            raise ValueError(
                f"`context` must be from 2 to the model's own {policy.max_positions} tokens. Got {self.context}."
            )
        self.policy, self.slots, self.queue, self.clock = policy, slots, queue, clock
        #: The most actions of a row: what a search over the whole context takes, if records of so many fit.
        self.max_actions = min(action_limit(self.context, search=True), MAX_RECORD_BYTES // 32 // slots)
        kind = GraphSlotDecoder if can_capture(policy, policy.base) else SlotDecoder
        space = policy.space
        self.decoder = kind(
            policy.base,
            policy.action_logits,
            eos=space.eos,
            ends=space.ends,
            bkspc=space.bkspc,
            slots=slots,
            depth=self.context,
            max_actions=self.max_actions,
        )
        self.is_captured = kind is GraphSlotDecoder
        self.counts = Counts()
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # number of a row → its job
        self.failure: BaseException | None = None
        self._numbers = count()
        self._changed = threading.Condition()
        self._cancelled: list[Job] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="sequencematch engine", daemon=True)

    def start(self) -> "Engine":
        """Start decoding."""
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._is_closing and self.failure is None

    def check(self, job: Job) -> None:
        """Refuse a job that can't be decoded here."""
        space, given = self.policy.space, (*job.prompt, *job.prefix)
        row_settings(job.sampling, len(job.prompt), job.alternatives)
        if not job.prompt:
            raise ValueError("`prompt` must not be empty: the policy needs a state to act in. Got no token.")
        if min(given) < 0 or max(given) >= space.vocab_size:
            raise ValueError(
                f"`prompt` and `prefix` must hold token ids in [0, {space.vocab_size}). Got {min(given)} to {max(given)}."
            )
        if len(job.prompt) + job.sampling.max_new_tokens > self.context:
            raise ValueError(
                f"`prompt` and `max_new_tokens` must fit the context of {self.context} tokens. "
                f"Got a prompt of {len(job.prompt)} and max_new_tokens={job.sampling.max_new_tokens}. Shorten one of them."
            )
        if len(job.prefix) > job.sampling.max_new_tokens:
            raise ValueError(
                f"`prefix` must not be longer than `max_new_tokens`. Got {len(job.prefix)} and {job.sampling.max_new_tokens}."
            )
        if job.sampling.action_limit > self.max_actions:
            raise ValueError(
                f"`max_actions` must be at most {self.max_actions}. Got {job.sampling.action_limit}; lower it, or `max_new_tokens`."
            )
        if self.is_captured and job.sampling.logits_processor is not None:
            raise ValueError("`logits_processor` must be left out on a GPU: a captured step can't call it.")
        if not job.sampling.greedy and job.sampling.seed is None:
            raise ValueError("`seed` must be set for a row that is sampled. Got None.")

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs, all or none. They wait until the engine is started."""
        for job in jobs:
            self.check(job)
        with self._changed:
            if self._is_closing or self.failure is not None:
                raise ClosedError("The server is shutting down." if self._is_closing else "The engine has failed.")
            free = self.slots - len(self.running)
            if len(self.waiting) + len(jobs) > self.queue + max(0, free):
                self.counts.rejected += len(jobs)
                raise QueueFullError(f"{len(self.waiting)} rows are waiting, and the queue holds {self.queue}.")
            now = self.clock()
            for job in jobs:
                job.deadline = None if job.timeout_s is None else now + job.timeout_s
            self.waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job that nobody waits for; it gets no more updates. Nothing happens if it has ended."""
        with self._changed:
            if not job.is_over:
                job.is_over = True
                self._cancelled.append(job)
                self._changed.notify()

    def close(self, *, timeout_s: float | None = None) -> None:
        """Take no more jobs, finish those that were submitted, and end the thread; after `timeout_s` they are cut off."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                left = [*self.waiting, *self.running.values()]
            for job in left:
                self._tell(job, ClosedError("The server was shut down."))
                self.cancel(job)
            self._thread.join()

    def _run(self) -> None:
        has_adapter = hasattr(self.policy.model, "peft_config")
        mode = self.policy.for_rollouts() if has_adapter else contextlib.nullcontext()
        try:
            with limit_threads(self.policy), mode:
                self._loop()
        except BaseException as error:  # the thread ends: nobody may wait for it
            with self._changed:
                self.failure = error
                left = [*self.waiting, *self.running.values()]
                self.waiting.clear()
                self.running.clear()
            for job in left:
                self._tell(job, ClosedError("The engine has failed."))
            raise

    def _loop(self) -> None:
        before: Snapshot | None = None
        while True:
            with self._changed:
                while not (self.waiting or self.running or self._cancelled or before or self._is_closing):
                    self._changed.wait()
                if self._is_closing and not (self.waiting or self.running or before):
                    return
                cancelled, self._cancelled = self._cancelled, []
            self._drop(cancelled)
            self._admit()
            found = None
            if self.running:
                self.decoder.advance()
                found = self.decoder.snapshot()
            # On a GPU the last steps are read while the next ones run, if there will be any.
            due, before = ([before, found], None) if self.decoder.reads_at_once else ([before], found)
            for snapshot in due:
                if snapshot is not None:
                    self._deliver(snapshot)
            self.counts.forward_passes = self.decoder.forwards

    def _drop(self, cancelled: Sequence[Job]) -> None:
        """Free what was cancelled or has run out of time."""
        for job in cancelled:
            self._release(job)
            self.counts.ended["cancelled"] += 1
        now = self.clock()
        with self._changed:
            known = [*self.waiting, *self.running.values()]
        for job in known:
            if job.deadline is not None and now >= job.deadline:
                self._end(job, "timeout", Update(NOTHING, True, TimeoutError(f"The limit is {job.timeout_s:g} s.")))

    def _admit(self) -> None:
        """Start waiting jobs in free slots, the first come first: one pass over their prompts."""
        free = self.decoder.free()
        with self._changed:
            jobs = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
            numbers = [next(self._numbers) for _ in jobs]
            self.running.update(zip(numbers, jobs, strict=True))
        if not jobs:
            return
        for slot, job in zip(free, jobs, strict=False):
            job.slot = slot
        self.decoder.start(
            free[: len(jobs)],
            numbers,
            [(*job.prompt, *job.prefix) for job in jobs],
            [row_settings(job.sampling, len(job.prompt), job.alternatives) for job in jobs],
            [random_numbers(job) for job in jobs],
        )

    def _deliver(self, snapshot: Snapshot) -> None:
        """Tell jobs what their rows did; end those whose rows have ended or can't go on."""
        snapshot.wait()
        counts, running = snapshot.new.tolist(), snapshot.running.tolist()
        chosen, numbers = snapshot.chosen.tolist(), snapshot.numbers.tolist()
        wrong = (snapshot.numbers[0].isnan() | snapshot.numbers[2].isnan()).tolist()
        for slot, number in enumerate(snapshot.rows):
            job = None if number is None else self.running.get(number)
            if job is None or job.is_over:
                continue
            new = counts[slot]
            error = self._error(slot, numbers, wrong[slot][:new])
            if error is not None:
                self.decoder.wipe(slot)
                self._end(job, "error", Update(NOTHING, True, error))
                continue
            own, values, bkspc = (numbers[part][slot][:new] for part in (1, 2, 3))
            actions = Actions(chosen[slot][:new], own, values, bkspc, _likely(snapshot, slot, new, job))
            self.counts.actions += new
            self.counts.deletions += actions.chosen.count(self.policy.space.bkspc)
            if not running[slot]:
                self._end(job, "done", Update(actions, True))
            elif new:
                job.deliver(Update(actions))

    def _error(self, slot: int, numbers: Any, wrong: Sequence[bool]) -> Exception | None:
        found: Exception | None = None
        if slot in self.decoder.failures:
            cause = self.decoder.failures[slot]
            found = RowFailedError(f"`logits_processor` raised {type(cause).__name__}: {cause}")
            found.__cause__ = cause
        elif any(wrong):
            is_model = numbers[2][slot][wrong.index(True)] != numbers[2][slot][wrong.index(True)]  # V is NaN
            found = RowFailedError(
                "The model's logits are NaN: nothing can be chosen from them. Check its weights and dtype."
                if is_model
                else "`logits_processor` must leave an action possible: nothing can be chosen from NaN or -inf alone."
            )
        return found

    def _end(self, job: Job, why: str, update: Update) -> None:
        with self._changed:
            if job.is_over:
                return
            job.is_over = True
        self._release(job)
        self.counts.ended[why] += 1
        job.deliver(update)

    def _tell(self, job: Job, error: Exception) -> None:
        """Tell a job of an error that is not its own, from any thread."""
        with self._changed:
            if job.is_over:
                return
        job.deliver(Update(NOTHING, True, error))

    def _release(self, job: Job) -> None:
        with self._changed:
            if job.slot is None:
                with contextlib.suppress(ValueError):
                    self.waiting.remove(job)
                return
            number = next((n for n, other in self.running.items() if other is job), None)
            if number is not None:
                del self.running[number]
        if number is not None:
            self.decoder.free_slot(job.slot)


def _likely(snapshot: Snapshot, slot: int, new: int, job: Job) -> list[list[tuple[int, float]]]:
    if not job.alternatives or snapshot.alternatives is None:
        return []
    tokens, log_probs = (part[slot, :new, : job.alternatives].tolist() for part in snapshot.alternatives)
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, log_probs, strict=True)]
