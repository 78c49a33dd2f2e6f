"""A fingerprint of rows changes with their number and their tokens, and is cheap."""

from collections.abc import Iterator
from typing import Any

from sequencematch.data.examples import Examples, ExampleStream, Reader
from sequencematch.data.identity import SAMPLED, SAMPLED_OF_A_STREAM, fingerprint_of_rows

READ = Reader(None, frozenset({0}), max_length=10)


class Counted(list[dict[str, Any]]):
    """Counts the rows that are read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


class Stream:
    """Can only be read in order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def rows(count: int) -> Counted:
    return Counted({"input_ids": [number, number + 1]} for number in range(1, count + 1))


def of(data: Any) -> str:
    return fingerprint_of_rows(Examples(data, READ))


def test_the_same_rows_have_the_same_fingerprint_and_others_another() -> None:
    assert of(rows(9)) == of(rows(9))
    changed = rows(9)
    changed[4] = {"input_ids": [5, 7]}
    found = {of(data) for data in (rows(9), rows(10), rows(8), list(reversed(rows(9))), changed, rows(1))}
    assert len(found) == 6


def test_a_few_rows_of_a_large_dataset_are_read_the_first_and_the_last_among_them() -> None:
    data = rows(20_000)
    of(data)
    assert data.reads == SAMPLED
    for place in (0, -1):
        changed = rows(20_000)
        changed[place] = {"input_ids": [7, 7]}
        assert of(changed) != of(data)


def test_the_first_rows_of_a_stream_are_read() -> None:
    def of_stream(data: list[dict[str, Any]]) -> str:
        return fingerprint_of_rows(ExampleStream(Stream(data), READ))

    assert of_stream(rows(50)) == of_stream(rows(SAMPLED_OF_A_STREAM)) != of_stream(rows(SAMPLED_OF_A_STREAM - 1))
