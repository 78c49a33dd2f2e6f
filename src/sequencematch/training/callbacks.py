"""Progress of a run: a bar on a terminal, a line per log, and rollouts with their deletions. Also stops at NaN gradients."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import TrainerCallback

from sequencematch.core.mdp import Trajectory
from sequencematch.policy.display import can_strike, decoder, plain, struck
from sequencematch.policy.policy import Policy
from sequencematch.training import checkpoints

#: The numbers of a log line, in this order, with their formats; `report_to` and the trainer's history get all numbers.
SHOWN: Mapping[str, str] = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "bc_weight": "bc weight {:.2f}",
    "objective": "Ĵ {:.4f}",
    "completions/backspace_rate": "deletes {:.1%}",
    "rollouts/right_deleted": "of right tokens {:.1%}",
    "completions/clipped_ratio": "cut {:.0%}",
    "completions/mean_length": "length {:.1f}",
    "grad_norm": "grad norm {:.2f}",
    "learning_rate": "lr {:.2e}",
    "train_runtime": "{:.0f} s in all",
}


class ProgressLines(TrainerCallback):
    """A progress bar on a terminal, and a short line for every log."""

    def __init__(self, *, bar: bool = True, chosen: Mapping[str, int | str] | None = None) -> None:
        """`bar=False` leaves the lines only. `chosen` are settings that the run chose itself; the first line shows them."""
        self.console = Console(stderr=True, highlight=False)
        self.shows_bar, self.chosen = bar, dict(chosen or {})
        self.bar = tqdm(disable=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Start the bar at the first step of this run, or of the rest of a resumed one; the trainer closes it."""
        is_hidden = (
            None if self.shows_bar and state.is_world_process_zero else True
        )  # None: unless stderr is a terminal
        if state.is_world_process_zero and self.chosen:
            values = ", ".join(f"{name} {value}" for name, value in self.chosen.items())
            self.console.print(f"chosen for this run: {values}", soft_wrap=True)
        self.bar = tqdm(
            desc="training", total=state.max_steps, initial=state.global_step, unit="step", disable=is_hidden
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Move the bar."""
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Print a short line."""
        shown = [form.format(logs[name]) for name, form in SHOWN.items() if logs and name in logs]
        if state.is_world_process_zero and shown:
            with tqdm.external_write_mode():
                self.console.print(f"step {state.global_step}  {'  '.join(shown)}", soft_wrap=True)

    def show(self, policy: Policy, trajectories: Sequence[Trajectory], step: int) -> None:
        """Print rollouts as they were made, with deleted text struck through."""
        with tqdm.external_write_mode():
            self.console.print(f"rollouts at step {step}", style="bold")
            for trajectory in trajectories:
                text: str | Text = trajectory.render()
                if policy.tokenizer is not None:
                    decode = decoder(policy.tokenizer)
                    prompt = decode(trajectory.initial)
                    strikes = can_strike(self.console)
                    text = struck(prompt, trajectory, decode) if strikes else prompt + plain(trajectory, decode)
                self.console.print(" ", text, soft_wrap=True)


class NonFiniteError(RuntimeError):
    """The loss, its gradient or the weights are not finite. The run has stopped, and earlier checkpoints are intact."""

    def __init__(self, what: str, step: int, consequence: str, output_dir: str | Path) -> None:
        """`what` is not finite begins the message; `consequence` is a sentence about the weights or the files."""
        found = checkpoints.checkpoints(Path(output_dir))
        last = f"The last good checkpoint is {found[0]}." if found else "There is no checkpoint yet."
        super().__init__(
            f"{what} at step {step}. {consequence} {last} Lower `learning_rate` or `alpha`, or clip gradients with "
            f"`max_grad_norm`."
        )


#: Name of a share → from where on it is too high, and what it then means.
TOO_HIGH: Mapping[str, tuple[float, str]] = {
    "completions/clipped_ratio": (0.5, "rollouts are cut: the policy writes and deletes without end"),
    "rollouts/right_deleted": (0.1, "right tokens are deleted"),
}
#: The share of deletions from where on plain text that is cut is suspicious.
MUCH_DELETED = 0.2
#: Log lines in a row after which it is said.
PATIENCE = 3


class RolloutWarnings(TrainerCallback):
    """Say once, in one sentence, that rollouts have gone wrong for `PATIENCE` log lines in a row, and what to do about it."""

    def __init__(self, remedy: str) -> None:
        """`remedy` ends the sentence."""
        self.console, self.remedy = Console(stderr=True, highlight=False), remedy
        self.in_a_row = dict.fromkeys(TOO_HIGH, 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Count lines; a line without rollouts counts neither way."""
        for name, (limit, meaning) in TOO_HIGH.items():
            if not logs or name not in logs:
                continue
            if "rollouts/right" not in logs and logs["completions/backspace_rate"] < MUCH_DELETED:
                continue  # plain text may be cut because it is long
            self.in_a_row[name] = self.in_a_row[name] + 1 if logs[name] >= limit else 0
            if self.in_a_row[name] == PATIENCE and state.is_world_process_zero:
                with tqdm.external_write_mode():
                    self.console.print(f"warning: {logs[name]:.0%} of the {meaning}; {self.remedy}", soft_wrap=True)


class StopAtNonFiniteGradients(TrainerCallback):
    """Checks gradients before the weights are updated."""

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Their norm must be finite, except with a gradient scaler, which skips such steps itself."""
        if getattr(optimizer, "scaler", None) is not None:
            return
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(norm.isfinite()):
            what = f"The gradient's norm is {float(norm)}"
            raise NonFiniteError(what, state.global_step + 1, "The weights were not updated.", args.output_dir)
