"""Recovery from mistakes: the paper's table of mistake-conditioned completions, as a number (§6.1)."""

from collections.abc import Sequence

import numpy as np
import torch

from sequencematch.metrics.bootstrap import check_some
from sequencematch.metrics.measure import Measure, mean_of


def append_mistake(
    completion: Sequence[int], candidates: Sequence[int], generator: torch.Generator, mistakes: int = 1
) -> tuple[int, ...]:
    """A correct prefix of the completion, then `mistakes` wrong tokens, for a policy to continue   (§6.1, "Prompt with Mistake").

    The prefix length is uniform over 0 … len(completion) − 1. The first wrong token is uniform over the distinct candidates
    except the right next one. Later wrong tokens are uniform over all candidates: after the first, any token is wrong.
    """
    pool = sorted(set(candidates))
    if not completion:
        raise ValueError("`completion` must hold at least one token, or there is nothing to get wrong. Got none.")
    if mistakes < 1:
        raise ValueError(f"`mistakes` must be at least 1 wrong token. Got mistakes={mistakes}.")
    never_wrong = [token for token in completion if pool in ([], [token])]
    if never_wrong:
        raise ValueError(
            f"`candidates` must hold a wrong token for every place of the completion: two different tokens suffice. Got {pool}, "
            f"none of them wrong in place of {never_wrong[0]}."
        )

    def draw(tokens: Sequence[int]) -> int:
        return tokens[int(torch.randint(len(tokens), (), generator=generator))]

    kept = int(torch.randint(len(completion), (), generator=generator))
    first = draw([token for token in pool if token != completion[kept]])
    return (*completion[:kept], first, *(draw(pool) for _ in range(mistakes - 1)))


def recovery(
    deletes_first: Sequence[bool], is_right: Sequence[bool], wrong: str | None = None, kind: str = ""
) -> tuple[Measure, Measure]:
    """After a mistake: the share of first actions that are `<bkspc>`, and the share of completions right in the end   (§6.1).

    `wrong` says in the signature where the wrong tokens come from, and `kind` follows the names of the measures.
    """
    check_some("deletes_first", len(deletes_first))
    if len(deletes_first) != len(is_right):
        raise ValueError(
            f"`deletes_first` and `is_right` must have one entry per completion. Got {len(deletes_first)} and {len(is_right)}."
        )
    facts = {"after": "mistakes", "wrong tokens": wrong, "mean": "completions"}
    return (
        mean_of(f"deletes first{kind}", np.array(deletes_first, dtype=np.float64), facts),
        mean_of(f"recovers{kind}", np.array(is_right, dtype=np.float64), facts),
    )
