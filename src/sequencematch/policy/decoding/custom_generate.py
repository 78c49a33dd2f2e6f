"""Decoding with deletions inside transformers: `model.generate(..., custom_generate=backtrack)`.

Needs torch and transformers alone: `Policy.export` writes this file, as `generate.py`, beside a checkpoint.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sequencematch.policy.decoding.choice import Choice, logit_scale_and_cap, row_by_row, uniforms
from sequencematch.policy.decoding.decoder import Decoder, Limits


def backtrack(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    bkspc_token_id: int | None = None,
    seed: int | None = None,
    ban_deleted: bool = False,
    backspace_bias: float = 0.0,
    **inputs: Any,
) -> Tensor:
    """`model.generate(..., custom_generate=backtrack)`: the model's own sampling, where `<bkspc>` deletes the last token.

    `bkspc_token_id` is the row of the output layer that stands for `<bkspc>`, by default `model.config.bkspc_token_id`. The
    prompt can't be deleted: callers cut it off the result by its length.
    """
    if generation_config.eos_token_id is None:
        raise ValueError(
            "`eos_token_id` must be set: it is what ends a row. Pass it, or set `model.generation_config.eos_token_id`."
        )
    ignored = {
        "num_beams": generation_config.num_beams not in (None, 1),
        "streamer": inputs.get("streamer") is not None,
    }
    ignored["return_dict_in_generate"] = bool(generation_config.return_dict_in_generate)
    ignored["stopping_criteria"] = any(
        type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in stopping_criteria or ()
    )
    for name, would_be in ignored.items():
        if would_be:
            raise ValueError(f"`{name}` would be ignored by decoding with deletions. Leave it out.")
    bkspc = bkspc_token_id if bkspc_token_id is not None else getattr(model.config, "bkspc_token_id", None)
    # Not a named parameter: transformers would pass it twice.
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    eos = generation_config.eos_token_id
    stops = eos.tolist() if isinstance(eos, Tensor) else eos if isinstance(eos, list) else [eos]
    budget = generation_config.max_length - input_ids.shape[1]
    limits = Limits(stops[0], bkspc, budget, 4 * budget + 1, True, frozenset(stops[1:]))
    processors = _unsuppress_backspace(bkspc, logits_processor or LogitsProcessorList())
    number = int(torch.randint(2**31, ())) if seed is None and generation_config.do_sample else seed or 0
    output_layer = model.get_output_embeddings()
    decoder = Decoder(
        model,
        lambda hidden: _own_logits(model, output_layer, hidden),
        limits,
        Choice(not generation_config.do_sample, row_by_row(processors), None, ban_deleted, backspace_bias),
        slots=len(prompts),
        longest_prompt=max(map(len, prompts)),
    )
    drawn = [uniforms(number, row, limits.max_actions) for row in range(len(prompts))]
    decoder.fill(range(len(prompts)), range(len(prompts)), prompts, drawn)
    finals: list[tuple[int, ...]] = [()] * len(prompts)
    for event in decoder.run():
        was_cut = event.executed == limits.eos != event.chosen
        last = (event.chosen,) if event.chosen in limits.stop_tokens else ()
        finals[event.row] = event.tokens[:-1] + last if was_cut else event.tokens
    # As transformers returns rows: without an <eos> beyond `max_length`.
    completions = [list(final[len(prompt) :])[:budget] for final, prompt in zip(finals, prompts, strict=True)]
    longest = max(map(len, completions))
    pad = generation_config.pad_token_id if generation_config.pad_token_id is not None else stops[0]
    tail = torch.tensor(
        [c + [pad] * (longest - len(c)) for c in completions], device=input_ids.device, dtype=input_ids.dtype
    )
    return torch.cat([input_ids, tail.view(len(prompts), longest)], dim=1)


def _unsuppress_backspace(bkspc: int | None, processors: LogitsProcessorList) -> LogitsProcessorList:
    """Processors that allow `<bkspc>`, which an exported checkpoint suppresses for other decoders."""
    kept = LogitsProcessorList()
    for processor in processors:
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
