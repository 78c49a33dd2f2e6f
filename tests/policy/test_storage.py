"""Saved policies and exports: every file is hashed, and what is damaged or malformed is named."""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sequencematch.data.hashes import SUMS
from sequencematch.policy import Policy, storage
from sequencematch.policy.manifest import ADAPTER, MANIFEST, read_manifest
from sequencematch.policy.storage import BUNDLED, WEIGHTS
from tests.file_calls import deaths
from tests.policy.tiny_models import character_tokenizer, tiny


def policy() -> Policy:
    return Policy.from_pretrained(tiny("Llama"), tokenizer=character_tokenizer())


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved policy and an export."""
    folder = tmp_path_factory.mktemp("written")
    policy().save_pretrained(folder / "saved")
    policy().export(folder / "export")
    return folder


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    return copied(written / "saved", tmp_path / "saved")


def copied(source: Path, target: Path) -> Path:
    """Plain files; nothing is shared."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return target


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_saved_policy_lists_every_file_with_its_hash(saved: Path) -> None:
    files = json.loads((saved / MANIFEST).read_text())["files"]
    assert files.keys() == {path.name for path in saved.iterdir()} - {MANIFEST, "README.md"}
    for name, entry in files.items():
        content = (saved / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_flipped_bit_in_any_file_of_a_saved_policy_is_refused_by_the_files_name(saved: Path) -> None:
    for name in json.loads((saved / MANIFEST).read_text())["files"]:
        flip(saved / name)
        text = (
            rf"is damaged: {re.escape(name)} does not have the content that was written\. Save or copy the policy again"
        )
        with pytest.raises(ValueError, match=text):
            Policy.from_pretrained(saved)
        flip(saved / name)
    Policy.from_pretrained(saved)  # the control


def test_a_policy_saved_without_hashes_by_an_older_version_loads(saved: Path) -> None:
    values = json.loads((saved / MANIFEST).read_text())
    sizes = {name: entry["bytes"] for name, entry in values["files"].items()}
    del values["ends"]
    (saved / MANIFEST).write_text(json.dumps({**values, "format": 1, "files": sizes}))
    loaded = Policy.from_pretrained(saved)
    assert torch.equal(loaded.backspace.row, policy().backspace.row)
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{WEIGHTS} should have \d+ bytes and has \d+\. Save or copy"):
        Policy.from_pretrained(saved)


@pytest.mark.parametrize("name", [name for name, folder in BUNDLED.items() if (folder / MANIFEST).is_file()])
def test_bundled_models_have_a_manifest_that_this_version_reads(name: str) -> None:
    manifest = read_manifest(BUNDLED[name])
    assert manifest is not None
    manifest.check(BUNDLED[name])


def test_an_export_lists_its_files_as_sha256sum_does_and_is_checked_when_it_is_loaded(
    written: Path, tmp_path: Path
) -> None:
    export = copied(written / "export", tmp_path / "export")
    names = {path.relative_to(export).as_posix() for path in export.rglob("*") if path.is_file()}
    listed = dict(line.split("  ")[::-1] for line in (export / SUMS).read_text().splitlines())
    assert listed.keys() == names - {SUMS, "README.md"}
    assert "custom_generate/generate.py" in listed
    subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=export, check=True)
    Policy.from_pretrained(export)
    for name in ("model.safetensors", "custom_generate/generate.py"):
        flip(export / name)
        text = rf"is damaged: {name} does not have the content that was written\. Copy it again; .* remove {SUMS}\."
        with pytest.raises(ValueError, match=text):
            Policy.from_pretrained(export)
        flip(export / name)
    flip(export / "config.json")
    flip(export / "config.json")
    (export / "generation_config.json").write_text((export / "generation_config.json").read_text() + "\n")
    (export / SUMS).unlink()
    Policy.from_pretrained(export)  # changed on purpose, and an export of an older version


def change(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, **fields}


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {name: value for name, value in values.items() if name != field}


