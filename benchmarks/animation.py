"""Draw docs/images/search.svg: the first test graph that the bundled search model solves with a deletion.

python -m benchmarks.animation docs/images/search.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from sequencematch.experiments.animation import animated_svg
from sequencematch.policy import Policy
from sequencematch.tasks.path_star import PathStar, read_star


def note(done: Sequence[str]) -> str:
    """What the last action was, in words."""
    if not done:
        return "Find the way from the centre to the goal."
    if done[-1] == "<bkspc>":
        return "The wrong arm: delete …"
    if done[-1] == "<eos>":
        return "Arrived. Next-token prediction guesses the arm: right once in three."
    return "Try an arm …" if "<bkspc>" not in done else "… and try another."


def main() -> None:
    """Find the graph, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    policy, task = Policy.from_pretrained("sequencematch/path-star"), PathStar(test_size=50)
    decode = cast(Any, policy.tokenizer).decode
    names = {policy.space.bkspc: "<bkspc>", policy.space.eos: "<eos>"}
    for row in task.test():
        (trajectory,) = policy.generate(row["prompt"], search=True, max_new_tokens=task.length).trajectories
        actions = [names[a] if a in names else decode([a]).strip() for a in trajectory.executed]
        is_right = task.is_right(decode(trajectory.final_parts[1]), row)
        if "<bkspc>" in actions and is_right:
            path.write_text(animated_svg(read_star(row["prompt"]), actions, note))
            return
    raise SystemExit("The model solved no graph with a deletion.")


if __name__ == "__main__":
    main()
