"""Learning curves of the bundled base model, from the JSON that `benchmarks.base_model` wrote."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def main() -> None:
    """Draw the loss and the share of wrong answers of each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot_base_model", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="curve.json of each run")
    parser.add_argument("--out", type=Path, required=True, help="a .png file")
    args = parser.parse_args()
    figure, (loss, wrong) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for path in args.runs:
        run = json.loads(path.read_text())
        steps = [point["step"] for point in run["curve"]]
        loss.plot(steps, [point["loss"] for point in run["curve"]], label=f"seed {run['seed']}")
        name = f"seed {run['seed']}: {run['accuracy']:.1%} right in the end"
        wrong.plot(steps, [100 * (1 - point["accuracy"]) for point in run["curve"]], label=name)
    loss.set(title="loss of a batch, nats per answer token")
    wrong.set(title=f"% wrong of {run['test_questions']:,} held-out questions")
    for axes in (loss, wrong):
        axes.set(yscale="log", xlabel="step", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