COUNT = "must be a positive whole number. Got "
LISTING = "`files` must be a mapping from file names to sizes and SHA-256. Got "
#: What a manifest is turned into → what is said of it.
MALFORMED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda _: [], "it must hold a JSON object. Got a list."),
    (lambda _: None, "it must hold a JSON object. Got a NoneType."),
    (lambda _: "text", "it must hold a JSON object. Got a str."),
    (lambda _: {}, f"`format` {COUNT}nothing."),
    (without("format"), f"`format` {COUNT}nothing."),
    (change(format="2"), f"`format` {COUNT}'2'."),
    (change(format=True), f"`format` {COUNT}True."),
    (change(format=0), f"`format` {COUNT}0."),
    (without("hidden_size"), f"`hidden_size` {COUNT}nothing."),
    (change(hidden_size=None), f"`hidden_size` {COUNT}None."),
    (change(hidden_size=64.0), f"`hidden_size` {COUNT}64.0."),
    (change(hidden_size=-1), f"`hidden_size` {COUNT}-1."),
    (change(hidden_size=10**15), f"the `<bkspc>` row in {WEIGHTS} must have the shape (1000000000000000,)"),
    (without("max_positions"), f"`max_positions` {COUNT}nothing."),
    (change(max_positions="many"), f"`max_positions` {COUNT}'many'."),
    (change(max_positions=0), f"`max_positions` {COUNT}0."),
    (change(ends=3), "`ends` must be a list of token ids. Got 3."),
    (change(ends=["</s>"]), "`ends` must be a list of token ids. Got ['</s>']."),
    (change(ends=[-1]), "`ends` must be a list of token ids. Got [-1]."),
    (without("files"), f"{LISTING}nothing."),
    (change(files=None), f"{LISTING}None."),
    (change(files=["config.json"]), f"{LISTING}['config.json']."),
    (change(files={"config.json": "714"}), f"{LISTING}{{'config.json': '714'}}."),
    (change(files={"config.json": {"sha256": "0"}}), f"{LISTING}{{'config.json': {{'sha256': '0'}}}}."),
    (change(files={"config.json": {"bytes": 1, "sha256": 2}}), LISTING),
    (change(files={"nowhere.bin": 3}), "nowhere.bin is missing."),
]


