"""Decoding with deletions inside transformers: `model.generate(..., custom_generate=backtrack)`.

Needs torch and transformers alone: `Policy.export` writes this file, as `generate.py`, beside a checkpoint.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from sequencematch.policy.attention import refuse_what_cannot_delete, rope_limit
from sequencematch.policy.decoding.choice import Choice, logit_scale_and_cap, row_by_row, uniforms
from sequencematch.policy.decoding.decoder import ActionEvent, Decoder, Limits
from sequencematch.policy.decoding.decoder_probe import probe_decoder
from sequencematch.policy.decoding.search import MIN_P, action_limit

#: The inputs of a model that decoding with deletions makes itself, or has another reason to refuse.
_INPUTS = ("attention_mask", "position_ids", "cache_position", "past_key_values", "logits_to_keep", "inputs_embeds")


@dataclass
class BacktrackOutput(GenerateDecoderOnlyOutput):
    """Under `return_dict_in_generate`: also how many prompt tokens of each row were kept, and each row's actions."""

    prompt_kept: Tensor | None = None
    actions: list[list[int]] | None = None


def backtrack(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    bkspc_token_id: int | None = None,
    seed: int | None = None,
    protect_prompt: bool = True,
    hold_back: int | None = None,
    ban_deleted: bool = False,
    backspace_bias: float = 0.0,
    search: bool = False,
    text_streamer: Any = None,
    **inputs: Any,
) -> Tensor | BacktrackOutput:
    """`model.generate(..., custom_generate=backtrack)`: the model's own sampling, where `<bkspc>` deletes the last token.

    `bkspc_token_id` is the row of the output layer that stands for `<bkspc>`, by default `model.config.bkspc_token_id`. A row
    of the result is the prompt and the completion. With `protect_prompt=False` the prompt can be deleted too: its place is
    kept by padding in front of the tokens that are left, so that `[:, prompt_length:]` is the new text. A pipeline prepends
    the original prompt to its text: use `return_full_text=False` there.

    `search` tries one token after another in each state, those with a probability of at least `min_p` (0.05 by default) of the
    likeliest token's, and deletes when none is left. It is greedy without `do_sample`, and the prompt is protected.

    `text_streamer` is a streamer of transformers, for one row: it gets tokens that can no longer be deleted. That is all text
    at the end, unless `hold_back` says how many tokens may still be deleted. transformers passes its own argument `streamer`
    to an exported checkpoint, but not to a function given as `custom_generate`.
    """
    config = generation_config
    if config.eos_token_id is None:
        raise ValueError(
            "`eos_token_id` must be set: it is what ends a row. Pass it, or set `model.generation_config.eos_token_id`."
        )
    refused = {name: isinstance(value, Tensor) for name, value in inputs.items() if name not in _INPUTS}
    refused |= {
        "num_beams": config.num_beams not in (None, 1),
        "inputs_embeds": inputs.get("inputs_embeds") is not None,
        "output_scores": config.return_dict_in_generate and (config.output_scores or config.output_logits),
        "output_hidden_states": config.return_dict_in_generate and config.output_hidden_states,
        "output_attentions": config.return_dict_in_generate and config.output_attentions,
    }
    refused["past_key_values"] = getattr(inputs.get("past_key_values"), "get_seq_length", int)() > 0
    for name, would_be in refused.items():
        if would_be:
            raise ValueError(f"`{name}` would be ignored by decoding with deletions. Leave it out.")
    if hold_back is not None and hold_back < 0:
        raise ValueError(f"`hold_back` must be at least 0. Got {hold_back}.")
    if text_streamer is not None and (len(input_ids) > 1 or not protect_prompt):
        raise ValueError("`text_streamer` needs one row and `protect_prompt=True`: it can't take back what it printed.")
    refuse_what_cannot_delete(model)
    bkspc = bkspc_token_id if bkspc_token_id is not None else getattr(model.config, "bkspc_token_id", None)
    if search and (bkspc is None or ban_deleted or hold_back is not None or not protect_prompt):
        raise ValueError(
            "`search` needs a model with `bkspc_token_id`, `protect_prompt=True`, and neither `ban_deleted` nor `hold_back`."
        )
    min_p = config.min_p if config.min_p is not None else MIN_P
    if search and not 0 < min_p <= 1:
        raise ValueError(f"`min_p` must be above 0 and at most 1 with `search`. Got {min_p}.")
    if search and backspace_bias == -math.inf:
        raise ValueError("`backspace_bias` must not be -inf with `search`, which has to delete.")
    # Not a named parameter: transformers would pass it twice.
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    eos = config.eos_token_id
    vocab_size = len(model.get_input_embeddings().weight)
    ends = eos.tolist() if isinstance(eos, Tensor) else eos if isinstance(eos, list) else [eos]
    ends = [end for end in ends if 0 <= end < vocab_size]
    if not ends:
        raise ValueError(f"`eos_token_id` must be in the vocabulary of {vocab_size} tokens. Got {eos}.")
    budget = config.max_length - input_ids.shape[1]
    limit = rope_limit(model.config)
    if limit is not None and max(map(len, prompts)) + budget > limit:
        raise ValueError(
            f"`max_length` must be at most {limit}: the model's rotary embeddings change there, for what was written before "
            f"as well. Got {config.max_length}, the prompt included. Lower it, or `max_new_tokens`."
        )
    limits = Limits(
        eos=ends[0],
        ends=frozenset(ends),
        bkspc=bkspc,
        max_new_tokens=budget,
        max_actions=action_limit(budget, search),
        min_new_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - input_ids.shape[1]),
        protect_prompt=protect_prompt,
        hold_back=hold_back,
    )
    output_layer = model.get_output_embeddings()

    def head(hidden: Tensor) -> Tensor:
        return _own_logits(model, output_layer, hidden)

    probe_decoder(model, head, limits, vocab_size)
    processors = _own_processors(bkspc, logits_processor or LogitsProcessorList(), search)
    number = int(torch.randint(2**31, ())) if seed is None and config.do_sample else seed or 0
    choice = Choice(
        not config.do_sample,
        row_by_row(processors) if processors else None,
        ban_deleted=ban_deleted,
        backspace_bias=backspace_bias,
        search_min_p=min_p if search else None,
    )
    decoder = Decoder(model, head, limits, choice, slots=len(prompts), longest_prompt=max(map(len, prompts)))
    drawn = [uniforms(number, row, limits.max_actions) for row in range(len(prompts))]
    decoder.fill(range(len(prompts)), range(len(prompts)), prompts, drawn)
    criteria = [c for c in stopping_criteria or () if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    streamed = _Streamed(text_streamer, input_ids, len(prompts[0]), hold_back)
    finals, kept = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
    actions = [list[int]() for _ in prompts]
    try:
        for event in decoder.run():
            actions[event.row].append(event.chosen)
            finals[event.row] = _state(event, limits)
            kept[event.row] = min(kept[event.row], len(finals[event.row]))
            if event.executed not in (bkspc, *ends) and _stops(criteria, event, input_ids.device):
                decoder.end(event.row)
            streamed.update(finals[event.row])
        streamed.send(finals[0])
    finally:
        if text_streamer is not None:
            text_streamer.end()
    sequences = _padded(config, input_ids, [len(prompt) for prompt in prompts], finals, kept, budget)
    if not config.return_dict_in_generate:
        return sequences
    return BacktrackOutput(
        sequences=sequences, prompt_kept=torch.tensor(kept, device=input_ids.device), actions=actions
    )


def generate(
    inputs: Any = None,
    generation_config: Any = None,
    *,
    model: Any,
    streamer: Any = None,
    tokenizer: Any = None,
    **arguments: Any,
) -> Any:
    """The function that transformers calls in an exported checkpoint: its own `generate`, decoding with `backtrack`."""
    if model.generation_config.stop_strings:  # transformers would ask for a tokenizer, and not take one
        raise ValueError("`stop_strings` must be passed to `generate`. Got them in `model.generation_config`.")
    strings = arguments.pop("stop_strings", None) or getattr(generation_config, "stop_strings", None)
    if strings:
        if tokenizer is None:
            raise ValueError("`stop_strings` need a tokenizer. Pass `tokenizer=` as well.")
        criteria = [*(arguments.pop("stopping_criteria", None) or ()), StopStringCriteria(tokenizer, strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
        generation_config = copy.copy(generation_config)
        if generation_config is not None:
            generation_config.stop_strings = None
    arguments["text_streamer"] = streamer
    return type(model).generate(model, inputs, generation_config, custom_generate=backtrack, **arguments)


def _state(event: ActionEvent, limits: Limits) -> list[int]:
    """The row's tokens: without the `<eos>` that is executed in place of another action where a row is cut."""
    was_cut = event.executed == limits.eos and event.chosen not in limits.ends
    return list(event.tokens[:-1] if was_cut else event.tokens)


def _stops(criteria: Sequence[Any], event: ActionEvent, device: torch.device) -> bool:
    if not criteria:
        return False
    tokens = torch.tensor([event.tokens], device=device)
    return any(bool(torch.as_tensor(criterion(tokens, None)).any()) for criterion in criteria)


def _padded(
    config: Any, input_ids: Tensor, prompts: list[int], finals: list[list[int]], kept: list[int], budget: int
) -> Tensor:
    """The rows as transformers returns them: prompts of one length, and completions padded on the right."""
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    pad = int(torch.as_tensor(pad).flatten()[0])
    # Without an <eos> beyond `max_length`.
    written = [
        final[keep:][: budget + prompt - keep] for final, keep, prompt in zip(finals, kept, prompts, strict=True)
    ]
    longest, width = max(map(len, written)), input_ids.shape[1]
    rows = []
    for ids, prompt, final, keep, new in zip(input_ids.tolist(), prompts, finals, kept, written, strict=True):
        before = ids if keep == prompt else [pad] * (width - keep) + final[:keep]
        rows.append(before + new + [pad] * (longest - len(new)))
    return torch.tensor(rows, device=input_ids.device, dtype=input_ids.dtype)


class _Streamed:
    """What a streamer has got: the prompt, then each token once it can no longer be deleted."""

    def __init__(self, streamer: Any, input_ids: Tensor, prompt: int, hold_back: int | None) -> None:
        self.streamer, self.hold_back, self.sent, self.deepest = streamer, hold_back, prompt, prompt
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def update(self, state: list[int]) -> None:
        self.deepest = max(self.deepest, len(state))
        if self.hold_back is not None:
            self.send(state[: max(0, self.deepest - self.hold_back)])

    def send(self, final: list[int]) -> None:
        if self.streamer is not None and len(final) > self.sent:
            self.streamer.put(torch.tensor(final[self.sent :]))
            self.sent = len(final)


def _own_processors(bkspc: int | None, processors: LogitsProcessorList, search: bool) -> LogitsProcessorList:
    """Processors that allow `<bkspc>`, which an exported checkpoint suppresses. The decoder keeps minimal lengths itself.

    A search has its own use of `min_p`.
    """
    kept = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, MinLengthLogitsProcessor | MinNewTokensLengthLogitsProcessor):
            continue  # it would count padding
        if search and isinstance(processor, MinPLogitsWarper):
            continue
        if isinstance(processor, SuppressTokensLogitsProcessor):
            tokens = processor.suppress_tokens
            processor = SuppressTokensLogitsProcessor(tokens[tokens != bkspc].tolist(), device=tokens.device)
        kept.append(processor)
    return kept


def _own_logits(model: Any, output_layer: Any, hidden: Tensor) -> Tensor:
    """The logits of the checkpoint's own forward pass, in float32 or better."""
    scale, cap = logit_scale_and_cap(model.config)
    logits = output_layer(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)
