"""`Policy`: a Hugging Face causal language model that can delete; load, score, generate, save, export (§4)."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sequencematch.policy import storage
from sequencematch.policy.backspace import Backspace
from sequencematch.policy.card import export_card, policy_card
from sequencematch.policy.decoding.decoder import ActionEvent
from sequencematch.policy.export import export
from sequencematch.policy.generation import Generation, Prompt, as_prompts, generate, stream
from sequencematch.policy.hub import HubOptions, upload
from sequencematch.policy.probe import select_attention
from sequencematch.policy.sampling import Sampling, SamplingOptions
from sequencematch.policy.scoring import Scorer

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


class Policy(Scorer):
    """p(a|s) from a causal language model, a `<bkspc>` row and an offset head   (§4, §6)."""

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        backspace: Backspace | None = None,
    ) -> None:
        """Add a row and an offset head, new ones unless given, to a loaded model, and probe that it can delete."""
        super().__init__(model, tokenizer, backspace)
        select_attention(self)

    @classmethod
    def from_pretrained(
        cls,
        source: "str | Path | PreTrainedModel | PeftModel",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        peft_config: "PeftConfig | None" = None,
        quantization_config: Any = None,
        attn_implementation: str | None = None,
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
        **model_options: Any,
    ) -> "Policy":
        """A policy from a hub id, a folder (also one written by `save_pretrained` or `export`), a GGUF file, or a model object.

        `peft_config` puts a new adapter on the model, `quantization_config` loads it in 4 bits for QLoRA. No code from a
        model's repository runs unless `trust_remote_code` is set.
        """
        if isinstance(source, str | Path):
            options = {"dtype": dtype, "trust_remote_code": trust_remote_code, **model_options}
            place = device if quantization_config is not None else None  # 4-bit weights are made where they stay
            given = {
                "quantization_config": quantization_config,
                "attn_implementation": attn_implementation,
                "device_map": place,
            }
            options |= {name: value for name, value in given.items() if value is not None}
            model, tokenizer, backspace = storage.load(Path(source), str(source), options, tokenizer, gguf_file)
        else:
            ignored = {
                "quantization_config": quantization_config,
                "gguf_file": gguf_file,
                "attn_implementation": attn_implementation,
            }
            wrong = [name for name, value in ignored.items() if value is not None] + list(model_options)
            if wrong:
                raise ValueError(
                    f"`{wrong[0]}` would be ignored: the model is loaded already. Pass it to the model's own `from_pretrained`."
                )
            model, backspace = source, None
        if device is not None and quantization_config is None:
            model = cast(PreTrainedModel, model.to(device))
        if peft_config is not None:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
        return cls(model, tokenizer, backspace)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        batch_size: int = 64,
        progress: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Roll out from one prompt or many; `sampling` holds the fields of `Sampling`   (§4.1).

        A prompt is text, token ids, or the messages of a conversation, which the chat template turns into a prompt.
        """
        return generate(self, as_prompts(prompts), Sampling(**sampling), batch_size=batch_size, progress=progress)

    def stream(self, prompt: Prompt, **sampling: Unpack[SamplingOptions]) -> Iterator[ActionEvent]:
        """Roll out from one prompt, yielding every action as it happens."""
        return stream(self, prompt, Sampling(**sampling))

    def export(self, folder: str | Path, *, replace: bool = False, prompts: Sequence[str] = ()) -> None:
        """Write a plain Hugging Face checkpoint that backtracks by itself, without this library.

        An earlier export in the folder is replaced, anything else only with `replace`. The model card shows a deletion, if there
        is one after `prompts`.
        """
        export(self, Path(folder), export_card(self, Path(folder).name, prompts), replace=replace)

    def save_pretrained(self, folder: str | Path, *, prompts: Sequence[str] = ()) -> None:
        """Write the model or its adapter, the tokenizer, the `<bkspc>` row, the offset head and a model card; all or nothing.

        The card shows a deletion, if there is one after `prompts`.
        """
        self._save(Path(folder), policy_card(self, Path(folder).name, prompts))

    def push_to_hub(
        self, repo_id: str, *, plain: bool = False, prompts: Sequence[str] = (), **options: Unpack[HubOptions]
    ) -> str:
        """Upload what `save_pretrained` writes, or with `plain` what `export` writes, and return the commit's address.

        A repository that does not exist is created. The model card shows a deletion, if there is one after `prompts`.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "policy")
            if plain:
                export(self, folder, export_card(self, repo_id, prompts))
            else:
                self._save(folder, policy_card(self, repo_id, prompts))
            return upload(folder, repo_id, options)

    def _save(self, folder: Path, card: str) -> None:
        storage.save(self.model, self.tokenizer, self.backspace, folder, card)
