"""A task by its name, its options from flags; what is wrong is said in one sentence."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sequencematch.evaluation import documentation, find_task
from sequencematch.tasks import TASKS, Arithmetic, Task, Text, Translation

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_task.py"
OWN = """
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sequencematch.tasks import Task

@dataclass(frozen=True)
class Own(Task):
    file: Path
    sizes: list[int] = ()
    files: Sequence[Path] = ()
    shouts: bool = False
    whispers: bool = True
    max_new_tokens: int = 4
    name = "own"
    metrics = ("accuracy",)
    def train(self, tokenizer=None): return []
    def test(self, tokenizer=None): return []

class NoDataclass(Task):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "random.py"  # not the one of that name that is there already
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("arithmetic", "", Arithmetic()),
        ("arithmetic", "--module mul --test-size 50", Arithmetic(module="mul", test_size=50)),
        ("arithmetic", "--module=mul --test-size=1e2", Arithmetic(module="mul", test_size=100)),
        ("arithmetic", "--entropy [3,6]", Arithmetic(entropy=(3.0, 6.0))),
        ("arithmetic", "--entropy 3 --entropy 6", Arithmetic(entropy=(3.0, 6.0))),
        ("arithmetic", "--test-entropy [8,8] --bases [2,7]", Arithmetic(test_entropy=(8.0, 8.0), bases=(2, 7))),
        ("arithmetic", "--test-entropy null --train-size None", Arithmetic()),
        ("text", "--files a.txt", Text("a.txt")),
        ("text", "--files a,b.txt --files=[c].txt --seed 3", Text(("a,b.txt", "[c].txt"), seed=3)),
        ("text", "--files a.txt --separator #.*", Text("a.txt", separator="#.*")),
        ("text", "--files 7 --separator None", Text("7")),
        ("text", "--dataset a/b:c --test-share .5", Text(dataset="a/b:c", test_share=0.5)),
        ("translation", "--source a.en --target a.fr --max-tokens None", Translation("a.en", "a.fr", max_tokens=None)),
        ("translation", "--source a.jsonl --plain-letters true", Translation("a.jsonl", plain_letters=True)),
        ("sequencematch.tasks:Text", "--files a.txt", Text("a.txt")),
    ],
)
def test_flags_are_the_options_of_a_task(name: str, flags: str, expected: Task) -> None:
    found = find_task(name, flags.split())
    assert found == expected
    hash(found)  # splits are kept by their task


def test_text_with_spaces_and_signs_is_taken_as_it_stands() -> None:
    assert find_task("text", ["--files", "a.txt", "--separator", "= [^=]+ ="]) == Text("a.txt", separator="= [^=]+ =")
    assert find_task("text", ["--files", "a.txt", "--separator", "- .*: #"]) == Text("a.txt", separator="- .*: #")


def test_a_task_of_ones_own_is_found_in_its_file() -> None:
    found = find_task(f"{EXAMPLE}:Reverse", ["--letters", "3", "--test-size", "2"])
    assert (found.name, found.max_new_tokens) == ("reverse", 16)
    assert [set(row) for row in found.test()] == [{"prompt", "completion", "noise_tokens"}] * 2
    assert len(found.test()[0]["completion"]) == 4


def test_options_have_the_types_a_task_says_whatever_they_are(own: Path) -> None:
    flags = ["--file", "a.txt", "--sizes", "[1,2]", "--files", "b", "--files", "c", "--shouts", "--no-whispers"]
    found: Any = find_task(f"{own}:Own", flags)
    assert (found.file, found.sizes, found.files) == (Path("a.txt"), [1, 2], (Path("b"), Path("c")))
    assert (found.shouts, found.whispers) == (True, False)
    assert sys.modules["random"].__file__ != str(own)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "aritmetic",
            "",
            "`task` must be one of arithmetic, text, translation, path_star, sudoku, rows, a file of rows, or one of your own as "
            "file.py:Class or package.module:Class. Got 'aritmetic'; did you mean 'arithmetic'?",
        ),
        ("zebra", "", "package.module:Class. Got 'zebra'."),
        (
            "arithmetic",
            "--modul mul",
            "`--modul` is not an option of the task arithmetic; did you mean 'module'? It has module, train_size",
        ),
        ("arithmetic", "--zebra", "`--zebra` is not an option of the task arithmetic. It has module"),
        ("arithmetic", "--module", "`--module` must have a value. Got none."),
        ("arithmetic", "--module multiply", "`module` must be one of add_or_sub_in_base, mul"),
        ("arithmetic", "--test-size few", "`--test-size` must be a whole number. Got 'few'."),
        ("arithmetic", "--test-size [1,2]", "`--test-size` must be a whole number. Got [1, 2]."),
        ("arithmetic", "--test-size 1 --test-size 2", "`--test-size` must be given once. Got 2 values."),
        ("arithmetic", "--module mul --module mul", "`--module` must be given once. Got 2 values."),
        ("arithmetic", "--entropy 3", "`--entropy` must be a list such as [3, 10]. Got 3."),
        ("arithmetic", "--entropy [3]", "`--entropy` must be a list of 2. Got [3]."),
        ("arithmetic", "--entropy [3,b]", "`--entropy` must be a number. Got 'b'."),
        ("arithmetic", "--entropy [3,", "`--entropy` must have a value that is YAML. Got '[3,'."),
        ("arithmetic", "mul", "'mul' must be a flag, or follow one as in"),
        (
            "text",
            "--files a.txt b.txt",
            "It does neither. Several values of an option are given by repeating its flag",
        ),
        ("text", "--files=a.txt b.txt", "'b.txt' must be a flag, or follow one as in"),
        ("text", "", "`files` or `dataset` must be given, and not both. Got neither."),
        ("nowhere.py:Own", "", "`task` must be in an existing file. Got nowhere.py."),
        (
            "nowhere.at.all:Own",
            "",
            "`task` must be in a file or a module. Got nowhere.at.all: No module named 'nowhere'.",
        ),
        (f"{EXAMPLE}:Revers", "", f"'Revers' here. {EXAMPLE} has none; did you mean 'Reverse'?"),
        (f"{EXAMPLE}:Row", "", "`task` must name a dataclass that is a `Task`, 'Row' here."),
    ],
)
def test_what_is_wrong_is_said(name: str, flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_task(name, flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("Own", "`--file` must be given: the task {own}:Own has no default for it."),
        ("Own --file a --sizes 3", "`--sizes` must be a list. Got 3."),
        ("NoDataclass", "must name a dataclass that is a `Task`, 'NoDataclass' here. {own} has something else."),
    ],
)
def test_what_is_wrong_with_a_task_of_ones_own_is_said(own: Path, flags: str, message: str) -> None:
    name, *words = flags.split()
    with pytest.raises(ValueError, match=re.escape(message.format(own=own))):
        find_task(f"{own}:{name}", words)


def test_an_import_that_fails_inside_a_module_is_not_taken_for_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        find_task("needs_another:Own")


def test_every_option_of_every_task_is_explained() -> None:
    pages = documentation(of_metrics=False)
    assert len(pages) == len(TASKS)
    for entries in pages.values():
        assert all(flag.startswith("--") and len(text) > 10 for flag, text in entries)
    assert ("--test-size", "Questions held out. [default: 200]") in pages[
        "Task arithmetic, measured by accuracy, recovery, own_errors, backspace_rate"
    ]
    assert "accuracy" in dict(documentation()["Metrics"])
