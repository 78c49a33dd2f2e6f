"""Every example runs, in its quick mode, and prints what it says."""

import itertools
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sequencematch import SequenceMatchConfig
from tests.test_architecture import PACKAGE

EXAMPLES = PACKAGE.parents[1] / "examples"
#: Scripts that other tests run.
ELSEWHERE = {"dates.py", "new_task.py"}


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A script in this process, in the current folder; its names."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_masking_prints_the_papers_mask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """cao, ⌫, re: r and e see c and a, but not the o."""
    run("masking.py", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    mask = {line.split()[0]: line.split()[1:] for line in lines if "×" in line}
    assert mask["r"] == ["×", "×", "×", ".", "×", ".", "."]
    assert mask["e"] == ["×", "×", "×", ".", "×", "×", "."]
    assert mask["o"] == ["×"] * 4 + ["."] * 3
    assert "  ^ca   at node 2, chosen: r" in lines


def test_a_divergence_of_ones_own_is_the_conjugate_of_its_f(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("new_divergence.py", monkeypatch=monkeypatch)
    error = float(capsys.readouterr().out.rpartition(":")[2])
    assert error < 1e-7  # the grid of ratios is relative to 1e-4
    wrong = replace(names["NEYMAN"], phi=lambda x: x / (1 + x), name="hellinger's")
    assert names["largest_error"](wrong) > 0.1
    args = SequenceMatchConfig("out", divergence="examples/new_divergence.py:NEYMAN", use_cpu=True)
    assert args.divergence_value.name == "neyman"
    assert not args.needs_rollouts  # it has no term on the policy's own actions
    assert SequenceMatchConfig(
        "out", divergence="sequencematch.core.divergences:HELLINGER", use_cpu=True
    ).divergence_value.delta


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:A", r"`divergence` must be in an existing file\. Got none\.py\."),
        ("examples/new_divergence.py:NEYMANN", r"'NEYMANN' here\. .* has none; did you mean 'NEYMAN'\?"),
        ("examples/new_divergence.py:math", r"'math' here\. .* has a module\."),
        ("chi3", r"`divergence` must be one of .* Got 'chi3'; did you mean 'chi2'\?"),
    ],
)
def test_what_is_no_divergence_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceMatchConfig("out", divergence=name, use_cpu=True)


def test_an_export_deletes_with_transformers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("transformers_only.py", str(tmp_path / "plain"), monkeypatch=monkeypatch)
    own, plain = re.findall(r"Solution: (\S*)", capsys.readouterr().out)
    assert own == "42"
    assert plain.startswith("5")


def test_the_quickstart_deletes_trains_measures_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # an extra: its import would fail
    names = run("quickstart.py", str(tmp_path), "--quick", monkeypatch=monkeypatch)
    first, *measures, last = capsys.readouterr().out.splitlines()
    assert first.endswith("Solution: 5<bkspc>42<eos>")
    assert [line.split()[0] for line in measures] == ["accuracy", "deletes", "recovers"]
    assert last.startswith("Wrote ")
    tested = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in names["sums"]()}) == 900
    assert tested == names["sums"]()[-100:]
    assert (tmp_path / "plain" / "custom_generate" / "generate.py").is_file()


def test_an_adapter_is_trained_on_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("lora_chat.py", str(tmp_path), "--quick", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out
    assert re.search(r"^\d of 8 answers right", printed, flags=re.MULTILINE)
    assert "adapter_model.safetensors" in printed
    (row,) = [row for row in names["ROWS"] if "France" in row["messages"][0]["content"]]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_a_table_learns_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixty steps instead of 300: the likelihood policy never corrects a letter, the other two most of the time."""
    run("tabular.py", "--steps", "60", "--figure", str(tmp_path / "figure.png"), monkeypatch=monkeypatch)
    rows = re.findall(r"^(\w.*?) {2,}([\d.]+)% +([\d.]+)%$", capsys.readouterr().out, flags=re.MULTILINE)
    likelihood, cloning, matching = (float(recovered) for _, _, recovered in rows)
    assert likelihood < 10
    assert min(cloning, matching) > 40
    assert (tmp_path / "figure.png").is_file()


def cells(markdown: str) -> list[tuple[str, str]]:
    """Kind and text of each cell in the notebook's source."""
    _, _, text = markdown.partition("\n---\n\n")
    parts = re.split(r"```python\n(.*?)\n```", text, flags=re.DOTALL)
    found = [("code" if number % 2 else "markdown", part.strip()) for number, part in enumerate(parts)]
    return [(kind, part) for kind, part in found if part]


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code in order, with fewer training steps."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for kind, text in cells((EXAMPLES / "notebook.md").read_text()):
        if kind == "code":
            exec(text.replace("max_steps=250", "max_steps=4"), names)
    assert names["mistaken"].texts == ["42"]
    assert names["trainer"].state.global_step == 4


def test_the_notebook_shows_what_its_source_gives_and_no_path_of_a_machine() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    written = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    joined = [
        (kind, "\n\n".join(text for _, text in group)) for kind, group in itertools.groupby(written, key=lambda c: c[0])
    ]
    assert joined == cells((EXAMPLES / "notebook.md").read_text())
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    shown = json.dumps(outputs, ensure_ascii=False)
    assert "<bkspc>42<eos>" in shown
    assert "'<bkspc> 1 5 <eos>'" in json.dumps(outputs[-1])
    assert "stderr" not in shown
    assert "site-packages" not in shown


def test_every_script_is_run_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts - ELSEWHERE == set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    listed = (EXAMPLES / "README.md").read_text()
    assert {name for name in scripts if f"`{name}`" not in listed} == set()
