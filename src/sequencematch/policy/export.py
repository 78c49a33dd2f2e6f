"""A policy as a plain Hugging Face checkpoint that can delete by itself: `<bkspc>` is folded into the output layer."""

import copy
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

from sequencematch.data.files import write_folder
from sequencematch.data.hashes import write_sums
from sequencematch.policy.finite import refuse_non_finite
from sequencematch.policy.manifest import ROW_FILE
from sequencematch.policy.scoring import Scorer

NAME = "<bkspc>"
#: The module that becomes `generate.py`.
_ENTRY_MODULE = "sequencematch.policy.decoding.custom_generate"
#: An import from this package, in a file that is exported.
_OWN_IMPORT = re.compile(r"^from (sequencematch\.policy\.[\w.]+) import", re.MULTILINE)


def export(policy: Scorer, folder: Path, card: str, *, replace: bool = False) -> None:
    """Merge the adapter, fold the row into the output layer, add `<bkspc>` to the tokenizer, and write the folder atomically."""
    refuse_non_finite(policy.named_parameters())
    tokenizer, bkspc = copy.deepcopy(policy.tokenizer), policy.space.bkspc
    if policy.folded_row is None and tokenizer is not None:
        ids = tokenizer.get_vocab()
        if NAME in ids:
            raise ValueError(
                f"`tokenizer` must not have {NAME}, which the model has no row for. Load its own tokenizer, not an export's."
            )
        if len(tokenizer) == bkspc and max(ids.values()) < bkspc:
            tokenizer.add_special_tokens({"additional_special_tokens": [NAME]}, replace_extra_special_tokens=False)
            assert tokenizer.convert_tokens_to_ids(NAME) == bkspc
        # Elsewhere its ids would not be the model's: it goes without. No text holds <bkspc>.
    model = merged(policy.model)
    fold_in(model, policy)

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        write_decoder(temporary / "custom_generate")
        (temporary / "README.md").write_text(card, "utf-8")
        write_sums(temporary, without=("README.md",))

    write_folder(folder, write, marker=None if replace else "custom_generate")


def merged(model: Any) -> PreTrainedModel:
    """A copy with its adapter merged, in full precision: 4-bit weights would be rounded, and need bitsandbytes to load."""
    model = copy.deepcopy(model)
    if getattr(model, "is_quantized", False):
        model = dequantized(model)
    if not hasattr(model, "peft_config"):
        return model
    base = model.get_base_model()
    embedding, output = base.get_input_embeddings(), base.get_output_embeddings()
    if hasattr(embedding, "base_layer") and embedding.get_base_layer().weight is output.weight:
        # The adapter changes the input embeddings alone, and merging would change the tied output layer too.
        output.weight = torch.nn.Parameter(output.weight.detach().clone())
        base.config.tie_word_embeddings = False
    return model.merge_and_unload()


def dequantized(model: Any) -> Any:
    """The model in full precision. An adapter made for 4-bit layers is put on the new layers again."""
    if not hasattr(model, "peft_config"):
        model = model.dequantize(model.dtype)
        model._weight_conversions = None  # `save_pretrained` would quantise again
        return model
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config, weights = model.active_peft_config, get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    adapted = get_peft_model(dequantized(model.unload()), config)
    set_peft_model_state_dict(adapted, weights)
    return adapted


def fold_in(model: PreTrainedModel, policy: Scorer) -> None:
    """Write the `<bkspc>` row into the output layer, after the rows of all tokens."""
    bkspc = policy.space.bkspc
    if bkspc >= len(model.get_output_embeddings().weight):
        model.resize_token_embeddings(bkspc + 1, mean_resizing=False)
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.weight[bkspc] = policy.backspace.row.to(layer.weight)
        if getattr(layer, "bias", None) is not None:
            layer.bias[bkspc] = 0
    model.config.bkspc_token_id = bkspc
    if hasattr(model.config, ROW_FILE):
        delattr(model.config, ROW_FILE)  # the row is inside
    others = sorted(policy.space.ends - {policy.space.eos})
    model.generation_config.eos_token_id = [policy.space.eos, *others] if others else policy.space.eos
    model.generation_config.suppress_tokens = sorted({*(model.generation_config.suppress_tokens or []), bkspc})


def write_decoder(folder: Path) -> None:
    """Write the decoder's own files: `generate.py` and, beside it, every file of ours that it imports.

    transformers finds files by their `from .name import …`, in the same folder only. With a file missing or in a subfolder it
    would silently use its own `generate`.
    """
    folder.mkdir()
    modules = [_ENTRY_MODULE]
    for module in modules:  # grows by the imports of each module
        source = inspect.getsource(importlib.import_module(module))
        modules += [name for name in _OWN_IMPORT.findall(source) if name not in modules]
        source = _OWN_IMPORT.sub(lambda match: f"from .{_last(match[1])} import", source)
        (folder / ("generate.py" if module == _ENTRY_MODULE else f"{_last(module)}.py")).write_text(source)
    missing = [path for path in get_relative_import_files(folder / "generate.py") if not Path(path).is_file()]
    assert not missing, f"the exported decoder lacks {missing}"


def _last(module: str) -> str:
    return module.rpartition(".")[2]
