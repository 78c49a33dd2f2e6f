"""Evaluate the bundled model on 1,000 questions that were used neither to train it nor to choose it."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from benchmarks.timing import provenance, write_json
from sequencematch.evaluation import evaluate
from sequencematch.policy import Policy
from sequencematch.tasks import Arithmetic, Row

#: The task of the bundled model, which was chosen among five runs by its results on the test questions.
KNOWN = Arithmetic(bases=(2, 9), entropy=(2.0, 6.0), train_size=100_000, test_size=500)
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"ban_deleted": True})


@dataclasses.dataclass(frozen=True)
class Unseen(Arithmetic):
    """Questions of another seed, without those of `KNOWN`."""

    def test(self, tokenizer: Any = None) -> list[Row]:  # noqa: ARG002
        """The first thousand new questions."""
        known = {row["prompt"] for row in (*KNOWN.train(), *KNOWN.test())}
        return [row for row in super().test() if row["prompt"] not in known][:1000]


def main() -> None:
    """Print the measures of greedy decoding, of temperature 1, and of greedy decoding with `ban_deleted`, and write them down."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bundled_model", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bundled_model.json"), help="where the numbers go")
    args = parser.parse_args()
    provenance()  # of the commit that is measured, whatever is committed meanwhile
    policy = Policy.from_pretrained("sequencematch/arithmetic")
    task = Unseen(bases=(2, 9), entropy=(2.0, 6.0), seed=1, test_size=4000)
    runs = []
    for sampling in SAMPLINGS:
        record = evaluate(policy, task, batch_size=256, **sampling)
        print(sampling or "greedy", record.count, *record.measures, sep="  ", flush=True)
        measures = [dataclasses.asdict(measure) for measure in record.measures]
        runs.append(
            {"sampling": dict(record.sampling), "weights": record.weights, "data": record.data, "measures": measures}
        )
    write_json(args.out, {"runs": runs})


if __name__ == "__main__":
    main()
