"""Scoring with a causal language model: action logits ℓ(a|s) and values V(s) of encoded rows (§4, Eq. 4)."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sequencematch.core import ActionSpace, Encoding, Scores
from sequencematch.core.transitions import Transitions
from sequencematch.policy import modes
from sequencematch.policy.adapters import output_weight, without_trained_rows
from sequencematch.policy.attention import max_positions, refuse_what_cannot_delete
from sequencematch.policy.backspace import Backspace
from sequencematch.policy.changes import lock_of
from sequencematch.policy.decoding.choice import logit_scale_and_cap
from sequencematch.policy.decoding.cuda_graphs import DecoderPool
from sequencematch.policy.ends import eos_token, listed_ends
from sequencematch.policy.fusing import Fusion
from sequencematch.policy.fusing import fusions as find_fusions
from sequencematch.policy.head import Unembedding, action_logits_and_values
from sequencematch.policy.landscape import Landscape, landscape
from sequencematch.policy.masks import row_mask

if TYPE_CHECKING:
    from peft import PeftModel


#: Below this row length, splitting attention costs more on a GPU than it saves.
MIN_GPU_ROW_TO_REORDER = 512


class Scorer(nn.Module):
    """A causal language model with a `<bkspc>` row and an offset head: ℓ(a|s) and V(s)   (§4, §6)."""

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        backspace: Backspace | None = None,
    ) -> None:
        """Add a `<bkspc>` row and an offset head to a loaded model: `backspace`, or new ones."""
        super().__init__()
        if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
            raise ValueError(
                "`peft_config` must not add virtual tokens: they have no place on the stack. Use LoRA or the like."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.decoders = DecoderPool()
        refuse_what_cannot_delete(self.base)
        _keep_differentiable(self.base)
        weight = self.unembedding().weight
        named = self.base.config if tokenizer is None else tokenizer
        bos, pad = (getattr(named, f"{name}_token_id", None) for name in ("bos", "pad"))
        self.space = ActionSpace(
            len(weight),
            eos=eos_token(self.base, tokenizer),
            bos=bos,
            pad=pad if pad is not None and 0 <= pad < len(weight) else None,
            ends=frozenset(end for end in listed_ends(self.base.generation_config) if 0 <= end < len(weight)),
        )
        if backspace is None:
            backspace = Backspace(weight.shape[1], self.max_positions)
            row = self.folded_row
            backspace.reset_row(weight if row is None else self._output_layer().weight[row : row + 1])
        self.backspace = backspace.to(weight.device)

    @property
    def base(self) -> PreTrainedModel:
        """The Hugging Face model itself, without a PEFT wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.base.get_input_embeddings().weight.device

    @property
    def reorders_from(self) -> int:
        """The shortest row whose causal prefix is moved to the front."""
        return MIN_GPU_ROW_TO_REORDER if self.device.type == "cuda" else 0

    @property
    def max_positions(self) -> int:
        """The context length: the deepest stack the model has positions for."""
        return max_positions(self.base.config)

    @property
    def folded_row(self) -> int | None:
        """The row of an exported model's output layer that stands for `<bkspc>`: it and later rows are not tokens."""
        return getattr(self.base.config, "bkspc_token_id", None)

    def unembedding(self) -> Unembedding:
        """The output layer's current rows of tokens, with the model's logit scale and cap."""
        layer = self._output_layer()
        weight, bias = output_weight(layer), getattr(layer, "bias", None)
        if self.folded_row is not None:
            weight, bias = weight[: self.folded_row], None if bias is None else bias[: self.folded_row]
        return Unembedding(weight, bias, *logit_scale_and_cap(self.base.config))

    def _output_layer(self) -> Any:
        layer = self.base.get_output_embeddings()
        if hasattr(layer, "modules_to_save"):  # PEFT trains a copy of the layer
            layer = layer.modules_to_save[layer.active_adapters[0]]
        elif hasattr(layer, "base_layer"):
            raise ValueError(
                "`peft_config` must leave the output layer alone: its rows are read directly, without an adapter. "
                "Take it out of `target_modules`, or train it whole with `modules_to_save`."
            )
        plain = without_trained_rows(layer)
        if plain is None or not hasattr(plain, "weight"):
            raise ValueError(
                f"`model` must be a causal language model with an output layer to put a <bkspc> row beside. "
                f"Got {type(self.base).__name__}; load it with AutoModelForCausalLM."
            )
        if not plain.weight.is_floating_point() or hasattr(plain, "quant_state"):
            raise ValueError(
                f"`quantization_config` must leave the output layer alone: its rows are read directly. Got a "
                f"{type(plain).__name__}; name the layer in `llm_int8_skip_modules`, or don't set that option."
            )
        return layer

    def hidden_states(
        self, tokens: Int[Tensor, "row node"], attention_mask: Any, position_ids: Tensor, **options: Any
    ) -> Any:
        """The backbone's output: `last_hidden_state`, and the cache if one was given."""
        with lock_of(self.base):
            return self.base.base_model(
                input_ids=tokens, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **options
            )

    def encoded_hidden_states(
        self, encoding: Encoding, node: Int[Tensor, "*nodes"], *, reorders_from: int | None = None
    ) -> Float[Tensor, "*nodes hidden"]:
        """Hidden vectors of `node`, indices into the flattened [row × node] axis: one pass over encoded rows   (Alg. A).

        Each node attends to the live nodes below it. Rows of `reorders_from` nodes or more are reordered, causal prefix first.
        """
        tokens, positions = encoding.tokens, encoding.position_ids
        reorder = tokens.shape[1] >= (self.reorders_from if reorders_from is None else reorders_from)
        with lock_of(self.base):  # a decoding thread changes the attention implementation
            mask, order = row_mask(self.base.config, encoding.deleted_at, positions, self.base.dtype, reorder=reorder)
            if order is not None:
                tokens, positions = tokens.gather(1, order), positions.gather(1, order)
                width = tokens.shape[1]
                node = node // width * width + order.argsort(1).flatten()[node]
            return self.hidden_states(tokens, mask, positions, use_cache=False).last_hidden_state.flatten(0, 1)[node]

    def action_logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch action"]:
        """All logits of states, `<bkspc>` in the last column; without the offset, which changes no probability."""
        unembedding = self.unembedding()
        bkspc = unembedding.transform(self.backspace.raw_logit(hidden))
        return torch.cat([unembedding.logits(hidden), bkspc[..., None]], dim=-1)

    def forward(
        self,
        encoding: Encoding,
        *,
        backspace: bool = True,
        context: bool = False,
        transitions: Transitions | None = None,
    ) -> Scores | tuple[Scores, Float[Tensor, "batch step node"]] | tuple[Scores, Landscape]:
        """ℓ(a_t|s_t) and V(s_t) of every visit   (Eq. 4).

        `backspace=False` is for maximum likelihood: V sums over the vocabulary alone, and no action may be `<bkspc>`.
        `context=True` is for unlikelihood: also returns log p(x_j|s_t) of every token x_j of the row, and needs one trajectory
        per row. `transitions` are for an integral metric: also returns their features and slopes of the reward.
        """
        # Only states need a value: the inside of a prompt doesn't.
        node, visit = encoding.visit.unique(return_inverse=True)
        hidden = self.encoded_hidden_states(encoding, node)
        is_bkspc = encoding.chosen == self.space.bkspc
        deciding = visit[:, :-1]
        unembedding = self.unembedding()
        logit, value = action_logits_and_values(
            hidden, unembedding, deciding.flatten(), encoding.chosen.masked_fill(is_bkspc, 0).flatten()
        )
        action_logit = logit.view_as(deciding)
        if backspace:
            bkspc = unembedding.transform(self.backspace.raw_logit(hidden))
            value = torch.logaddexp(value, bkspc)
            action_logit = torch.where(is_bkspc, bkspc[deciding], action_logit)
        offset = self.backspace.offset(hidden, encoding.position_ids.flatten()[node])
        scores = Scores(
            action_logit + offset[deciding], (value + offset)[visit], encoding.length, encoding.policy_chosen
        )
        if transitions is not None:
            positions, offset_of = encoding.position_ids.flatten()[node], self.backspace.offset
            return scores, landscape(
                hidden, visit, positions, transitions, action_logits=self.action_logits, offset=offset_of
            )
        if not context:
            return scores
        return scores, _context_logits(hidden[deciding], unembedding, encoding.tokens) - value[deciding][..., None]

    def for_scoring(self) -> AbstractContextManager[None]:
        """`with policy.for_scoring():` evaluation mode, sharded weights gathered, compiled layers uncompiled."""
        return modes.scoring(self, self.base)

    def for_rollouts(self) -> AbstractContextManager[None]:
        """`with policy.for_rollouts():` as for scoring, with LoRA adapters merged. Other threads wait until it ends."""
        return modes.rollouts(self, self.base)

    def for_training(
        self, fusions: Sequence[Fusion] | None = None, *, autocast: bool = False
    ) -> AbstractContextManager[None]:
        """`with policy.for_training():` train mode with fused kernels. Other threads wait until it ends.

        `fusions` are by default all that fit the model; finding them takes a moment. Set `autocast` where the forward pass
        runs under autocast: PEFT's input casts are then off.
        """
        return modes.training(
            self, self.base, find_fusions(self.base) if fusions is None else fusions, autocast=autocast
        )

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        self.model.gradient_checkpointing_enable(*args, **options)

    @property
    def quantization_method(self) -> Any:
        """How the base model's weights are quantised, or None. `transformers.Trainer` doesn't move a quantised model."""
        return getattr(self.base, "quantization_method", None)

    @property
    def _no_split_modules(self) -> Any:
        """The classes of the model's layers. Accelerate reads this name: FSDP2 then gathers one layer at a time."""
        return self.base._no_split_modules


def _context_logits(
    hidden: Float[Tensor, "batch step hidden"], unembedding: Unembedding, tokens: Int[Tensor, "batch node"]
) -> Float[Tensor, "batch step node"]:
    """ℓ(x_j|s_t) of the row's own tokens: [step, node] logits instead of [step, vocabulary]."""
    raw = (hidden @ unembedding.weight[tokens].mT.to(hidden.dtype)).to(torch.promote_types(hidden.dtype, torch.float32))
    return unembedding.transform(raw if unembedding.bias is None else raw + unembedding.bias[tokens][:, None])


def _keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit layers on a CPU in evaluation mode: no gradient passes a repacked layer."""
    repacking: list[Any] = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in repacking:
        layer.support_avx512bf16_for_cpu = False
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                "`model` must not have run on the CPU in eval mode: bitsandbytes has rounded and repacked its 4-bit weights, "
                "and no gradient passes them. Load it again, or let `Policy.from_pretrained` load it."
            )
