"""The experiment `translation`: BLEU of MLE, BC and SequenceMatch against noise, on sentence pairs from a file   (App. G.2).

The paper's pairs are those of opus_books, English and French. Noise is any token, at rates of 0.02 and 0.2.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from sequencematch.data.hashes import fingerprint
from sequencematch.data.rows import ending
from sequencematch.experiments.fine_tuning.cells import BUDGETS, Budget, FileBudget, chosen
from sequencematch.experiments.fine_tuning.questions import Questions
from sequencematch.experiments.fine_tuning.report import Column
from sequencematch.experiments.fine_tuning.study import Study, against_noise
from sequencematch.extras import require
from sequencematch.tasks import Translation

#: What a file of pairs looks like.
PAIRS = (
    'a file of sentence pairs: JSON lines such as {"en": "A dog runs.", "fr": "Un chien court."} in a file that ends in .jsonl, '
    "or English sentences, one per line, in a file that ends in .en beside the same name with .fr"
)
#: Presets by name: those of arithmetic, but for their sizes. The paper does not say on how many sentences it tests.
PAIR_BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "cpu": replace(BUDGETS["cpu"], steps=100, test_rows=100),
        "gpu": replace(BUDGETS["gpu"], seeds=2),
        "paper": replace(BUDGETS["paper"], test_rows=1000),
    }
)


def files_of(data: Path | None) -> tuple[Path, Path | None]:
    """The file of pairs, or that of the sentences and that of their translations: `source` and `target` of the task."""
    if data is None:
        raise ValueError(f"`--data` must name {PAIRS}. Got none.")
    target = data.with_suffix(".fr") if data.suffix == ".en" else None
    missing = next((file for file in (data, target) if file is not None and not file.is_file()), None)
    if missing is not None or (target is None and ending(data) != ".jsonl"):
        why = "" if missing is None else f", and there is no file {missing}"
        raise ValueError(f"`--data` must name {PAIRS}. Got {data}{why}.")
    return data, target


def pairs(module: str, preset: str, budget: Budget, data: Path | None) -> Questions:  # noqa: ARG001
    """Pairs with fewer than 64 tokens on each side   (App. G.2).

    The bundled model of preset `cpu` reads characters of printable ASCII in a context of 128. It gets pairs with fewer than 48 on
    each side, accents written as plain letters.
    """
    require("sacrebleu", "bleu", "BLEU")
    small = preset == "cpu"
    longest = 48 if small else 64
    task = Translation(
        *files_of(data),
        max_tokens=longest,
        max_new_tokens=longest,
        plain_letters=small,
        test_size=budget.test_rows,
    )
    try:
        replace(task, max_tokens=None).test()
    except ValueError as error:
        raise ValueError(f"`--data` must name {PAIRS}. Got {data}: {error}") from error
    return Questions(task, ("bleu", "backspace_rate"), max_length=128 if small else 192)


class PairStudy(Study):
    """A study on a file of sentence pairs."""

    FIGURE: ClassVar[str] = "bleu.png"

    def run(
        self,
        folder: Path,
        command: str,
        *,
        preset: str = "cpu",
        jobs: int = 1,
        model: str | None = None,
        data: Path | None = None,
    ) -> None:
        """As `Study.run`, on the pairs in the file `data`."""
        budget = chosen(self.budgets, preset, model)
        questions = self.ask(self.module, preset, budget, data)
        hashes = [str(fingerprint(file)["sha256"]) for file in files_of(data) if file is not None]
        self.fine_tune(questions, preset, FileBudget(**asdict(budget), data=" ".join(hashes)), folder, command, jobs)


STUDY = PairStudy(
    "translation",
    ("uniform",),
    (0.02, 0.2),
    paper=against_noise(mle=("31 ± 2", "31 ± 2"), bc=("32 ± 2", "34 ± 2"), sequencematch=("37 ± 4", "36 ± 4")),
    ask=pairs,
    budgets=PAIR_BUDGETS,
    score=Column("BLEU", "BLEU", 1.0),
    columns=(Column("backspace rate", "actions that delete"),),
)
