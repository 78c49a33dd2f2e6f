"""What models write after the prompts: measured, and saved as text for MAUVE and for people   (§6.2, App. I)."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sequencematch import __version__
from sequencematch.core.mdp import Trajectory
from sequencematch.data.pieces import pieces, text_behind
from sequencematch.evaluation import METRICS, Evidence
from sequencematch.evaluation.cases import Case, read_cases, tokenizer_decode
from sequencematch.evaluation.generations import digest, digest_of_weights, generations
from sequencematch.evaluation.mistakes import with_mistakes
from sequencematch.experiments import networks
from sequencematch.experiments.text.cells import CONTRASTIVE, MISTAKEN, SAMPLED, Budget, Cell, sampling
from sequencematch.experiments.text.passages import text_task
from sequencematch.metrics import Measure, diversity, known_words, ngram_entropy, signature, unknown_words
from sequencematch.metrics.measure import mean_of
from sequencematch.metrics.words import words
from sequencematch.policy import Policy
from sequencematch.policy.contrastive import contrastive_searches
from sequencematch.policy.display import decoder

#: Candidates that contrastive search tries at a time.
CANDIDATES = 4


def path_of(cell: Cell, decoding: str, draw: int, folder: Path, kind: str = "generations") -> Path:
    """Where a draw is kept."""
    words = "".join(letter if letter.isalnum() else " " for letter in decoding).split()
    return folder / kind / f"{'_'.join([cell.name, *words])}_{draw}.json"


def continue_prompts(cell: Cell, budget: Budget, folder: Path, policy: Path) -> None:
    """Every draw of a model in every way to decode it, unless it is there."""
    missing = [which for which in cell.decodings(budget) if not path_of(cell, *which, folder).exists()]
    if not missing:
        return
    model = Policy.from_pretrained(policy, device="cuda" if torch.cuda.is_available() else "cpu").eval()
    task = text_task(folder, budget)
    cases = read_cases(model, task, task.test(model.tokenizer))
    known = known_words(row["text"] for row in task.train())
    for decoding, draw in missing:
        of_draw = cases[draw :: budget.draws]
        make = _mistaken if decoding == MISTAKEN else partial(_plain, known)
        run = partial(make, model, cell, of_draw, decoding, draw, budget, folder)
        networks.once(path_of(cell, decoding, draw, folder), cell, budget, run)


def _plain(
    known: Collection[str],
    policy: Policy,
    cell: Cell,
    cases: Sequence[Case],
    decoding: str,
    draw: int,
    budget: Budget,
    folder: Path,
) -> dict[str, Any]:
    written = _written(policy, cell, [case.prompt for case in cases], decoding, draw, budget)
    evidence = Evidence(
        policy, text_task(folder, budget), cases, batch_size=min(budget.rows_at_once, 32), trajectories=written
    )
    names = ["ngram_entropy", "diversity"]
    names += ["perplexity", "backspace_rate"] if decoding == SAMPLED else []
    measures = [measure for name in names for measure in METRICS[name].measure(evidence)]
    measures += [_length([len(tokens) for tokens in evidence.tokens()]), _deletes_first(written, "the prompt")]
    rows = [_row(policy, *pair) for pair in zip(cases, written, strict=True)]
    measures += _unknown_words([row["completion"] for row in rows], known)
    human = [case.reference for case in cases]
    of_human = [ngram_entropy(human), diversity(human), _length(list(map(len, human)))]
    of_human += _unknown_words([row["human"] for row in rows], known)
    return {
        **_facts(policy, cases, decoding, draw, budget),
        "measures": [asdict(measure) for measure in measures],
        "human": list(map(asdict, of_human)),
        "rows": rows,
    }


def _mistaken(
    policy: Policy, cell: Cell, cases: Sequence[Case], decoding: str, draw: int, budget: Budget, folder: Path
) -> dict[str, Any]:
    """The last token of every prompt is replaced by another one, drawn from the whole vocabulary   (App. I)."""
    del folder
    shorter = [replace(case, prompt=case.prompt[:-1], reference=case.prompt[-1:]) for case in cases]
    written = _written(policy, cell, with_mistakes(policy, shorter, draw, 1), decoding, draw, budget)
    return {
        **_facts(policy, cases, decoding, draw, budget),
        "measures": [asdict(_deletes_first(written, "a random token in place of the prompt's last"))],
        "rows": [_row(policy, *pair) for pair in zip(cases, written, strict=True)],
    }


def _written(
    policy: Policy, cell: Cell, prompts: Sequence[tuple[int, ...]], decoding: str, draw: int, budget: Budget
) -> list[Trajectory]:
    if decoding != CONTRASTIVE:
        return generations(policy, prompts, sampling(cell, decoding, draw, budget), budget.rows_at_once)
    many = budget.rows_at_once // CANDIDATES
    lots = [prompts[first : first + many] for first in range(0, len(prompts), many)]
    options = {"max_new_tokens": budget.max_new_tokens, "top_k": CANDIDATES}
    return [trajectory for lot in lots for trajectory in contrastive_searches(policy, lot, **options)]


def _length(lengths: Sequence[int]) -> Measure:
    return mean_of("length", np.array(lengths, dtype=np.float64), {"unit": "tokens", "mean": "generations"})


def _unknown_words(texts: Sequence[str], known: Collection[str]) -> list[Measure]:
    """Of texts that are long enough; none of a model that nearly always wrote nothing."""
    return [unknown_words(texts, known)] if any(len(words(text)) > 2 for text in texts) else []


def _deletes_first(written: Sequence[Trajectory], after: str) -> Measure:
    """The share of rows whose first action is `<bkspc>`."""
    deletes = np.array([trajectory.chosen[0] == trajectory.space.bkspc for trajectory in written], dtype=np.float64)
    return mean_of("deletes first", deletes, {"after": after, "mean": "generations"})


def _row(policy: Policy, case: Case, trajectory: Trajectory) -> dict[str, Any]:
    """A continuation as text, beside the human one. `given` is what the model saw; `written` has its deletions, if any."""
    decode, start = tokenizer_decode(policy), int(case.prompt[0] == policy.space.bos)
    row: dict[str, Any] = {
        "prompt": text_behind(decode, case.prompt[:start], case.prompt[start:]),
        "human": text_behind(decode, case.prompt, case.reference),
        "completion": text_behind(decode, *trajectory.final_parts),
    }
    if trajectory.initial != case.prompt:
        row["given"] = text_behind(decode, trajectory.initial[:start], trajectory.initial[start:])
    if trajectory.space.bkspc in trajectory.executed:
        row["written"] = pieces(trajectory, decoder(policy.tokenizer))
    return row


def _facts(policy: Policy, cases: Sequence[Case], decoding: str, draw: int, budget: Budget) -> dict[str, Any]:
    facts: dict[str, object] = {
        "base": budget.model,
        "weights": digest_of_weights(policy),
        "dtype": str(policy.base.dtype).removeprefix("torch."),
        "rows": len(cases),
        "data": digest([case.row for case in cases]),
        "prompt_length": budget.prompt_length,
        "max_new_tokens": budget.max_new_tokens,
        "decoding": decoding,
        "seed": None if decoding == CONTRASTIVE else draw,
        "texts": "after the prompt",
        "sequencematch": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    text = signature(
        "text", {name: value if value is None else str(value).replace("|", "¦") for name, value in facts.items()}
    )
    return {"decoding": decoding, "draw": draw, "signature": text}
