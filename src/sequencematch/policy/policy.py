"""A Hugging Face causal language model as a policy p(a|s) over tokens and `<bkspc>` (§4): load, score, save."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sequencematch.core.encoding import Encoding, encode
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.core.objectives import Scores
from sequencematch.policy import storage
from sequencematch.policy.attention import refuse_what_cannot_delete, row_mask
from sequencematch.policy.backspace import Backspace
from sequencematch.policy.export import export
from sequencematch.policy.generation import Generation, Prompt, Sampling, generate, stream
from sequencematch.policy.graphs import Spare
from sequencematch.policy.head import Unembedding, action_logits_and_values
from sequencematch.policy.rollback import Chosen, scale_and_cap
from sequencematch.policy.sharding import is_sharded
from sequencematch.policy.spine import SPINE

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


#: On a GPU attention over shorter rows takes less time than being told of two parts of it.
GPU_ROW = 512


class Policy(nn.Module):
    """p(a|s) from a causal language model, a `<bkspc>` row and an offset head   (§4, §6)."""

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        backspace: Backspace | None = None,
    ) -> None:
        """Put a row and an offset head, new ones unless given, beside a loaded model, and probe that it can delete."""
        super().__init__()
        if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
            raise ValueError(
                "`peft_config` must not add virtual tokens: they have no place on the stack. Use LoRA or the like."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.spare = Spare()
        refuse_what_cannot_delete(self.base)
        _keep_differentiable(self.base)
        weight = self.unembedding().weight
        pad = tokenizer.pad_token_id if tokenizer is not None else self.base.config.pad_token_id
        self.space = ActionSpace(
            len(weight),
            eos=eos_token(self.base, tokenizer),
            bos=_bos(self.base, tokenizer),
            pad=pad if pad is not None and 0 <= pad < len(weight) else None,
        )
        if backspace is None:
            backspace = Backspace(weight.shape[1], self.max_positions)
            row = self.folded_row
            backspace.reset_row(weight if row is None else self._output_layer().weight[row : row + 1])
        self.backspace = backspace.to(weight.device)
        _probe_and_settle(self)

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
        """A policy from a hub id, a local folder, one saved by `save_pretrained` or `export`, a GGUF file, or a model object.

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

    @property
    def base(self) -> PreTrainedModel:
        """The Hugging Face model itself, out of its adapter if it wears one."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.base.get_input_embeddings().weight.device

    @property
    def reorders_from(self) -> int:
        """How many nodes a row must have for what survives in it to be put in front."""
        return GPU_ROW if self.device.type == "cuda" else 0

    @property
    def max_positions(self) -> int:
        """The context length: the deepest stack the model has positions for."""
        config = self.base.config
        return int(
            getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2**31 - 1
        )

    @property
    def folded_row(self) -> int | None:
        """Which row of its output layer an exported model deletes with; no text has that id, nor those behind it."""
        return getattr(self.base.config, "bkspc_token_id", None)

    def unembedding(self) -> Unembedding:
        """The rows of the model's tokens in its output layer, with its scale and cap, as they are now."""
        layer = self._output_layer()
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if self.folded_row is not None:
            weight, bias = weight[: self.folded_row], None if bias is None else bias[: self.folded_row]
        return Unembedding(weight, bias, *scale_and_cap(self.base.config))

    def _output_layer(self) -> Any:
        layer = self.base.get_output_embeddings()
        if hasattr(layer, "modules_to_save"):  # PEFT trains a copy of the layer
            layer = layer.modules_to_save[layer.active_adapters[0]]
        elif hasattr(layer, "base_layer"):
            raise ValueError(
                "`peft_config` must leave the output layer alone: its rows are read directly, without an adapter. "
                "Take it out of `target_modules`, or train it whole with `modules_to_save`."
            )
        if layer is None or not hasattr(layer, "weight"):
            raise ValueError(
                f"`model` must be a causal language model with an output layer to put a <bkspc> row beside. "
                f"Got {type(self.base).__name__}; load it with AutoModelForCausalLM."
            )
        if not layer.weight.is_floating_point() or hasattr(layer, "quant_state"):
            raise ValueError(
                f"`quantization_config` must leave the output layer alone: its rows are read directly. Got a "
                f"{type(layer).__name__}; name the layer in `llm_int8_skip_modules`, or leave that out."
            )
        return layer

    def hidden_states(
        self, tokens: Int[Tensor, "row node"], attention_mask: Any, position_ids: Tensor, **options: Any
    ) -> Any:
        """The backbone's output: `last_hidden_state`, and its cache if it was given one."""
        return self.base.base_model(
            input_ids=tokens, attention_mask=attention_mask, position_ids=position_ids, return_dict=True, **options
        )

    def encoded_hidden_states(
        self, encoding: Encoding, node: Int[Tensor, "*nodes"], *, reorders_from: int | None = None
    ) -> Float[Tensor, "*nodes hidden"]:
        """One pass over encoded rows, each node seeing the live nodes below it   (Alg. A).

        Returns the vectors of some nodes, by their places on the flattened [row × node] axis.
        """
        tokens, positions = encoding.tokens, encoding.position_ids
        reorders = tokens.shape[1] >= (self.reorders_from if reorders_from is None else reorders_from)
        mask, order = row_mask(self.base.config, encoding.deleted_at, positions, self.base.dtype, reorders=reorders)
        if order is not None:
            tokens, positions = tokens.gather(1, order), positions.gather(1, order)
            width = tokens.shape[1]
            node = node // width * width + order.argsort(1).flatten()[node]
        return self.hidden_states(tokens, mask, positions, use_cache=False).last_hidden_state.flatten(0, 1)[node]

    def action_logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch action"]:
        """All logits of states, the last column being `<bkspc>`; without the offset, which moves no probability."""
        unembedding = self.unembedding()
        bkspc = unembedding.transform(self.backspace.raw_logit(hidden))
        return torch.cat([unembedding.logits(hidden), bkspc[..., None]], dim=-1)

    def forward(
        self, encoding: Encoding, *, backspace: bool = True, context: bool = False
    ) -> Scores | tuple[Scores, Float[Tensor, "batch step node"]]:
        """ℓ(a_t|s_t) and V(s_t) of every visit   (Eq. 4).

        With `backspace=False` V sums over the vocabulary alone, as maximum likelihood needs it; then no action may be
        `<bkspc>`. With `context=True` also log p(x_j|s_t) of every token x_j of the row, as unlikelihood needs it; then there
        must be one trajectory a row.
        """
        # Only nodes that are some trajectory's state need a value: not the inside of a prompt.
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
        if not context:
            return scores
        return scores, _context_logits(hidden[deciding], unembedding, encoding.tokens) - value[deciding][..., None]

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, batch_size: int = 64, progress: bool = False, **sampling: Any
    ) -> Generation:
        """Roll out from one prompt or many, text or token ids; `sampling` holds the fields of `Sampling`   (§4.1)."""
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = [prompts] if is_one else prompts
        return generate(
            self, cast(Sequence[Prompt], many), Sampling(**sampling), batch_size=batch_size, progress=progress
        )

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[Chosen]:
        """Roll out from one prompt, yielding every action as it happens."""
        return stream(self, prompt, Sampling(**sampling))

    def export(self, folder: str | Path, *, replace: bool = False) -> None:
        """Write a plain Hugging Face checkpoint that backtracks by itself, without this library.

        An earlier export in the folder is replaced, anything else only with `replace`.
        """
        export(self, Path(folder), replace=replace)

    def gradient_checkpointing_enable(self, *args: Any, **options: Any) -> None:
        """Compute activations again in the backward pass instead of keeping them."""
        self.model.gradient_checkpointing_enable(*args, **options)

    @property
    def quantization_method(self) -> Any:
        """How the base model's weights are quantised, or None; such a model stays where it is."""
        return getattr(self.base, "quantization_method", None)

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether FSDP2 has sharded the weights; by this name `transformers.Trainer` knows not to wrap them once more."""
        return is_sharded(self)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model or its adapter, the tokenizer, the `<bkspc>` row and the offset head; all or nothing."""
        storage.save(self.model, self.tokenizer, self.backspace, Path(folder))


