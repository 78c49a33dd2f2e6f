"""What a person sees of a run: lines everywhere, and a bar under them on a terminal."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from sequencematch.training.callbacks import SHOWN, ProgressLines, RolloutWarnings
from sequencematch.training.inputs import remedy
from tests.training.tiny_run import policy

LOGGING = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()


def test_the_short_names_of_the_terminal_are_explained() -> None:
    table = LOGGING.partition("| on the terminal | name |")[2].partition("\n\n")[0]
    said: dict[str, str] = {}
    for labels, names in re.findall(r"^\| ([^-].*?) \| (`.*`) \|$", table, flags=re.MULTILINE):
        said |= dict(zip(re.findall("`(.+?)`", names), labels.split(", "), strict=True))
    assert said == {name: re.sub(r" ?\{.*?\} ?", "", form) for name, form in SHOWN.items()}


class Terminal(io.StringIO):
    """Takes what is written as a terminal does."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that can be seen: each carriage return writes over what stood there."""
        lines = []
        for line in re.sub(r"\x1b\[[\d;]*m", "", self.getvalue()).split("\n"):
            seen = ""
            for part in line.split("\r"):
                seen = part + seen[len(part) :]
            lines.append(seen.rstrip())
        return lines


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, *, bar: bool = True, rank: int = 0) -> None:
    """Steps 3 and 4 of a run of four that was resumed, with a log in between."""
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("COLUMNS", "80")
    state = TrainerState(max_steps=4, global_step=2, is_world_process_zero=rank == 0)
    lines, rest = ProgressLines(bar=bar), (None, state, TrainerControl())
    lines.on_train_begin(*rest)
    state.global_step = 3
    lines.on_step_end(*rest)
    lines.on_log(*rest, logs={"loss": 0.5, "unknown": 1.0, "bc_weight": 1.0})
    state.global_step = 4
    lines.on_step_end(*rest)
    lines.bar.close()


def test_a_log_is_a_line_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    shown(monkeypatch, terminal)
    line, bar, after = terminal.screen()
    assert line == "step 3  loss 0.5000  bc weight 1.00"
    assert re.match(r"training: 100%\|#+\| 4/4 \[", bar)
    assert after == ""
    assert "| 2/4 [" in terminal.getvalue()  # where a resumed run starts


@pytest.mark.parametrize("options", [{"bar": False}, {}])
def test_without_a_bar_or_a_terminal_there_are_lines_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Terminal() if options else io.StringIO()
    shown(monkeypatch, stderr, **options)
    assert stderr.getvalue() == "step 3  loss 0.5000  bc weight 1.00\n"


def test_only_the_first_process_shows_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    shown(monkeypatch, terminal, rank=1)
    assert terminal.getvalue() == ""


def warned(monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, float]], rank: int = 0) -> list[str]:
    """What is said of these log lines."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    callback = RolloutWarnings("train more.")
    for logs in lines:
        callback.on_log(None, TrainerState(is_world_process_zero=rank == 0), TrainerControl(), logs=logs)
    return stderr.getvalue().splitlines()


def test_rollouts_that_go_wrong_three_lines_in_a_row_are_spoken_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, fine = ({"completions/clipped_ratio": share, "rollouts/right": 0.1} for share in (0.5, 0.49))
    said = ["warning: 50% of the rollouts are cut: the policy writes and deletes without end; train more."]
    assert warned(monkeypatch, [cut, cut, {"loss": 1.0}, cut, cut, cut]) == said
    assert warned(monkeypatch, [cut, cut, fine, cut, cut]) == []
    assert warned(monkeypatch, [cut] * 3, rank=1) == []
    text = {"completions/clipped_ratio": 0.9, "completions/backspace_rate": 0.19}  # long, perhaps
    assert warned(monkeypatch, [text] * 3) == []
    assert len(warned(monkeypatch, [text | {"completions/backspace_rate": 0.2}] * 3)) == 1
    right = {"rollouts/right_deleted": 0.1, "rollouts/right": 0.1}
    assert warned(monkeypatch, [right] * 4) == ["warning: 10% of the right tokens are deleted; train more."]


def test_the_remedy_names_the_output_layer_where_it_is_frozen() -> None:
    learner = policy()
    assert remedy(learner) == "lower `noise_rate`, or clone longer (`bc_steps`)."
    learner.base.requires_grad_(False)
    assert remedy(learner).startswith(
        f"train the output layer's row of <eos>, too (peft: `trainable_token_indices={{'lm_head': [{learner.space.eos}]}}`)"
    )
