"""Policies on disk: model or adapter in Hugging Face's format, with the `<bkspc>` row and offset head beside them."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from sequencematch.data.files import settle, write_beside, write_folder
from sequencematch.data.hashes import check_sums
from sequencematch.policy.backspace import Backspace
from sequencematch.policy.ends import listed_ends
from sequencematch.policy.finite import refuse_non_finite
from sequencematch.policy.manifest import (
    ADAPTER,
    CONFIG,
    MANIFEST,
    ROW_FILE,
    mark,
    marked_file,
    read_manifest,
    write_manifest,
)
from sequencematch.policy.sharding import gathered, is_sharded, shard_of

WEIGHTS = "sequencematch.safetensors"
#: The file that names the row's → how to load a saved policy without its row.
_WITHOUT_ROW: Mapping[str, str] = MappingProxyType(
    {
        CONFIG: f"remove `{ROW_FILE}` from {CONFIG} to load it as a model that can't delete",
        ADAPTER: "load the adapter with PEFT and give that model to `Policy.from_pretrained`, for an untrained row",
    }
)
_INSIDE = Path(__file__).parents[1] / "models"
#: Models that come with the package, name → folder: one that adds and subtracts, one that deletes wrong digits, and one that
#: searches graphs.
BUNDLED: Mapping[str, Path] = MappingProxyType(
    {f"sequencematch/{name}": _INSIDE / name for name in ("arithmetic-base", "arithmetic", "path-star")}
)


def save(model: Any, tokenizer: PreTrainedTokenizerBase | None, backspace: Backspace, folder: Path, card: str) -> None:
    """Write model or adapter, tokenizer, `<bkspc>` row, offset head and model card; all or nothing."""
    _refuse_non_finite(model, backspace, None)

    def write(temporary: Path) -> None:
        _write(temporary, model, tokenizer, backspace, None)
        (temporary / "README.md").write_text(card, "utf-8")

    write_folder(folder, write, marker=MANIFEST)


def save_beside(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    backspace: Backspace,
    folder: Path,
    gathered: Mapping[str, Tensor] | None = None,
) -> None:
    """As `save`, into a folder whose other files stay; all or nothing, too.

    `gathered` holds the weights of a sharded policy, from `gathered_weights`, by their names in its `state_dict`.
    """
    _refuse_non_finite(model, backspace, gathered)
    write_beside(folder, lambda temporary: _write(temporary, model, tokenizer, backspace, gathered))


def fingerprints_of(folder: Path) -> Mapping[str, Any]:
    """Size and SHA-256 of the files of a policy that was just saved."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.files


def gathered_weights(policy: Module) -> dict[str, Tensor] | None:
    """The weights of a sharded policy, gathered in the first process, or None if it isn't sharded.

    Every process must call this; in the others the tensors are empty.
    """
    return gathered(policy.state_dict()) if is_sharded(policy) else None


def _refuse_non_finite(model: Any, backspace: Backspace, gathered: Mapping[str, Tensor] | None) -> None:
    owners = {"model": model, "backspace": backspace}
    own = ((f"{owner}.{name}", p) for owner, module in owners.items() for name, p in module.named_parameters())
    refuse_non_finite(own if gathered is None else gathered.items())


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
    if hasattr(model, "peft_config") and model.get_base_model().name_or_path in BUNDLED:
        own["save_embedding_layers"] = False  # PEFT would ask the hub for the base model's vocabulary size
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # a second bar would break the trainer's
    try:
        model.save_pretrained(folder, **own)
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    mark(folder, WEIGHTS)
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    ends = listed_ends(_base(model).generation_config)
    write_manifest(folder, hidden_size=len(tensors["row"]), max_positions=backspace.max_positions, ends=ends)


def restore(model: Any, backspace: Backspace, folder: Path) -> None:
    """Load saved weights into a policy of the same shape, sharded or not; a checkpoint's files were checked before."""
    loaded = _load_backspace(folder, verify=False)
    if loaded is None:
        raise ValueError(f"`folder` must hold a saved policy. Got {folder}, which has no {MANIFEST}.")
    backspace.load_state_dict(_shards(loaded.state_dict(), backspace.state_dict()))
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        adapter = model.active_adapter
        inside = folder if adapter == "default" else folder / adapter  # PEFT puts other adapters into subfolders
        saved = load_file(inside / ADAPTER)
        if is_sharded(model):
            saved = _shards(saved, get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False))
        set_peft_model_state_dict(model, saved, adapter_name=adapter)
    else:
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).state_dict()
        model.load_state_dict(_shards(saved, model.state_dict()))


def _shards(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: shard_of(tensor, own[name]) if name in own else tensor for name, tensor in saved.items()}