def _context_logits(
    hidden: Float[Tensor, "batch step hidden"], unembedding: Unembedding, tokens: Int[Tensor, "batch node"]
) -> Float[Tensor, "batch step node"]:
    """ℓ(x_j|s_t) of the tokens of a row alone: [step × node] of them instead of [step × vocabulary]."""
    raw = (hidden @ unembedding.weight[tokens].mT.to(hidden.dtype)).to(torch.promote_types(hidden.dtype, torch.float32))
    return unembedding.transform(raw if unembedding.bias is None else raw + unembedding.bias[tokens][:, None])


def eos_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id of `<eos>`, of the tokenizer if there is one."""
    ids = getattr(tokenizer, "eos_token_id", None) if tokenizer is not None else model.config.eos_token_id
    if ids is None:
        raise ValueError(
            "`tokenizer` must have an <eos> token: it is what ends a trajectory. Got none; set `tokenizer.eos_token`."
            if tokenizer is not None
            else "`model.config.eos_token_id` must be set, or a tokenizer with <eos> given: it is what ends a trajectory."
        )
    return ids[0] if isinstance(ids, list) else ids


def _bos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    return tokenizer.bos_token_id if tokenizer is not None else model.config.bos_token_id


def _keep_differentiable(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit layers when they run on a CPU in eval mode: no gradient would pass them again."""
    repacking: list[Any] = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in repacking:
        layer.support_avx512bf16_for_cpu = False
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                "`model` must not have run on the CPU in eval mode: bitsandbytes has rounded and repacked its 4-bit weights, "
                "and no gradient passes them. Load it again, or let `Policy.from_pretrained` load it."
            )


