"""Experiment trackers that `report_to` may name: the package that each needs, and tables of rollouts."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from sequencematch.core.mdp import Trajectory
from sequencematch.data.markdown import escaped, table_lines
from sequencematch.policy.display import decoder, plain
from sequencematch.policy.generation import completion
from sequencematch.policy.policy import Policy

#: The name of the table.
COMPLETIONS = "completions"
#: What stands for a deletion in a table: trackers show text, of which nothing can be struck through.
DELETION = "⌫"

#: Tracker → the packages of which one is enough, the one to install first. Trackers that are not listed need none.
PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "azure_ml": ("azureml",),
        "clearml": ("clearml",),
        "codecarbon": ("codecarbon",),
        "comet_ml": ("comet_ml",),
        "dagshub": ("dagshub",),
        "dvclive": ("dvclive",),
        "flyte": ("flytekit",),
        "mlflow": ("mlflow",),
        "neptune": ("neptune",),
        "swanlab": ("swanlab",),
        "tensorboard": ("tensorboard", "tensorboardX"),
        "trackio": ("trackio",),
        "wandb": ("wandb",),
    }
)
_INSTALLED_AS = {"azureml": "azureml-sdk", "comet_ml": "comet-ml"}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is missing, before a model is loaded."""
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            install = _INSTALLED_AS.get(packages[0], packages[0])
            raise ValueError(
                f"`report_to` must name trackers that are installed. Got {name!r}, which needs the package {packages[0]}: "
                f"pip install {install}. Without `report_to` the run logs to the terminal alone."
            )


def table_of(policy: Policy, trajectories: Iterable[Trajectory], step: int) -> dict[str, list[Any]]:
    """Column → a value for each rollout: the prompt, everything that was written, and the text that was left."""
    rows = []
    for trajectory in trajectories:
        tokens, _, alive = trajectory.replay()
        if policy.tokenizer is None:
            prompt, written, text = "", trajectory.render(), ""
        else:
            decode = decoder(policy.tokenizer)
            prompt, written = decode(trajectory.initial), plain(trajectory, decode)
            text = completion(policy, trajectory)
        written = written.replace("<bkspc>", DELETION)
        rows.append((step, prompt, written, text, len(tokens) - len(alive), trajectory.truncated))
    names = ("step", "prompt", "written", "text", "deleted", "cut")
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def log_table(callbacks: Sequence[Any], table: Mapping[str, Sequence[Any]], step: int) -> None:
    """Give a table to the trackers among a trainer's callbacks: TensorBoard, W&B and trackio."""
    from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

    rows = list(zip(*table.values(), strict=True))
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            cells = [tuple(escaped(str(cell)) for cell in row) for row in rows]
            callback.tb_writer.add_text(COMPLETIONS, "\n".join(table_lines(tuple(table), cells)), step)
        elif isinstance(callback, WandbCallback) and callback._wandb is not None:
            wandb = callback._wandb
            wandb.log({COMPLETIONS: wandb.Table(columns=list(table), data=rows), "train/global_step": step})
        elif isinstance(callback, TrackioCallback):
            trackio = callback._trackio
            columns = trackio.Table(columns=list(table), data=[list(row) for row in rows])
            trackio.log({COMPLETIONS: columns, "train/global_step": step})
