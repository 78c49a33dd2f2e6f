"""`sequencematch export` writes a checkpoint that transformers loads, and replaces a folder only by force."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from sequencematch import Policy
from sequencematch.policy.export import NAME
from tests.cli.program import check_error, run


def test_an_export_loads_as_a_plain_checkpoint_that_knows_backspace(
    folder: Path, policy: Policy, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "plain"
    result = run("export", folder, target)
    assert result.exit_code == 0
    assert f"Wrote {target}" in result.stdout
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.bkspc_token_id == PreTrainedTokenizerFast.from_pretrained(target).convert_tokens_to_ids(NAME)
    tokens = torch.tensor([[4, 2, 21]])
    with torch.no_grad():
        ours = policy.action_logits(policy.model.base_model(tokens).last_hidden_state)
        torch.testing.assert_close(model(tokens).logits, ours)  # float32 rounding: the same sums, in another order


def test_the_printed_snippet_runs(folder: Path, tmp_path: Path) -> None:
    snippet = re.findall(r"^    (.*)$", run("export", folder, tmp_path / "plain").stdout, flags=re.MULTILINE)
    assert len(snippet) == 2
    names: dict[str, Any] = {}
    exec(snippet[0], names)
    # The tiny model has no room for the pipeline's 256 tokens.
    call = snippet[1].removesuffix(")") + ", max_new_tokens=8)"
    assert eval(call, names)[0]["generated_text"].startswith("Once upon a time")


def test_an_export_replaces_what_is_there_only_by_force(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("precious")
    check_error(run("export", folder, tmp_path), "`FOLDER` must be new or empty", str(tmp_path), "`--force`")
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    assert run("export", folder, tmp_path, "--force").exit_code == 0
    assert not (tmp_path / "old.txt").exists()
    assert (tmp_path / "config.json").exists()


def test_a_place_that_cannot_be_written_is_one_line_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = (
        f"`FOLDER` must be a folder. Got {tmp_path / 'file' / 'plain'}, inside {tmp_path / 'file'}, which is a file."
    )
    check_error(run("export", "no/such/model", tmp_path / "file" / "plain"), inside)
    check_error(
        run("export", "no/such/model", "/proc/plain"),
        "`FOLDER` must be a folder that can be written to. Got /proc/plain: /proc: No such file",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_export_goes_into_an_empty_folder_and_not_onto_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("export", folder, tmp_path / "empty").exit_code == 0
    (tmp_path / "file").write_text("")
    check_error(run("export", folder, tmp_path / "file", "--force"), "`FOLDER` must be a folder", "is a file")
