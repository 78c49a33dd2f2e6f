"""The share of the data that is held out for the test."""

import random
from collections.abc import Sequence
from typing import Any

TEST_SHARE = 0.1  # of the rows read, if no separate test files are given


def shuffle(items: Sequence[Any], seed: int) -> list[Any]:
    """The items in an order that depends on the seed alone."""
    return random.Random(seed).sample(items, len(items))


def hold_out(items: Sequence[Any], share: float | None, seed: int, remedy: str) -> list[Any]:
    """A random share of the items, at least one and not all. `remedy` tells the caller what to do with fewer than two."""
    if len(items) < 2:
        raise ValueError(f"`test_share` needs at least two items to split. Got {len(items)}. {remedy}")
    count = round((TEST_SHARE if share is None else share) * len(items))
    return shuffle(items, seed)[: min(max(count, 1), len(items) - 1)]


def check_share(share: float | None, is_given: bool, instead: str) -> None:
    """Refuse a share outside (0, 1), and one that would be ignored because the option `instead` is given."""
    if share is not None and not 0 < share < 1:
        raise ValueError(f"`test_share` must lie strictly between 0 and 1. Got test_share={share}.")
    if share is not None and is_given:
        raise ValueError(f"`test_share` must be left out where `{instead}` is given. Got test_share={share}.")
