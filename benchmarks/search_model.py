"""Train the bundled search model, `sequencematch/path-star`, from scratch; docs/bundled_models.md describes it.

python -m benchmarks.search_model out/path-star --seed 0
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

from sequencematch.experiments.path_star.cells import GPU, Cell
from sequencematch.experiments.path_star.training import run_cell

METHOD = "bc, bursts, corrected"
BUDGET = replace(GPU, width=128, steps=3000, learning_rate=2e-3)


def main() -> None:
    """Train, print how many graphs are solved by each way to decode, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the model goes; its data and result are put into FOLDER.run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run, cell = options.folder.with_suffix(".run"), Cell(METHOD, options.seed)
    found = run_cell(cell, BUDGET, run)
    for name, measures in found["decodings"].items():
        print(f"{name:<8} {100 * measures[0]['value']:.1f} % right")
    shutil.copytree(run / "policies" / Path(cell.file).stem, options.folder, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
