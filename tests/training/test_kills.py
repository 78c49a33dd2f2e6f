"""A sample of `python -m tests.training.kills 200`; tests/training/test_resume.py has the controls of what is compared."""

from pathlib import Path

from tests.training import kills
from tests.training.kills import MIXTURES, PARTS

SEED = 3


def test_all_parts_are_mixed() -> None:
    assert len(set(MIXTURES)) == 2 ** len(PARTS)


def test_runs_that_are_killed_at_random_file_system_calls_end_bit_for_bit_like_one_that_is_not(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    lines: list[str] = []
    assert kills.kill_runs(tmp_path, 4, SEED, [tuple(PARTS)], lines.append) >= 4
    print(*lines, sep="\n")
    assert all("killed at" in line for line in lines)
