"""Policies on disk: the model or adapter as Hugging Face writes it, and beside it the `<bkspc>` row and offset head."""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from sequencematch.policy.backspace import Backspace

WEIGHTS, MANIFEST = "sequencematch.safetensors", "sequencematch.json"
FORMAT = 1


def write_whole(folder: Path, write: Callable[[Path], None], marker: str | None) -> None:
    """Let `write` fill a folder beside the target, then swap them: a reader sees the old or the new, never half.

    An old folder is replaced if it holds `marker`, that is, if it was written like this; other people's files stay, unless
    there is no marker to look for.
    """
    folder = folder.absolute()
    if marker and folder.exists() and not (folder / marker).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"`folder` must be new, empty or one that may be replaced. Got {folder}, which has no {marker}."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        write(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, backspace: Backspace, folder: Path) -> None:
    """Write model or adapter, tokenizer, `<bkspc>` row and offset head; all or nothing."""
    write_whole(folder, lambda temporary: _write(temporary, model, tokenizer, backspace, None), marker=MANIFEST)


def save_beside(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    backspace: Backspace,
    folder: Path,
    gathered: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the same into a folder that may hold other things, which stay; until all is there the manifest is missing.

    `gathered` are a sharded policy's weights, put together, by their names in its `state_dict`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as scratch:
        _write(Path(scratch), model, tokenizer, backspace, gathered)
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(folder / path.name)


def gathered_weights(policy: Module) -> dict[str, Tensor] | None:
    """The whole weights of a sharded policy, which every process has to ask for; None where they are whole already."""
    weights = policy.state_dict()
    if not any(hasattr(tensor, "full_tensor") for tensor in weights.values()):
        return None
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in weights.items()
    }


def _write(
    folder: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    backspace: Backspace,
    gathered: Mapping[str, Tensor] | None,
) -> None:
    weights: Mapping[str, Tensor] = backspace.state_dict()
    own: dict[str, Any] = {}
    if gathered is not None:
        weights = {name: gathered[f"backspace.{name}"] for name in weights}
        inner = {name.removeprefix("model."): tensor for name, tensor in gathered.items() if name.startswith("model.")}
        own = {"state_dict": inner}
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a bar for writing would break into that of a run
    try:
        model.save_pretrained(folder, **own)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    manifest = {
        "format": FORMAT,
        "hidden_size": len(tensors["row"]),
        "max_positions": backspace.max_positions,
        "files": file_sizes(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def file_sizes(folder: Path) -> dict[str, int]:
    """The size of every file in a folder; but for the model card, which may be written anew."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "README.md"]
    return {path.name: path.stat().st_size for path in files}


def check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a folder in which a file is missing or was cut short."""
    for file, size in sizes.items():
        path = folder / file
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise ValueError(
                f"{folder} is damaged: {file} should have {size} bytes and is {found}. Save or copy the policy again."
            )


def restore(model: Any, backspace: Backspace, folder: Path) -> None:
    """Put the weights that were saved back into a loaded policy of the same shape."""
    loaded = _load_backspace(folder)
    if loaded is None:
        raise ValueError(f"`folder` must hold a saved policy. Got {folder}, which has no {MANIFEST}.")
    backspace.load_state_dict(loaded.state_dict())
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(
            model, load_file(folder / "adapter_model.safetensors"), adapter_name=model.active_adapter
        )
    else:
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).state_dict())


def load(
    folder: Path, name: str, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, gguf_file: str | None
) -> tuple[Any, PreTrainedTokenizerBase | None, Backspace | None]:
    """Model, tokenizer and `<bkspc>` row; the row is None where the folder, or the hub, has a model without one."""
    if folder.is_file() and folder.suffix == ".gguf":
        folder, gguf_file = folder.parent, folder.name
        name = str(folder)
    if gguf_file is not None:
        options = options | {"gguf_file": gguf_file}
    backspace = _load_backspace(folder) if folder.is_dir() else None
    if tokenizer is None:
        tokenizer_options = {key: options[key] for key in ("gguf_file", "trust_remote_code") if key in options}
        has_files = not folder.is_dir() or gguf_file or any(folder.glob("*token*"))
        tokenizer = AutoTokenizer.from_pretrained(name, **tokenizer_options) if has_files else None
    if (folder / "adapter_config.json").is_file():
        from peft import PeftConfig, PeftModel

        base_name = PeftConfig.from_pretrained(name).base_model_name_or_path
        base = AutoModelForCausalLM.from_pretrained(base_name, **options)
        return PeftModel.from_pretrained(base, name, is_trainable=True), tokenizer, backspace
    return AutoModelForCausalLM.from_pretrained(name, **options), tokenizer, backspace


def _load_backspace(folder: Path) -> Backspace | None:
    manifest_path, weights_path = folder / MANIFEST, folder / WEIGHTS
    if not manifest_path.is_file():
        if weights_path.is_file():
            raise ValueError(f"{folder} was not written to its end: {MANIFEST} is missing. Save the policy again.")
        return None
    manifest = json.loads(manifest_path.read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} has format {manifest['format']}, this version reads {FORMAT}. Update sequencematch."
        )
    check_files(folder, manifest["files"])
    backspace = Backspace(manifest["hidden_size"], manifest["max_positions"])
    backspace.load_state_dict(load_file(weights_path))
    return backspace
