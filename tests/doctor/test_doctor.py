"""`sequencematch doctor` finds what is broken, says what would mend it, and looks at nothing on the network."""

import json
import shutil
import socket
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from transformers import BloomConfig, BloomForCausalLM

from sequencematch.doctor import Finding, examine
from sequencematch.doctor import models as of_models
from sequencematch.doctor import packages as of_packages
from sequencematch.policy.decoding.cuda_graphs import why_not_captured
from sequencematch.policy.storage import BUNDLED
from tests.cli.program import run
from tests.policy.tiny_models import tiny


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def test_an_installation_that_works_is_usable_and_deletes_a_wrong_digit(no_network: list[Any]) -> None:
    result = run("doctor", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "  ✓ answer: In base 7, what is 25 + 14? Solution: 5<bkspc>42<eos>" in lines
    assert f"  ✓ torch: {torch.__version__} (supported: >=2.11, <3)" in lines
    assert "  – CUDA graphs: the model is on cpu, not on a CUDA GPU" in lines
    assert [line for line in lines if not line.startswith(" ")][-1] == "Usable."
    assert not any("✗" in line for line in lines)
    assert no_network == []


def test_json_has_every_finding_with_its_state_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_models, "paths", lambda *_: [Finding("deletes exactly", "broken", "no", "wish")])
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["usable"] is False
    assert [*report["sections"]] == ["Packages", "Devices", "Extras", "Files", "Model"]
    assert report["sections"]["Model"] == [
        {"name": "deletes exactly", "state": "broken", "text": "no", "remedy": "wish"}
    ]
    named = {finding["name"] for finding in report["sections"]["Packages"]}
    required = {Requirement(line).name for line in distribution("sequencematch").requires or () if "extra" not in line}
    assert named == required | {"python", "sequencematch"}


def test_a_package_that_is_missing_too_old_or_damaged_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2 is older than 999; the import of tqdm is made to fail."""
    lines = ["numpy>=999,<1000", "never-heard-of>=3", "tqdm>=4", "rich>=1", 'also-unknown>=1; extra == "x"']
    fake = SimpleNamespace(version="9", metadata={"Requires-Python": ">=3.11"}, requires=lines)
    monkeypatch.setattr(of_packages, "distribution", lambda _: fake)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    found = by_name(of_packages.required())
    states = {name: finding.state for name, finding in found.items()}
    broken = {"numpy": "broken", "never-heard-of": "broken", "tqdm": "broken"}
    assert states == broken | {"sequencematch": "ok", "python": "ok", "rich": "ok"}
    assert found["numpy"].text.endswith("supported is >=999, <1000")
    assert found["never-heard-of"] == Finding(
        "never-heard-of", "broken", "never-heard-of is missing", "pip install 'never-heard-of>=3'"
    )
    assert "is installed, but its import fails: " in found["tqdm"].text
    report = examine()  # stops here: with a broken package nothing else can be imported
    assert [*report.sections] == ["Packages"]
    assert not report.is_usable
    assert run("doctor").exit_code == 1


def test_packages_that_do_not_fit_each_other_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sequencematch.doctor.models", None)
    monkeypatch.delattr("sequencematch.doctor.models")
    report = examine()
    (finding,) = report.sections["Model"]
    assert (finding.name, finding.state, report.is_usable) == ("import", "broken", False)


def test_an_extra_is_usable_when_all_its_packages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """`all` names the extra `good`, whose package is there, and `bad`, whose package is not."""
    lines = [
        'numpy>=1; extra == "good"',
        'never-heard-of>=3; extra == "bad"',
        'sequencematch[bad,good]; extra == "all"',
        'pytest; extra == "dev"',
        "torch",
    ]
    metadata = SimpleNamespace(get_all=lambda _: ["good", "bad", "all", "dev"])
    monkeypatch.setattr(of_packages, "distribution", lambda _: SimpleNamespace(metadata=metadata, requires=lines))
    found = by_name(of_packages.extras())
    assert {name: finding.state for name, finding in found.items()} == {"all": "off", "bad": "off", "good": "ok"}
    assert found["bad"].text == found["all"].text == "never-heard-of is missing"
    assert found["all"].remedy == "pip install 'sequencematch[all]'"


def test_a_bundled_model_with_a_changed_or_missing_file_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = {name: tmp_path / name for name in BUNDLED}
    for name, folder in BUNDLED.items():
        shutil.copytree(folder, copies[name])
    monkeypatch.setattr(of_models, "BUNDLED", copies)
    assert {finding.state for finding in of_models.files()} == {"ok"}
    weights = copies["sequencematch/arithmetic-base"] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (copies["sequencematch/path-star"] / "tokenizer.json").unlink()
    found = by_name(of_models.files())
    assert found["sequencematch/arithmetic"].state == "ok"
    assert "model.safetensors does not have the content" in found["sequencematch/arithmetic-base"].text
    assert "tokenizer.json is missing" in found["sequencematch/path-star"].text
    (copies["sequencematch/arithmetic-base"] / "SHA256SUMS").unlink()
    unlisted = by_name(of_models.files())["sequencematch/arithmetic-base"]
    assert (unlisted.state, "SHA256SUMS" in unlisted.text) == ("broken", True)


def test_a_cache_that_cannot_be_written_is_no_reason_to_give_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written below a file, whoever runs this."""
    (tmp_path / "file").write_text("")
    states = {}
    for name in ("file/hub", "folder/hub"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / name))
        states[name] = by_name(of_models.files())["cache"].state
    assert states == {"file/hub": "off", "folder/hub": "ok"}
    assert not (tmp_path / "folder").exists()


def test_a_model_that_cannot_delete_is_named_with_the_reason(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "bloom")
    (finding,) = of_models.paths(str(tmp_path / "bloom"), "cpu")
    assert (finding.name, finding.state) == ("deletes exactly", "broken")
    assert "BloomForCausalLM uses ALiBi" in finding.text


def test_a_wrong_answer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """19 + 11 = 30 = 4·7 + 2; 43 would be wrong."""
    assert of_models.paths(None, "cpu")[-1].state == "ok"
    monkeypatch.setattr(of_models, "ANSWER", "43")
    finding = of_models.paths(None, "cpu")[-1]
    assert (finding.name, finding.state) == ("answer", "broken")
    assert finding.text.endswith("Solution: 5<bkspc>42<eos>")


@pytest.mark.usefixtures("no_network")
def test_a_model_that_is_not_there_is_no_fault_of_the_computation(tmp_path: Path) -> None:
    """Neither a name on the hub nor a folder that is missing was tried, so nothing is said about deleting."""
    for name in ("nobody/nothing", str(tmp_path / "missing")):
        (finding,) = of_models.paths(name, "cpu")
        assert (finding.name, finding.state) == ("model", "broken"), finding.text
        assert finding.text.startswith(f"{name} can't be loaded: ")


def test_a_device_that_is_not_there_is_broken() -> None:
    (finding,) = of_models.paths(None, "cuda:99")
    assert (finding.name, finding.state) == ("device", "broken")
    assert finding.text.startswith("cuda:99 is no device of this machine: ")


def test_a_step_is_not_captured_on_a_cpu() -> None:
    model = tiny("Llama")
    assert why_not_captured(model, model) == "the model is on cpu, not on a CUDA GPU"
