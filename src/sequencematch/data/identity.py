"""A cheap fingerprint of a dataset, by which a resumed run notices that it was given other rows."""

import hashlib
import itertools
from collections.abc import Iterable

from sequencematch.data.examples import Example, Examples, ExampleStream

#: Rows that are read, evenly spread; of a stream the first ones.
SAMPLED, SAMPLED_OF_A_STREAM = 64, 16


def fingerprint_of_rows(examples: Examples | ExampleStream) -> str:
    """Sixteen hexadecimal digits from the number of rows and the tokens of a few of them.

    Tokens, not texts, so that another tokenizer is noticed as well. A change in a row that is not read goes unnoticed unless it
    changes the number of rows.
    """
    found = hashlib.sha256()
    if isinstance(examples, Examples):
        size, count = len(examples), min(len(examples), SAMPLED)
        found.update(f"{size} rows".encode())
        rows: Iterable[Example] = (examples[i * (size - 1) // max(count - 1, 1)] for i in range(count))
    else:
        rows = itertools.islice(examples, SAMPLED_OF_A_STREAM)
    for row in rows:
        parts = (row.prompt, row.completion, row.end, row.noise_tokens, row.noise_tokens_by_step, row.noise_ends)
        found.update(repr(parts).encode())
    return found.hexdigest()[:16]
