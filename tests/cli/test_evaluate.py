"""`sequencematch evaluate` and `sequencematch data`: results in a folder, a table in the terminal, one line on bad input."""

import dataclasses
import inspect
import itertools
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sequencematch import evaluation
from sequencematch.cli.data import data
from sequencematch.cli.evaluate import evaluate as evaluate_command
from sequencematch.evaluation import Record, evaluate, find_task, generations, report
from sequencematch.policy import Policy
from sequencematch.policy.generation import rollouts
from sequencematch.tasks import TASKS, Arithmetic, Translation
from tests.cli.program import check_error, lines_of_json, run
from tests.evaluation.known import random_policy

REVERSE = f"{Path(__file__).parents[2] / 'examples' / 'new_task.py'}:Reverse"
#: Its prompts and answers fit the tiny model's context.
SMALL = ["--test-size", "6", "--letters", "3", "--max-new-tokens", "6"]
DELETING = ["--backspace-bias", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy on disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_policy().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 30 documents, each under a heading."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"= {chr(97 + n % 26)}{n % 7} =\nit was the {'very ' * (n + 3)}end.\n" for n in range(30)))
    return path


def results(folder: Path) -> Record:
    return Record.from_json((folder / "results.json").read_text())


# Evaluate.


def test_results_are_those_of_the_library_and_the_report_is_theirs(model: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", str(model), "--task", REVERSE, *SMALL, *DELETING, "--out", str(tmp_path)]
    printed = run(*arguments)
    assert printed.exit_code == 0, printed.output
    record = results(tmp_path)
    expected = evaluate(Policy.from_pretrained(model), find_task(REVERSE, SMALL), backspace_bias=3.0)
    command = shlex.join(["sequencematch", *arguments])
    expected = dataclasses.replace(expected, model=str(model), command=command, seconds=record.seconds)
    assert record.to_json() == expected.to_json()  # as text: a NaN is no other NaN
    assert (tmp_path / "report.md").read_text() == report(record)
    assert "~~" in report(record).split("## Generations")[1]
    for measure in record.measures:
        assert any(line.split("│")[1].strip() == measure.name for line in printed.stdout.splitlines() if "│" in line)
    assert printed.stdout.endswith(f"Wrote {tmp_path / 'report.md'}, and results.json beside it.\n")
    assert printed.stderr == ""
    assert len(lines_of_json((tmp_path / "generations.jsonl").read_text())) == 7


def test_json_is_all_that_is_printed_and_is_what_is_written(model: Path, tmp_path: Path) -> None:
    printed = run("evaluate", model, "--task", REVERSE, *SMALL, "--out", tmp_path, "--json")
    assert printed.stdout == (tmp_path / "results.json").read_text()
    assert json.loads(printed.stdout)["signature"] == results(tmp_path).signature


def test_by_default_results_go_to_a_folder_of_the_task_and_its_own_metrics_are_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--bases", "[2, 6]", "--entropy", "[1, 2]", "--test-size", "3", "--max-new-tokens", "6"]
    assert run("evaluate", model, "--task", "arithmetic", *flags).exit_code == 0
    record = results(Path("out/evaluate/arithmetic", model.name))
    assert [measure.name for measure in record.measures] == [
        "accuracy",
        "deletes first",
        "recovers",
        "own errors deleted",
        "right tokens deleted",
        "backspace rate",
    ]
    assert (record.options["bases"], record.options["entropy"]) == ([2, 6], [1.0, 2.0])


def test_two_runs_that_end_in_folders_of_the_same_name_have_results_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run_name, kind in itertools.product(("first", "second"), ("final", "checkpoint-8")):
        shutil.copytree(model, tmp_path / run_name / kind)
        printed = run("evaluate", f"{run_name}/{kind}", "--task", REVERSE, *SMALL, "--metrics", "accuracy")
        assert printed.exit_code == 0, printed.output
        assert results(Path("out/evaluate/reverse", run_name, kind)).model == f"{run_name}/{kind}"


def test_text_with_its_mauve_by_an_encoder_in_a_folder(model: Path, text: Path, tmp_path: Path) -> None:
    flags: list[str | Path] = ["--files", text, "--test-files", text, "--separator", "= .* =", "--prompt-length", "8"]
    flags += ["--max-new-tokens", "8", "--metrics", "mauve, perplexity", "--limit", "20", "--encoder", model]
    printed = run("evaluate", model, "--task", "text", *flags, "--out", tmp_path / "out")
    assert printed.exit_code == 0, printed.output
    record = results(tmp_path / "out")
    assert [measure.name for measure in record.measures] == ["MAUVE", "perplexity", "perplexity, <bkspc> kept"]
    assert f"|encoder:{model}, last token" in record.measures[0].signature
    assert record.options["separator"] == "= .* ="


def test_every_flag_reaches_the_library(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, Any] = {}

    def receive(policy: Policy, task: Any, **options: Any) -> Any:
        received.update(options, dtype=str(policy.base.dtype), task=task)
        raise ValueError("enough")

    monkeypatch.setattr(evaluation, "evaluate", receive)
    settings = {"limit": 5, "temperature": 0.5, "top_p": 0.75, "mistakes": 2, "batch_size": 7, "encoder": "minilm"}
    settings |= {"scorer": "some/model"}
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--backspace-bias", "-inf", "--protect-prompt", "--sampling-seed", "3", "--dtype", "bfloat16"]
    flags += ["--search", "--min-p", "0.2", "--max-actions", "9"]
    check_error(
        run("evaluate", model, "--task", REVERSE, *SMALL, *flags, "--metrics", "rep_n", "--out", tmp_path), "enough"
    )
    assert (received["task"].name, received.pop("task").letters) == ("reverse", 3)
    assert received == {
        **settings,
        "backspace_bias": float("-inf"),
        "protect_prompt": True,
        "ban_deleted": False,
        "search": True,
        "min_p": 0.2,
        "max_actions": 9,
        "seed": 3,
        "dtype": "torch.bfloat16",
        "metrics": ("rep_n",),
        "folder": tmp_path,
    }


def test_no_option_of_a_task_is_hidden_by_a_flag_of_the_command() -> None:
    for command in (evaluate_command, data):
        flags = set(inspect.signature(command).parameters)
        for task in TASKS.values():
            assert not flags & {field.name for field in dataclasses.fields(task)}  # type: ignore[arg-type]


def test_help_lists_tasks_options_and_metrics() -> None:
    shown = " ".join(run("evaluate", "--help").stdout.split())
    assert "Task arithmetic, measured by accuracy, recovery, own_errors, backspace_rate:" in shown
    assert "--test-size Questions held out. [default: 200]" in shown
    assert "--temperature <float> 0 is greedy. Default: the task's own." in shown
    assert "mauve How near texts are to human ones (§6.2)." in shown
    rows_only = " ".join(run("data", "--help").stdout.split())
    assert "--test-size Questions held out. [default: 200]" in rows_only
    assert "mauve How near" not in rows_only


# A file of rows.


def test_a_file_of_rows_is_a_task(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows and measures as from a class, in a folder named after the file."""
    monkeypatch.chdir(tmp_path)
    rows = find_task(REVERSE, SMALL).test()
    Path("words.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run("evaluate", model, "--task", "words.test.jsonl", "--max-new-tokens", "6", *DELETING)
    assert printed.exit_code == 0, printed.output
    record = results(Path("out/evaluate/words", model.name))
    expected = evaluate(Policy.from_pretrained(model), find_task(REVERSE, SMALL), backspace_bias=3.0)
    assert repr((record.measures, record.samples)) == repr((expected.measures, expected.samples))
    assert record.options == {"file": "words.test.jsonl", "max_new_tokens": 6}


def test_a_folder_that_cannot_be_written_is_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    for command in (["evaluate", model, "--task", tmp_path / "a.csv", "--out"], ["data", REVERSE]):
        check_error(run(*command, tmp_path / "file"), f"must be a folder. Got {tmp_path / 'file'}, which is a file.")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            None,
            "`file` must be an existing file of rows: .jsonl, .json, .csv, .parquet. Got {path}, which is not",
        ),
        ("a.txt", "a", "`file` must be an existing file of rows: .jsonl, .json, .csv, .parquet. Got {path}."),
        (
            "a.jsonl",
            '{"prompt": "a"}',
            "Row 0 of {path} must have a `completion` that is text. Got none beside 'prompt'.",
        ),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": 3}',
            "Row 0 of {path} must have a `completion` that is text. Got a int.",
        ),
        ("a.json", "[3]", "Row 0 of {path} must have a `prompt` that is text. Got none beside int."),
        ("a.jsonl", "{", "`file` must be JSON lines. Got {path}: line 1"),
        ("a.csv", "question,answer\na,b\n", "must have a `prompt` that is text. Got none beside 'question', 'answer'."),
    ],
)
def test_a_file_without_prompts_and_completions_is_one_line(
    model: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    result = run("evaluate", model, "--task", tmp_path / name, "--out", tmp_path / "out")
    check_error(result, message.format(path=tmp_path / name))


# Interruption.


def test_interrupted_it_says_what_is_kept_and_the_same_command_ends_as_if_nothing_had_been(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["evaluate", str(model), "--task", REVERSE, *SMALL, *DELETING]
    assert run(*arguments, "--out", tmp_path / "whole").exit_code == 0

    def interrupted(*given: Any, **options: Any) -> Iterator[Any]:
        made = rollouts(*given, **options)
        yield next(made)
        yield next(made)
        raise KeyboardInterrupt

    monkeypatch.setattr(generations, "rollouts", interrupted)
    out = tmp_path / "part"
    stopped = run(*arguments, "--out", out)
    command = shlex.join(["sequencematch", *arguments, "--out", str(out)])
    assert (stopped.exit_code, stopped.stdout) == (130, "")
    assert stopped.stderr == f"Interrupted. Generations kept: 2 in {out / 'generations.jsonl'}. To resume: {command}\n"
    assert not (out / "results.json").exists()
    monkeypatch.undo()
    assert run(*shlex.split(command)[1:]).exit_code == 0
    whole, resumed = (
        dataclasses.replace(results(path), seconds=0.0, command=None) for path in (tmp_path / "whole", out)
    )
    assert resumed == whole


def test_an_argument_of_the_library_is_named_as_its_flag(model: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", str(model), "--task", REVERSE, *SMALL, "--metrics", "accuracy", "--out", str(tmp_path)]
    printed = run(*arguments)
    assert printed.exit_code == 0, printed.output
    path = tmp_path / "generations.jsonl"
    check_error(
        run(*arguments, "--temperature", "0.5"),
        f"Error: `--out` must be new, or hold generations of the same settings to resume. Got {path}, which differs in "
        f"sampling. Choose another folder, or delete that file.\n",
    )
    path.write_text("notes\n")
    check_error(run(*arguments), f"Error: `--out` must hold no other generations.jsonl. Got {path}, not written by")
    check_error(run(*arguments, "--sampling-seed", "1"), "Error: `--sampling-seed` would be ignored: ")


# Data.


def test_data_are_the_rows_of_a_task(model: Path, tmp_path: Path) -> None:
    flags = ["--module", "mul", "--train-size", "7", "--test-size", "3", "--seed", "2"]
    printed = run("data", "arithmetic", tmp_path / "out", *flags)
    assert (printed.exit_code, printed.stderr) == (0, "")
    task = Arithmetic(module="mul", train_size=7, test_size=3, seed=2)
    assert lines_of_json((tmp_path / "out" / "train.jsonl").read_text()) == task.train()
    assert lines_of_json((tmp_path / "out" / "test.jsonl").read_text()) == task.test()
    assert f"sequencematch train RECIPE --dataset {tmp_path / 'out' / 'train.jsonl'}\n" in printed.stdout
    (tmp_path / "a.en").write_text("a cat\na very very long sentence\na dog\nit is\n")
    (tmp_path / "a.fr").write_text("un chat\nune phrase tres longue\nun chien\nil est\n")
    pairs: list[str | Path] = ["--source", tmp_path / "a.en", "--target", tmp_path / "a.fr"]
    pairs += ["--max-tokens", "9", "--test-share", ".5"]
    assert run("data", "translation", tmp_path / "pairs", *pairs, "--model", model).exit_code == 0
    translation = Translation(tmp_path / "a.en", tmp_path / "a.fr", max_tokens=9, test_share=0.5)
    expected = translation.train(Policy.from_pretrained(model).tokenizer)
    assert lines_of_json((tmp_path / "pairs" / "train.jsonl").read_text()) == expected


def test_rows_that_are_there_are_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("precious")
    command = ["data", REVERSE, str(tmp_path), "--train-size", "5", "--test-size", "2"]
    check_error(run(*command), f"`FOLDER` must not hold other rows. Got {tmp_path / 'test.jsonl'}", "`--force`")
    assert (tmp_path / "test.jsonl").read_text() == "precious"
    assert run(*command, "--force").exit_code == 0
    assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 5


# Errors.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task aritmetic", "Got 'aritmetic'; did you mean 'arithmetic'?"),
        ("--task arithmetic --modul mul", "`--modul` is not an option of the task arithmetic; did you mean 'module'?"),
        ("--task arithmetic --metrics acuracy", "Got 'acuracy'; did you mean 'accuracy'?"),
        ("--task arithmetic --module mul --bases [2,3]", "`bases` must be left out with module='mul'"),
        (
            "--task text --files {text} --test-files {text} --metrics accuracy",
            "must leave out accuracy for the task text",
        ),
        ("--task text --files {text} --test-files {text} --limit 19", "must leave out mauve for fewer than 20 rows"),
        (
            "--task text --files {folder}/missing.txt",
            "`files` must be a file that can be read. Got {folder}/missing.txt",
        ),
        ("--task text --files {folder}/empty.txt", "`files` must not be an empty or blank file."),
        (
            "--task translation --source {folder}/two.en --target {folder}/one.fr",
            "must have the same number of lines, each the translation of the other. Got 2 in {folder}/two.en and 1 in",
        ),
        ("--task {folder}/missing.py:Own", "`task` must be in an existing file. Got {folder}/missing.py."),
        ("--task arithmetic --test-size 0", "`task` must have rows to be tested on. Got none of arithmetic."),
    ],
)
def test_bad_input_is_answered_with_one_line(
    model: Path, text: Path, tmp_path: Path, flags: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "two.en").write_text("a\nb\n")
    (tmp_path / "one.fr").write_text("un\n")
    small = ["--separator", "= .* =", "--prompt-length", "4", "--max-new-tokens", "4"] if "--task text" in flags else []
    words = shlex.split(flags.format(text=text, folder=tmp_path))
    check_error(run("evaluate", model, *words, *small), message.format(folder=tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequencematch.extras.importlib.util.find_spec", lambda name: None)  # noqa: ARG005
    result = run("evaluate", model, "--task", "arithmetic", "--test-entropy", "[4, 4]", "--out", tmp_path)
    check_error(
        result, "The arithmetic task needs the package mathematics_dataset: pip install 'sequencematch[arithmetic]'"
    )


@pytest.mark.parametrize("command", [["evaluate", "--module", "mul", "model"], ["data", "--module", "mul", "folder"]])
def test_the_options_of_a_task_come_last(command: list[str]) -> None:
    task = ["--task", "arithmetic"] if command[0] == "evaluate" else []
    check_error(run(*command, *task), "must come before the options of a task. Got '--module' first.")


def test_a_tokenizer_that_is_nowhere_is_neither_a_folder_nor_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network in tests
    result = run("data", REVERSE, tmp_path, "--model", "nobody/nothing")
    check_error(result, "Got 'nobody/nothing', which is neither a folder nor reachable as a hub id")


def test_a_task_must_be_named(model: Path) -> None:
    result = run("evaluate", model)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Missing option '--task'" in result.stderr