def _probe_and_settle(policy: Policy) -> None:
    """Take the faster attention if the model computes the same with it, else the one that it came with."""
    config = policy.base.config
    if config._attn_implementation == "sdpa" and policy.base._supports_attention_backend:
        config._attn_implementation = SPINE
        with suppress(ValueError):
            _probe(policy)
            return
        config._attn_implementation = "sdpa"
    _probe(policy)


@torch.no_grad()
def _probe(policy: Policy) -> None:
    """Compare one pass over a dozen nodes with deletions to fresh forwards, and refuse a model that would be silently wrong."""
    space, name = policy.space, type(policy.base).__name__
    tokens = torch.randint(0, space.vocab_size, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    a, b, c, d, e, f, g, h, i = (token + (token == space.eos) * (1 if space.eos == 0 else -1) for token in tokens)
    bk = space.bkspc
    trajectory = Trajectory.rollout(space, (a, b, c), (d, e, bk, f, g, bk, bk, bk, bk, h, i, space.eos))
    encoding = encode([trajectory], device=policy.device)
    was_training = policy.model.training
    policy.model.eval()
    try:
        hidden = policy.encoded_hidden_states(encoding, encoding.visit[0], reorders_from=0)
        encoded = policy.action_logits(hidden)[:, :-1]
        fresh = torch.stack(
            [
                policy.model(input_ids=torch.tensor([s.tokens], device=policy.device)).logits[0, -1, : space.vocab_size]
                for s in trajectory.states()
            ]
        ).to(encoded.dtype)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{name} can't be given a mask with deleted tokens left out ({error}), so it can't delete. Use another model."
        ) from error
    finally:
        policy.model.train(was_training)
    # Rounding is at most a few times the dtype's; a mask that is not honoured changes logits in the first or second digit.
    # Quantised layers may compute in another dtype than the model's.
    dtypes = {policy.base.dtype, *(getattr(layer, "compute_dtype", None) for layer in policy.base.modules())} - {None}
    tolerance = 1e-4 if dtypes <= {torch.float32, torch.float64} else 0.05
    error_size = float((encoded - fresh).norm() / fresh.norm())
    if not error_size <= tolerance:
        raise ValueError(
            f"{name} gives other logits when tokens are deleted from its context than when they were never there: relative "
            f"difference {error_size:.1g}, at most {tolerance:g} is rounding. It can't be used as a policy."
        )
