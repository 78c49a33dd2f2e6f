"""The result of an evaluation: measures, all settings, and a few generations as samples."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sequencematch.data.json_text import json_text
from sequencematch.data.pieces import Piece
from sequencematch.evaluation.samples import Sample
from sequencematch.metrics import Measure, signature


@dataclass(frozen=True)
class Record:
    """Measures of one policy on one task. `weights` and `data` are digests of its weights and of the rows.

    `wrong_tokens` says where mistakes were drawn from, and `scorer` who chose the plausible ones.
    """

    model: str
    weights: str
    dtype: str
    task: str
    options: Mapping[str, Any]
    data: str
    count: int
    sampling: Mapping[str, Any]
    seed: int
    mistakes: int | None
    measures: tuple[Measure, ...]
    samples: tuple[Sample, ...]
    versions: Mapping[str, str]
    machine: str
    seconds: float
    command: str | None = None
    wrong_tokens: str | None = None
    scorer: str | None = None

    @property
    def task_signature(self) -> str:
        """The task and its options, like `arithmetic(module=mul, seed=0)`."""
        return f"{self.task}({', '.join(f'{name}={value}' for name, value in self.options.items())})"

    @property
    def signature(self) -> str:
        """The settings that all measures share; a measure's own signature has the rest."""
        facts: dict[str, Any] = {
            "model": self.model,
            "weights": self.weights,
            "dtype": self.dtype,
            "task": self.task_signature,
            "rows": self.count,
            "data": self.data,
            **self.sampling,
            "seed": self.seed,
            "mistakes": self.mistakes,
            "wrong tokens": self.wrong_tokens,
            "scorer": self.scorer,
            "texts": "after the prompt",
            **self.versions,
        }
        # A path or a regular expression may contain the separator.
        return signature("evaluation", {k: v if v is None else str(v).replace("|", "¦") for k, v in facts.items()})

    def to_json(self) -> str:
        """The record as JSON, with its signature. Numbers that are not finite are null."""
        return json_text({"signature": self.signature, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The record that `to_json` wrote."""
        values = json.loads(text)
        del values["signature"]
        values["measures"] = tuple(Measure.read(measure) for measure in values["measures"])
        values["samples"] = tuple(
            Sample(**{**sample, "written": tuple(Piece(*piece) for piece in sample["written"])})
            for sample in values["samples"]
        )
        return cls(**values)
