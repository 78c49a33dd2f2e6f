"""A run's model, tokenizer and rows as a caller may give them → policy, ends, reader, examples."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from sequencematch.data.examples import Example, Examples, ExampleStream, Reader, as_examples
from sequencematch.data.identity import fingerprint_of_rows
from sequencematch.policy import Policy, storage
from sequencematch.policy.adapters import with_adapter
from sequencematch.policy.attention import max_positions
from sequencematch.policy.ends import eos_token, listed_ends
from sequencematch.training import checkpoints
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.defaults import choose, left_open, num_steps
from sequencematch.training.trackers import check_trackers


@dataclass(frozen=True)
class Inputs:
    """What a run begins with, read and checked, before its model is loaded.

    `identity` are the settings that a resumed run must share; `chosen` are those of them that the caller left open. `prompts`
    are the examples that rollouts start from.
    """

    args: SequenceMatchConfig
    identity: dict[str, Any]
    chosen: dict[str, int | str]
    tokenizer: Any
    read: Reader
    examples: Examples | ExampleStream
    held_out: Any
    prompts: Examples | ExampleStream


def prepare(
    model: Any,
    args: SequenceMatchConfig,
    rows: Any,
    held_out: Any = None,
    tokenizer: Any = None,
    rollout_rows: Any = None,
    *,
    has_optimizer: bool = False,
) -> Inputs:
    """Choose the settings that were left open, read the first rows, and refuse what can't work; no model is loaded."""
    check_arguments(args, has_optimizer=has_optimizer)
    if rollout_rows is not None:
        args.check_rollout_dataset()
    given = {name: value for name, value in args.own_values().items() if name not in left_open(args)}
    before: dict[str, Any] = {"rollout_dataset": None}
    if args.needs_rollouts and rollout_rows is None:  # older versions took D from rollouts that began as the data does
        before["model_value_from"] = "rollouts"
    checkpoints.refuse_another_run(Path(args.output_dir or "."), {"model": name_of(model), **given}, before=before)
    if rows is None:
        raise ValueError("`train_dataset` must be given: rollouts start from its prompts, too. Got None.")
    tokenizer = tokenizer or tokenizer_of(model, args)
    context = context_of(model, args)
    args, chosen = choose(args, context, rows)
    check_context(args, context)
    steps = num_steps(args, rows)
    if args.objective_value.rolls_out and steps and (args.bc_steps or 0) >= steps:
        raise ValueError(
            f"`bc_steps`={args.bc_steps} must be below the run's {steps} steps, or Eq. 4 is never used. Lower `bc_steps`, train "
            f"longer, or use objective 'bc'."
        )
    read = reader(args, tokenizer, ends_of(model, tokenizer))
    examples = as_examples(rows, read, "train_dataset")
    first = next(iter(examples))
    if not only_completions(args, first):
        read = examples.read = replace(read, scores_prompt=True)
        if not first.is_text:
            as_examples(rows, read, "train_dataset")  # again: the loss covers its prompts, too
    if args.correction_rate and first.is_text:
        raise ValueError("`correction_rate` needs examples with prompts and answers. Got plain text; leave it out.")
    if isinstance(held_out, dict):
        held_out = {name: as_examples(part, read, "eval_dataset") for name, part in held_out.items()}
    elif held_out is not None:
        held_out = as_examples(held_out, read, "eval_dataset")
    prompts = examples
    if rollout_rows is not None:
        prompts = as_examples(rollout_rows, prompt_reader(read), "rollout_dataset")
    own_prompts = None if rollout_rows is None else prompts
    identity = {"model": name_of(model), **args.own_values(), **data_identity(args, examples, own_prompts)}
    folder = Path(args.output_dir or ".")
    checkpoints.refuse_another_run(
        folder, identity, before=before, insist=args.resume_anyway, processes=args.world_size
    )
    return Inputs(args, identity, chosen, tokenizer, read, examples, held_out, prompts)


def only_completions(args: SequenceMatchConfig, first: Example) -> bool:
    """Whether prompts are left out of the loss: by default where rows have prompts   (App. E)."""
    if args.completion_only_loss and first.is_text:
        raise ValueError("`completion_only_loss` needs examples with prompts. Got plain text; leave it out.")
    return not first.is_text if args.completion_only_loss is None else args.completion_only_loss


def reader(args: SequenceMatchConfig, tokenizer: Any, ends: frozenset[int]) -> Reader:
    """The reader of a run's rows, with prompts left out of the loss."""
    needs_noise = args.noise_source == "tokens" and bool(args.noise_rate)
    return Reader(tokenizer, ends, args.context, args.truncation, needs_noise)


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
        with _named(model):
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
    with _named(model):
        return storage.load_tokenizer(str(model), _loading_options(args))


def context_of(model: Any, args: SequenceMatchConfig) -> int | None:
    """The context of a model that may not be loaded yet; None if its config can't be found without loading it."""
    if isinstance(model, Policy):
        return model.max_positions
    if not isinstance(model, str | os.PathLike):
        return max_positions((model.get_base_model() if hasattr(model, "peft_config") else model).config)
    with suppress(OSError, ValueError):
        return max_positions(_config_of(str(model), _loading_options(args)))
    return None


def _config_of(name: str, options: dict[str, Any]) -> Any:
    place = Path(name) if Path(name).exists() else storage.BUNDLED.get(name, Path(name))
    if (place / "adapter_config.json").is_file():
        return _config_of(json.loads((place / "adapter_config.json").read_text())["base_model_name_or_path"], options)
    if place.suffix == ".gguf":
        place, options = place.parent, options | {"gguf_file": place.name}
    return AutoConfig.from_pretrained(str(place), **options)


def _loading_options(args: SequenceMatchConfig) -> dict[str, Any]:
    """The options of `Policy.from_pretrained` that tokenizers and configs take, too."""
    wanted = ("trust_remote_code", "gguf_file", "revision")
    return {name: value for name, value in (args.model_init_kwargs or {}).items() if name in wanted}


@contextmanager
def _named(model: Any) -> Iterator[None]:
    """Blame a model that can't be read on its name."""
    try:
        yield
    except OSError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"`model` must be a folder or a model on the hub. Got {str(model)!r}: {reason}") from error


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
    own = None if prompts is None else fingerprint_of_rows(prompts)
    return {"global_batch_size": count, "dataset": fingerprint_of_rows(examples), "rollout_dataset": own}


def name_of(model: Any) -> str:
    """The name or folder that a model was loaded from, or an empty text."""
    if isinstance(model, str | os.PathLike):
        return str(model)
    return str(getattr(model.base if isinstance(model, Policy) else model, "name_or_path", ""))


def check_context(args: SequenceMatchConfig, context: int | None) -> None:
    """Refuse trajectories longer than the model's context."""
    if context is not None and args.context > context:
        raise ValueError(f"`max_length` must fit the model's context of {context} tokens. Got {args.max_length}.")


def check_arguments(args: SequenceMatchConfig, *, has_optimizer: bool) -> None:
    """Refuse settings that the trainer, or an optimizer of the caller's, would ignore, and trackers that are missing."""
    check_trackers(args.report_to or ())
    if args.n_gpu > 1:
        raise ValueError(
            "Several GPUs need a process each: start with `accelerate launch` or `torchrun`, or show one by "
            "CUDA_VISIBLE_DEVICES=0."
        )
    batches = args.accelerator_config
    if batches.split_batches or not batches.even_batches:
        raise ValueError(
            "`accelerator_config` must leave `split_batches` off and `even_batches` on: every process takes as many batches of "
            "`per_device_train_batch_size` rows as the others."
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
