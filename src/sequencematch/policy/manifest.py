"""`sequencematch.json`: the shape of a saved policy's `<bkspc>` row, its ends, and its files with their hashes."""

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file

from sequencematch.data.hashes import Fingerprint, check_files, fingerprints, is_listing

MANIFEST = "sequencematch.json"
#: An entry of a saved policy's config.json, or of the metadata of its adapter's weights, by which it differs from a plain model
#: or adapter when the row is missing. PEFT warns of unknown entries of adapter_config.json, and ignores metadata.
ROW_FILE = "bkspc_row_file"
#: Format 1 lists the sizes of files without hashes; it is still read.
FORMAT = 2
#: The config of a full model, and the weights of an adapter.
CONFIG, ADAPTER = "config.json", "adapter_model.safetensors"
_REMEDY = "Save or copy the policy again."
#: The model card, which may change later.
_UNLISTED = ("README.md", MANIFEST)


@dataclass(frozen=True)
class Manifest:
    """What `sequencematch.json` says. Older versions wrote no `ends`."""

    hidden_size: int
    max_positions: int
    ends: frozenset[int] | None
    files: Mapping[str, int | Fingerprint]

    def check(self, folder: Path) -> None:
        """Refuse a folder whose files are not the listed ones."""
        check_files(folder, self.files, _REMEDY)


def write_manifest(folder: Path, *, hidden_size: int, max_positions: int, ends: Collection[int]) -> None:
    """Write the manifest of a folder that holds everything else."""
    values = {"format": FORMAT, "hidden_size": hidden_size, "max_positions": max_positions, "ends": sorted(ends)}
    listed = values | {"files": fingerprints(folder, without=_UNLISTED)}
    (folder / MANIFEST).write_text(json.dumps(listed, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none; a `ValueError` names the field that is wrong."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON. {_REMEDY}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged: it must hold a JSON object. Got a {type(values).__name__}. {_REMEDY}")
    version = values.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(f"{folder} has format {version}, this version reads {FORMAT} and older. Update sequencematch.")
    for name, (is_right, rule) in _RULES.items():
        if not is_right(values.get(name)):
            got = repr(values[name]) if name in values else "nothing"
            raise ValueError(f"{path} is damaged: `{name}` must be {rule}. Got {got[:80]}. {_REMEDY}")
    ends = values.get("ends")
    return Manifest(
        values["hidden_size"], values["max_positions"], None if ends is None else frozenset(ends), values["files"]
    )


def mark(folder: Path, row_file: str) -> None:
    """Name the row's file in a full model's config.json, or in the metadata of an adapter's weights."""
    config = folder / CONFIG
    if config.is_file():
        values = {**json.loads(config.read_text("utf-8")), ROW_FILE: row_file}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    for weights in folder.rglob(ADAPTER):  # PEFT puts adapters with a name into subfolders
        with safe_open(weights, "pt") as file:
            metadata = file.metadata() or {}
        # From bytes: `load_file` maps the file that is written here.
        save_file(load(weights.read_bytes()), weights, metadata={**metadata, ROW_FILE: row_file})


def marked_file(folder: Path) -> str | None:
    """The file of a folder that names the file of a row, or None if it is no saved policy of ours."""
    with suppress(OSError, ValueError):  # there is none, or transformers says what is wrong with it
        if ROW_FILE in json.loads((folder / CONFIG).read_text("utf-8")):
            return CONFIG
    with suppress(OSError, SafetensorError), safe_open(folder / ADAPTER, "pt") as file:  # the same, or PEFT
        if ROW_FILE in (file.metadata() or {}):
            return ADAPTER
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


#: Field → whether its value is right, and what it must be.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "format": (_is_count, "a positive whole number"),
    "hidden_size": (_is_count, "a positive whole number"),
    "max_positions": (_is_count, "a positive whole number"),
    "ends": (lambda value: value is None or _are_tokens(value), "a list of token ids"),
    "files": (is_listing, "a mapping from file names to sizes and SHA-256"),
}