@pytest.mark.parametrize(("turn", "text"), MALFORMED, ids=[str(number) for number in range(len(MALFORMED))])
def test_a_malformed_manifest_is_named_with_its_field(
    turn: Callable[[dict[str, Any]], Any], text: str, saved: Path
) -> None:
    path = saved / MANIFEST
    path.write_text(json.dumps(turn(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=rf"{re.escape(str(saved))}.* is damaged: {re.escape(text)}"):
        Policy.from_pretrained(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": 1'])
def test_a_manifest_that_is_not_json_is_named(content: bytes, saved: Path) -> None:
    (saved / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{MANIFEST} is damaged: it is not JSON\. Save or copy the policy again\."):
        Policy.from_pretrained(saved)


def relisted(saved: Path) -> None:
    """The manifest again, without hashes, after a file was changed on purpose."""
    values = json.loads((saved / MANIFEST).read_text())
    files = {name: (saved / name).stat().st_size for name in values["files"] if (saved / name).exists()}
    (saved / MANIFEST).write_text(json.dumps({**values, "format": 1, "files": files}))


def test_a_row_that_can_not_be_read_or_has_another_shape_is_named(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    (saved / WEIGHTS).write_bytes(b"not tensors")
    relisted(saved)
    with pytest.raises(ValueError, match=rf"is damaged: {WEIGHTS} can't be read: "):
        Policy.from_pretrained(saved)
    save_file({**tensors, "row": tensors["row"][:3].clone()}, saved / WEIGHTS)
    relisted(saved)
    with pytest.raises(ValueError, match=r"must have the shape \(\d+,\) that sequencematch\.json gives\. Got \(3,\)"):
        Policy.from_pretrained(saved)
    save_file({"row": tensors["row"]}, saved / WEIGHTS)
    relisted(saved)
    with pytest.raises(ValueError, match=rf"{WEIGHTS} holds no offset head of this shape\."):
        Policy.from_pretrained(saved)
    (saved / WEIGHTS).unlink()
    relisted(saved)
    with pytest.raises(ValueError, match=rf"is damaged: {WEIGHTS} can't be read: "):
        Policy.from_pretrained(saved)


_kinds: dict[tuple[object, ...], Any] = {}


def kinds(saved: Path) -> Any:
    """The row that a folder's policy has, None if it has no policy, or the error by which it is refused.

    Most deaths leave the same files as the one before: what was found in equal folders is remembered.
    """
    if not saved.exists():
        return None
    files = sorted(path for path in saved.rglob("*") if path.is_file())
    key = (saved, *((path.name, path.read_bytes()) for path in files))
    if key not in _kinds:
        _kinds[key] = loaded_kind(saved)
    return _kinds[key]


def loaded_kind(saved: Path) -> Any:
    try:
        model, _, backspace = storage.load(saved, str(saved), {}, character_tokenizer(), None)
    except (ValueError, OSError) as error:
        return str(error)
    row = None if backspace is None else float(backspace.row[0])
    weight = float(model.lm_head.weight[5, 5])
    return round(weight) if row == weight else f"row {row}, weight {weight}"


def numbered(number: int) -> Policy:
    """A policy whose row and weights hold a number, so that a mixture of two shows."""
    made = policy()
    with torch.no_grad():
        made.backspace.row.fill_(float(number))
        made.model.lm_head.weight[5, 5] = float(number)
    return made


class Disk:
    """Policies 1 and 2, whose files are written by copying: a save of a real one makes too many calls to die at each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in (1, 2):
            numbered(number).save_pretrained(folder / str(number))

    def write(self, number: int, place: Path) -> None:
        for path in (self.folder / str(number)).iterdir():
            (place / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("over_older", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_a_save_that_is_killed_anywhere_leaves_the_older_policy_or_the_new_one_and_never_a_fresh_row(
    over_older: bool, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, target, seen = Disk(tmp_path / "disk"), tmp_path / "run" / "saved", []
    backspace = policy().backspace
    monkeypatch.setattr(storage, "_write", lambda place, model, *_: disk.write(model, place))
    monkeypatch.setattr(storage, "_refuse_non_finite", lambda *_: None)

    def save(number: int) -> None:
        if beside:
            storage.save_beside(number, None, backspace, target)
        else:
            storage.save(number, None, backspace, target, "card")

    def prepare() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        if over_older:
            save(1)

    for changes in deaths(tmp_path / "run", lambda: save(2), prepare):
        seen.append(kinds(target))
        if not over_older and seen[-1] not in (None, 2):
            assert not any(target.glob("*.safetensors")), "an empty folder is no policy"
            seen[-1] = None
        assert seen[-1] in ((1, 2) if over_older else (None, 2)), f"after {changes} changes"
    assert seen[0] == (1 if over_older else None)
    assert seen[-1] == 2


def test_a_saved_policy_whose_row_was_not_copied_is_refused(saved: Path, tmp_path: Path) -> None:
    for name in (MANIFEST, WEIGHTS):
        (saved / name).unlink()
    text = (
        r"is a saved policy without its `<bkspc>` row: sequencematch\.json and sequencematch\.safetensors are missing"
    )
    with pytest.raises(ValueError, match=text):
        Policy.from_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    del config["bkspc_row_file"]
    (saved / "config.json").write_text(json.dumps(config))
    plain = Policy.from_pretrained(saved)  # as the error says
    plain.export(tmp_path / "export")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A saved policy whose adapter and row were trained."""
    tiny("Llama").save_pretrained(tmp_path / "base")
    made = Policy.from_pretrained(tmp_path / "base", tokenizer=character_tokenizer(), peft_config=lora())
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.25)
    made.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("missing", [(MANIFEST,), (WEIGHTS,), (MANIFEST, WEIGHTS)])
def test_a_saved_adapter_without_its_row_is_refused(missing: tuple[str, ...], adapter: Path) -> None:
    for name in missing:
        (adapter / name).unlink()
    text: dict[tuple[str, ...], str] = {
        (MANIFEST,): rf"is incomplete: {MANIFEST} is missing\. Save the policy again",
        (WEIGHTS,): rf"is damaged: {WEIGHTS} is missing\. Save or copy the policy again",
    }
    both = (
        rf"is a saved policy without its `<bkspc>` row: {MANIFEST} and {WEIGHTS} are missing\. Copy them, too, or load the "
        r"adapter with PEFT and give that model to `Policy.from_pretrained`, for an untrained row\."
    )
    with pytest.raises(ValueError, match=text.get(missing, both)):
        Policy.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base")
    plain = Policy.from_pretrained(PeftModel.from_pretrained(base, adapter))  # as the error says
    assert not (plain.backspace.row == 0.25).all()


def test_an_adapter_that_peft_wrote_has_an_untrained_row(adapter: Path, tmp_path: Path) -> None:
    """Its weights are those of the saved policy, which only the row and the mark tell apart."""
    saved = Policy.from_pretrained(adapter)
    assert (saved.backspace.row == 0.25).all()
    saved.model.save_pretrained(tmp_path / "by_peft")
    plain = Policy.from_pretrained(tmp_path / "by_peft")
    assert not (plain.backspace.row == 0.25).all()
    ours, theirs = (load_file(folder / ADAPTER) for folder in (adapter, tmp_path / "by_peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    with safe_open(adapter / ADAPTER, "pt") as file:
        assert file.metadata() == {"format": "pt", "bkspc_row_file": WEIGHTS}


def test_an_adapter_with_a_name_is_refused_without_its_row(tmp_path: Path) -> None:
    """PEFT puts it into a subfolder, without our files."""
    tiny("Llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    Policy(get_peft_model(base, lora(), adapter_name="mine")).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"mine is a saved policy without its `<bkspc>` row"):
        Policy.from_pretrained(tmp_path / "saved" / "mine")


def test_a_damaged_adapter_of_others_is_left_to_peft(adapter: Path) -> None:
    for name in (MANIFEST, WEIGHTS):
        (adapter / name).unlink()
    (adapter / ADAPTER).write_bytes(b"not tensors")
    with pytest.raises(SafetensorError):
        Policy.from_pretrained(adapter)


def test_an_export_of_a_saved_policy_needs_no_row_beside_it(saved: Path, tmp_path: Path) -> None:
    Policy.from_pretrained(saved).export(tmp_path / "export")
    assert "bkspc_row_file" not in json.loads((tmp_path / "export" / "config.json").read_text())
    Policy.from_pretrained(tmp_path / "export")
