"""A run that is stopped early: the step is finished, a checkpoint saved, and `StoppedEarlyError` raised in every process."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback

from sequencematch.training import checkpoints


class Reason(IntEnum):
    """Why a run stops early. The value decides where processes differ."""

    NONE = 0
    TIME_IS_UP = 1
    SIGTERM = 2


#: Reason → the exit code of the command line: that of `timeout`, and that of a process ended by SIGTERM.
EXIT_CODES = {Reason.TIME_IS_UP: 124, Reason.SIGTERM: 143}
_WORDS = {Reason.TIME_IS_UP: "`stop_after_minutes` were over", Reason.SIGTERM: "SIGTERM came"}


class StoppedEarlyError(RuntimeError):
    """The run was stopped before its end; its last checkpoint is that of the step after which it stopped."""

    def __init__(self, reason: Reason, step: int, output_dir: str | Path) -> None:
        """`step` is the last one that was made."""
        self.reason = reason
        last = checkpoints.checkpoints(Path(output_dir))[0]
        super().__init__(f"Stopped after step {step}, because {_WORDS[reason]}. The last checkpoint is {last}.")


class StopEarly(TrainerCallback):
    """Stops a run after a step with a checkpoint, when it is asked to or its time is up."""

    def __init__(self, minutes: float | None, highest: Callable[[int], int]) -> None:
        """`minutes` after training began the time is up; `highest` gives the highest of a number over all processes."""
        self.minutes, self.highest = minutes, highest
        self.asked = self.reason = Reason.NONE
        self.began = monotonic()

    def ask(self) -> None:
        """Stop after this step. One process is enough to be asked."""
        self.asked = Reason.SIGTERM

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start the clock."""
        self.reason, self.began = Reason.NONE, monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Agree with the other processes. A run whose last step is done ends as usual."""
        is_over = self.minutes is not None and monotonic() - self.began >= 60 * self.minutes
        wanted = max(self.asked, Reason.TIME_IS_UP if is_over else Reason.NONE)
        self.reason = Reason(self.highest(wanted)) if state.global_step < state.max_steps else Reason.NONE
        if self.reason:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The checkpoint is written. Returning would let a caller take the run for finished."""
        if self.reason:
            raise StoppedEarlyError(self.reason, state.global_step, args.output_dir)


@contextmanager
def stopped_by_sigterm(stop: StopEarly) -> Iterator[None]:
    """Ask at SIGTERM, in this process and in the worker processes that it starts, which then live on until the step is done."""
    before = signal.signal(signal.SIGTERM, lambda *_: stop.ask())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