def load(
    folder: Path, name: str, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, gguf_file: str | None
) -> tuple[Any, PreTrainedTokenizerBase | None, Backspace | None]:
    """Model, tokenizer, and `<bkspc>` row or None if there is none, from a folder or the hub."""
    if (place := _place(name)) != name:
        model, tokenizer, backspace = load(Path(place), place, options, tokenizer, gguf_file)
        _call(model, name)
        return model, tokenizer, backspace
    if folder.is_file() and folder.suffix == ".gguf":
        folder, gguf_file = folder.parent, folder.name
        name = str(folder)
    if gguf_file is not None:
        options = options | {"gguf_file": gguf_file}
    settle(folder)
    if not folder.exists():
        folder = _downloaded(name, options.get("revision")) or folder
        name = str(folder) if folder.is_dir() else name
    backspace = None
    if folder.is_dir():
        check_sums(folder)
        backspace = _load_backspace(folder)
    if tokenizer is None:
        wanted = ("gguf_file", "trust_remote_code", "revision")
        tokenizer = load_tokenizer(name, {key: options[key] for key in wanted if key in options})
    if (folder / "adapter_config.json").is_file():
        from peft import PeftConfig, PeftModel

        base_name = PeftConfig.from_pretrained(name).base_model_name_or_path
        base = AutoModelForCausalLM.from_pretrained(_place(base_name), **options)
        _call(base, base_name)
        if ends := load_ends(name):  # PEFT saves no generation config
            base.generation_config.eos_token_id = sorted(ends)
        return PeftModel.from_pretrained(base, name, is_trainable=True), tokenizer, backspace
    return AutoModelForCausalLM.from_pretrained(name, **options), tokenizer, backspace


def load_tokenizer(name: str, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, a GGUF file or a model on the hub, or None if the folder has none."""
    name = _place(name)
    folder = Path(name)
    if folder.is_file() and folder.suffix == ".gguf":
        name, options = str(folder.parent), options | {"gguf_file": folder.name}
    elif folder.is_dir() and "gguf_file" not in options and not any(folder.glob("*token*")):
        return None
    return AutoTokenizer.from_pretrained(name, **options)


def load_ends(name: str) -> frozenset[int]:
    """The ends that a saved policy names, or a model's generation config, without loading the model."""
    folder = Path(_place(name))
    if (manifest := read_manifest(folder)) is not None and manifest.ends is not None:
        return manifest.ends
    if (folder / "adapter_config.json").is_file():
        return load_ends(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    for load in (GenerationConfig.from_pretrained, AutoConfig.from_pretrained):
        with suppress(OSError, ValueError):  # it has none
            return listed_ends(load(_place(name)))
    return frozenset()


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _place(name: str) -> str:
    """A model's place: its own name, or for a bundled model its folder, unless a folder of that name exists."""
    return str(BUNDLED[name]) if name in BUNDLED and not Path(name).exists() else name


def _call(model: Any, name: str) -> None:
    """Set the name that adapters and model cards give as their base model."""
    model.name_or_path = model.config.name_or_path = name


def _downloaded(name: str, revision: str | None) -> Path | None:
    """The local copy of a saved policy on the hub; None for other models, which transformers downloads itself."""
    try:
        found = cached_file(name, MANIFEST, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such model, or no network: transformers reports it
        return None
    return Path(snapshot_download(name, revision=revision)) if found is not None else None


def _load_backspace(folder: Path, *, verify: bool = True) -> Backspace | None:
    """The row and the offset head, after a check of all files in the folder unless that was done; None for a plain model."""
    manifest, path = read_manifest(folder), folder / WEIGHTS
    if manifest is None:
        if path.is_file():
            raise ValueError(f"{folder} is incomplete: {MANIFEST} is missing. Save the policy again.")
        if (marked := marked_file(folder)) is not None:
            raise ValueError(
                f"{folder} is a saved policy without its `<bkspc>` row: {MANIFEST} and {WEIGHTS} are missing. Copy them, too, or "
                f"{_WITHOUT_ROW[marked]}."
            )
        return None
    if verify:
        manifest.check(folder)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder} is damaged: {WEIGHTS} can't be read: {error}. Save or copy the policy again."
        ) from error
    shape = tuple(tensors["row"].shape) if "row" in tensors else None
    if shape != (manifest.hidden_size,):
        raise ValueError(
            f"{folder} is damaged: the `<bkspc>` row in {WEIGHTS} must have the shape ({manifest.hidden_size},) that "
            f"{MANIFEST} gives. Got {shape}. Save or copy the policy again."
        )
    backspace = Backspace(manifest.hidden_size, manifest.max_positions)
    try:
        backspace.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"{folder} is damaged: {WEIGHTS} holds no offset head of this shape. Save or copy the policy again."
        ) from error
    return backspace
