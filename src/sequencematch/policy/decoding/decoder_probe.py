"""A probe of decoding: rows of different lengths push and delete tokens, and must get the logits of fresh forward passes.

Needs torch and transformers alone: `Policy.export` writes this file beside a checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sequencematch.policy.changes import decoding
from sequencematch.policy.decoding.choice import Choice
from sequencematch.policy.decoding.decoder import Decoder, Limits

#: Prompt length and moves of each row: + pushes a token, - deletes one.
_ROWS = ((4, "++-+---++-+"), (2, "+++--++"), (7, "----++-+"))
#: What models raise that can't take a mask, a cache or position ids.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: Models that passed, and with what: attention, dtype, and whether they deleted.
_PASSED: "WeakKeyDictionary[Any, set[Any]]" = WeakKeyDictionary()


@torch.no_grad()
def probe_decoder(model: Any, head: Callable[[Tensor], Tensor], limits: Limits, vocab_size: int) -> None:
    """Refuse a model whose decoding with deletions gives other logits than fresh passes over the same tokens.

    `head` maps hidden vectors to the logits of all actions, the first `vocab_size` of which are tokens.
    """
    bkspc = limits.bkspc
    tried = (model.config._attn_implementation, model.dtype, bkspc is not None)
    if tried in _PASSED.setdefault(model, set()):
        return
    allowed = [token for token in range(min(vocab_size, 4096)) if token not in limits.ends and token != bkspc]
    drawn = torch.randint(len(allowed), (64,), generator=torch.Generator().manual_seed(0)).tolist()
    source = iter(allowed[place] for place in drawn)
    prompts = [[allowed[row], *(next(source) for _ in range(length - 1))] for row, (length, _) in enumerate(_ROWS)]
    moves = {prompt[0]: iter(moves) for prompt, (_, moves) in zip(prompts, _ROWS, strict=True)}
    seen: dict[tuple[int, ...], list[Tensor]] = {}

    def scripted(states: list[list[int]], logits: Tensor) -> Tensor:
        """Record the logits, and leave one action possible: the next of the row's script."""
        forced = torch.full_like(logits, -torch.inf)
        for state, row, into in zip(states, logits, forced, strict=True):
            seen.setdefault(tuple(state), []).append(row[:vocab_size].float())
            move = next((m for m in moves[state[0]] if m == "+" or bkspc is not None), None)
            into[limits.eos if move is None else next(source) if move == "+" else bkspc] = 0
        return forced

    script = Limits(limits.eos, limits.ends, bkspc, 12, 30)
    name = type(model).__name__
    try:
        decoder = Decoder(model, head, script, Choice(True, scripted), slots=len(prompts), longest_prompt=7)
        decoder.fill(range(len(prompts)), range(len(prompts)), prompts, [])
        for _ in decoder.run():
            pass
        fresh = fresh_logits(model, head, list(seen), vocab_size)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{name} can't decode with deletions ({reason}). Use another model.") from error
    found = torch.stack([row for rows in seen.values() for row in rows])
    expected = torch.stack([fresh[state] for state, rows in seen.items() for _ in rows])
    check_equal(name, "when it decodes with deletions", found, expected, tolerance(model))
    _PASSED[model].add(tried)


@torch.no_grad()
def fresh_logits(
    model: Any, head: Callable[[Tensor], Tensor], states: Sequence[tuple[int, ...]], vocab_size: int
) -> dict[tuple[int, ...], Tensor]:
    """The logits of each state from passes without a cache, one for each state that begins no other.

    The head is compared with the model's own logits on the way.
    """
    found: dict[tuple[int, ...], Tensor] = {}
    device = model.get_input_embeddings().weight.device
    longest_first = sorted(states, key=len, reverse=True)
    compiled = [layer for layer in model.modules() if layer._compiled_call_impl is not None]
    with decoding(model, compiled=compiled):
        for whole in longest_first:
            if whole in found:
                continue
            tokens = torch.tensor([whole], device=device)
            hidden = model.base_model(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
            logits = head(hidden[0])[:, :vocab_size].float()
            if not found:
                own = model(input_ids=tokens).logits[0, :, :vocab_size].float()
                # Logits of bfloat16 far from 0 are rounded by more than they differ.
                rounding = torch.finfo(model.dtype).eps * float(own.norm() / centred(own).norm())
                if not _error(logits, own) <= tolerance(model) + rounding:
                    raise ValueError(
                        f"{type(model).__name__} computes its logits by more than its output layer, so a <bkspc> row can't be "
                        f"put beside it. Use another model."
                    )
            found |= {whole[:size]: logits[size - 1] for size in range(1, len(whole) + 1) if whole[:size] not in found}
    return {state: found[state] for state in states}


def centred(logits: Tensor) -> Tensor:
    """Logits less their mean: adding a number to all logits of a state changes no probability."""
    return logits - logits.mean(-1, keepdim=True)


def tolerance(model: Any) -> float:
    """The largest relative error that rounding explains. A mask that is ignored changes the first or second digit."""
    # Quantised layers may compute in another dtype than the model's.
    dtypes = {model.dtype, *(getattr(layer, "compute_dtype", None) for layer in model.modules())} - {None}
    device = model.get_input_embeddings().weight.device.type
    is_precise = device != "cuda" or torch.get_float32_matmul_precision() == "highest"
    is_precise = is_precise and not torch.is_autocast_enabled(device)
    return 1e-4 if is_precise and dtypes <= {torch.float32, torch.float64} else 0.05


def _error(found: Tensor, expected: Tensor) -> float:
    return float((centred(found) - centred(expected)).norm() / centred(expected).norm())


def check_equal(name: str, when: str, found: Tensor, expected: Tensor, allowed: float) -> None:
    """Refuse a model in whose states logits differ from the expected ones by more than a relative error of `allowed`."""
    error = _error(found, expected)
    if not error <= allowed:
        raise ValueError(
            f"{name} has other logits {when} than in a plain forward pass: relative difference {error:.1g}, where rounding "
            f"explains at most {allowed:.1g}. It can't be used as a policy."
        )
