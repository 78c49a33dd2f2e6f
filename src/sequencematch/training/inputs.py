"""A run's model, tokenizer and rows as a caller may give them → policy, ends, reader."""

import os
from dataclasses import replace
from typing import Any

import torch

from sequencematch.data.examples import Example, Examples, ExampleStream, Reader
from sequencematch.data.identity import fingerprint_of_rows
from sequencematch.policy import Policy, storage
from sequencematch.policy.adapters import with_adapter
from sequencematch.policy.ends import eos_token, listed_ends
from sequencematch.training.config import SequenceMatchConfig


def only_completions(args: SequenceMatchConfig, first: Example) -> bool:
    """Whether prompts are left out of the loss: by default where rows have prompts   (App. E)."""
    if args.completion_only_loss and first.is_text:
        raise ValueError("`completion_only_loss` needs examples with prompts. Got plain text; leave it out.")
    return not first.is_text if args.completion_only_loss is None else args.completion_only_loss


def reader(args: SequenceMatchConfig, tokenizer: Any, ends: frozenset[int]) -> Reader:
    """The reader of a run's rows, with prompts left out of the loss."""
    needs_noise = args.noise_source == "tokens" and bool(args.noise_rate)
    return Reader(tokenizer, ends, args.max_length, args.truncation, needs_noise)


def prompt_reader(read: Reader) -> Reader:
    """The reader of rows that only rollouts start from: completions and noise are not read, and text gives a prefix."""
    return replace(read, truncation=True, needs_noise=False, prompts_only=True)


def as_policy(model: Any, tokenizer: Any, peft_config: Any, args: SequenceMatchConfig) -> Policy:
    """A policy from a name, a folder, a Hugging Face or PEFT model, or a policy, with a new adapter if one is asked for."""
    options = dict(args.model_init_kwargs or {})
    if isinstance(model, str | os.PathLike):
        options.setdefault("dtype", torch.float32)  # as in TRL: Adam's small steps vanish in bfloat16 weights
        if options.get("quantization_config") is not None:
            options.setdefault("device", args.device)  # 4-bit weights are made where they stay
        policy = Policy.from_pretrained(model, tokenizer=tokenizer, **options)
    elif options:
        raise ValueError(
            "`model_init_kwargs` would be ignored: the model is loaded already. Pass its name, or leave them out."
        )
    else:
        policy = model if isinstance(model, Policy) else Policy.from_pretrained(model, tokenizer=tokenizer)
    if peft_config is not None:
        return Policy(with_adapter(policy.model, peft_config, policy.space.ends), tokenizer, policy.backspace)
    policy.tokenizer = tokenizer
    return policy


def tokenizer_of(model: Any, args: SequenceMatchConfig) -> Any:
    """The tokenizer of a policy or of a named model, or None."""
    if isinstance(model, Policy):
        return model.tokenizer
    if not isinstance(model, str | os.PathLike):
        return None
    wanted = ("trust_remote_code", "gguf_file", "revision")
    return storage.load_tokenizer(str(model), {k: v for k, v in (args.model_init_kwargs or {}).items() if k in wanted})


def ends_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a sequence, before a policy is made."""
    if isinstance(model, Policy):
        return model.space.ends
    if isinstance(model, str | os.PathLike):
        eos = getattr(tokenizer, "eos_token_id", None)
        return storage.load_ends(str(model)) | ({eos} if eos is not None else set())
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return listed_ends(base.generation_config) | {eos_token(base, tokenizer)}


def data_identity(
    args: SequenceMatchConfig, examples: Examples | ExampleStream, prompts: Examples | ExampleStream | None
) -> dict[str, Any]:
    """What a resumed run must have in common with the run that it resumes: its rows, and how many of them make a step."""
    count = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    own = {} if prompts is None else {"rollout_dataset": fingerprint_of_rows(prompts)}
    return {"global_batch_size": count, "dataset": fingerprint_of_rows(examples), **own}


def name_of(model: Any) -> str:
    """The name or folder that a model was loaded from, or an empty text."""
    if isinstance(model, str | os.PathLike):
        return str(model)
    return str(getattr(model.base if isinstance(model, Policy) else model, "name_or_path", ""))


def check_arguments(args: SequenceMatchConfig, *, has_optimizer: bool) -> None:
    """Refuse settings that the trainer, or an optimizer of the caller's, would ignore."""
    if args.n_gpu > 1:
        raise ValueError(
            "Several GPUs need a process each: start with `accelerate launch` or `torchrun`, or show one by "
            "CUDA_VISIBLE_DEVICES=0."
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError("`push_to_hub` needs `hub_strategy='end'`: checkpoints stay on disk.")
    if args.offset_lr_multiplier != 1 and has_optimizer:
        raise ValueError(
            f"`offset_lr_multiplier` would be ignored: `optimizers` brings its own learning rates. Got "
            f"{args.offset_lr_multiplier}; leave it out, or give the offset head a group of its own in your optimizer "
            f"(`policy.backspace.offset_parameters()`)."
        )


def remedy(policy: Policy) -> str:
    """What to try when a policy deletes without end: a frozen output layer can't learn where to end."""
    if any(weight.requires_grad for weight in policy.base.get_output_embeddings().parameters()):
        return "lower `noise_rate`, or clone longer (`bc_steps`)."
    return (
        f"train the output layer's row of <eos>, too (peft: `trainable_token_indices={{'lm_head': [{policy.space.eos}]}}`), "
        f"or all of it (`modules_to_save=['lm_head']`)."
    )
