"""What a person sees while a run goes on: a bar on a terminal, a line per log elsewhere, and rollouts with their deletions."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback

from sequencematch.core.mdp import Trajectory
from sequencematch.policy.display import decoder, plain, struck
from sequencematch.policy.policy import Policy

#: What a log line shows, in this order, and how; the rest goes to `report_to` and the trainer's history.
SHOWN: Mapping[str, str] = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "bc_weight": "bc weight {:.2f}",
    "objective": "Ĵ {:.4f}",
    "completions/backspace_rate": "deletes {:.1%}",
    "completions/mean_length": "length {:.1f}",
    "grad_norm": "grad norm {:.2f}",
    "learning_rate": "lr {:.2e}",
    "train_runtime": "{:.0f} s in all",
}


class ProgressLines(TrainerCallback):
    """A rich progress bar on a terminal, and a short line for every log."""

    def __init__(self, *, bar: bool = True) -> None:
        """`bar=False` leaves the lines only."""
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (bar and sys.stderr.isatty()),
        )
        self.task = self.bar.add_task("training", total=None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start where the run starts, be it resumed."""
        if state.is_world_process_zero:
            self.bar.update(self.task, total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """One step further."""
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:  # noqa: ARG002
        """A short line."""
        shown = [form.format(logs[name]) for name, form in SHOWN.items() if logs and name in logs]
        if state.is_world_process_zero and shown:
            self.console.print(f"step {state.global_step}  {'  '.join(shown)}", soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Leave the finished bar standing."""
        self.bar.stop()

    def show(self, policy: Policy, trajectories: Sequence[Trajectory], step: int) -> None:
        """Print rollouts as they were made, what was deleted struck through."""
        self.console.print(f"rollouts at step {step}", style="bold")
        for trajectory in trajectories:
            text: str | Text = trajectory.render()
            if policy.tokenizer is not None:
                decode = decoder(policy.tokenizer)
                prompt = decode(trajectory.initial)
                can_strike = self.console.is_terminal and self.console.color_system is not None
                text = struck(prompt, trajectory, decode) if can_strike else prompt + plain(trajectory, decode)
            self.console.print(" ", text, soft_wrap=True)


class NonFiniteError(RuntimeError):
    """The loss or its gradient is no longer a number; the run has stopped, and what was saved before is intact."""

    def __init__(self, what: str, step: int, output_dir: str | None) -> None:
        """`what` it is, at which optimisation step."""
        super().__init__(
            f"{what} at step {step}. It was not used, and the checkpoints in {output_dir} are intact. Lower `learning_rate` or "
            f"`alpha`, or clip gradients with `max_grad_norm`."
        )


class StopAtNonFiniteGradients(TrainerCallback):
    """Looks at gradients before they are used."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Their norm must be a number, except in float16, where the scaler skips such steps itself."""
        if args.fp16:
            return
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(norm.isfinite()):
            raise NonFiniteError(f"The gradient's norm is {float(norm)}", state.global_step + 1, args.output_dir)
