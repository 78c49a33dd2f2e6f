"""Loss, deletions and seconds per step of fine-tuning runs, from the JSON that `benchmarks.finetuning` wrote."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def points(run: dict[str, Any], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a logged number, where it was logged."""
    entries = [entry for entry in run["history"] if name in entry]
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]


def main() -> None:
    """Draw all runs into one picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_finetuning", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON files of benchmarks.finetuning")
    parser.add_argument("--out", type=Path, required=True, help="a .png file")
    args = parser.parse_args()
    figure, (loss, deletes, seconds) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for path, color in zip(args.runs, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False):
        run = json.loads(path.read_text())
        name = "LoRA" if run["adapter"] else "full fine-tune"
        loss.plot(*points(run, "loss"), color=color, label=name)
        deletes.plot(*points(run, "completions/backspace_rate"), color=color, marker=".", label=f"{name}, rollouts")
        deletes.plot(*points(run, "data/backspace_rate"), color=color, linestyle=":", label=f"{name}, data")
        seconds.plot(*points(run, "step_seconds"), color=color, label=name)
        seconds.plot(*points(run, "rollouts/seconds"), color=color, linestyle=":", label=f"{name}, rollouts")
    cloning = run["settings"]["bc_steps"]
    for axes, title in ((loss, "loss"), (deletes, "share of actions that delete"), (seconds, "seconds per step")):
        axes.axvspan(0, cloning, color="0.93", zorder=0)
        axes.set(title=title, xlabel="step", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    loss.set_yscale("log")
    seconds.set_ylim(0, 1)
    loss.text(cloning / 2, 0.98, "cloning", transform=loss.get_xaxis_transform(), ha="center", va="top", color="0.5")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=130)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
