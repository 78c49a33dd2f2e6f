"""Decoding on a GPU without the host: a whole step captured as a CUDA graph and replayed."""

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from sequencematch.policy.fusing import fused, fusions
from sequencematch.policy.rollback import Rollback, StackCache, decoding, windows
from sequencematch.policy.spine import SPINE

if TYPE_CHECKING:
    from sequencematch.policy.policy import Policy

#: How often a row may choose before the others wait no longer: one that deletes chooses again without a forward pass.
ROUNDS = 2
#: Steps between two looks at which rows have ended.
STEPS = 8
#: What transformers calls our attention by.
IMPLEMENTATION = "sequencematch_prefix"
#: How many bytes decoders may take that are kept for the next time.
KEPT_BYTES = 2**31


def _attention(
    module: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers. Its mask is the column of each row's new token, as wide as the window, or 1."""
    from sequencematch.policy.prefix_attention import prefix_attention

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_mask.shape[-1] if attention_mask.shape[-1] > 1 else None
    seen = prefix_attention(query.to(key.dtype), key, value, attention_mask[:, 0, 0, 0], scale, window)
    return seen.transpose(1, 2), None


def can_replay(policy: "Policy") -> bool:
    """Whether a step of this policy on its device can be captured, and its attention done by our kernel.

    What is not known to fail is tried: a step that can't be captured is run as it is.
    """
    model, config = policy.base, policy.base.config
    is_ours = config._attn_implementation in ("sdpa", SPINE, "flex_attention") and model._supports_attention_backend
    # Gemma 2 caps its scores, gpt-oss has sinks, DeepSeek has values of another size than keys.
    is_plain = model._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    has_one_dim = getattr(config, "v_head_dim", None) in (None, getattr(config, "qk_head_dim", None))
    # Some rotary embeddings look at positions from the host.
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    # A hook would run while a step is captured, and then never again; PEFT's, at the bottom of the model, does nothing here.
    hooked = [
        m
        for m in model.modules()
        if (m._forward_hooks or m._forward_pre_hooks) and m is not model.get_input_embeddings()
    ]
    return (
        policy.device.type == "cuda"
        and {parameter.device for parameter in policy.parameters()} == {policy.device}
        and importlib.util.find_spec("triton") is not None
        and is_ours
        and is_plain
        and has_one_dim
        and not kinds & {"dynamic", "longrope"}
        and not hooked
    )


class KernelCache(StackCache):
    """`StackCache` with one kernel for what a step writes in a layer."""

    has_kernel = True

    def write(self, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Put one token of each row at its column."""
        if not self.has_kernel:
            super().write(stored, new)
            return
        from sequencematch.policy.prefix_attention import write_columns

        write_columns(*stored, *new, self.column)


class Replayed(Rollback):
    """`Rollback` with its step captured. Rows that end early wait for the next look; nothing else is different."""

    cache_type = KernelCache
    cache: KernelCache
    graph: torch.cuda.CUDAGraph | None = None
    is_plain = False  # where a step could not be captured
    due: Mapping[int, int] = MappingProxyType({})  # slot → steps until its row has ended if it deletes nothing

    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows in free slots; before the first, capture the step."""
        with torch.cuda.device(self.device):
            if self.graph is None and not self.is_plain:
                super().fill(slots[:1], rows[:1], [prompts[0][:1]], uniform[:1])  # takes the memory
                self.clear()
                self._try_to_capture()
            super().fill(slots, rows, prompts, uniform)
        limit = min(self.limits.max_new_tokens + 1, self.limits.max_actions)
        self.due = {**self.due, **dict.fromkeys(slots, limit)}

    def advance(self) -> None:
        """Some steps, without waiting for the device."""
        with torch.cuda.device(self.device):
            if self.graph is None:
                super().advance()
                return
            steps = self._steps()
            for _ in range(steps):
                self.graph.replay()
        self.forwards += steps
        self.due = {slot: due - steps for slot, due in self.due.items()}

    def _steps(self) -> int:
        """Until the next look: fewer where every row is about to reach its limit."""
        due = (left for slot, left in self.due.items() if self.numbers[slot] is not None)
        return min(STEPS, max((left if left > 0 else STEPS for left in due), default=STEPS))

    def clear(self) -> None:
        """Forget all rows: someone may have stopped asking for them."""
        self.due = {}
        self.is_running.fill_(False)
        self.has_pushed.fill_(False)
        self.numbers, self.forwards = [None] * len(self.numbers), 0

    def cache_bytes(self) -> int:
        """What keys and values, hidden vectors and records take."""
        stored = [tensor for layer in self.cache.stored.values() for tensor in layer]
        return sum(t.nbytes for t in (*stored, self.hidden, self.uniform, self.chosen, self.log_probs, self.values))

    def drop_ended(self) -> None:
        """The graph's shapes are fixed; an ended row reads one column, and the weights are read for all."""

    def _try_to_capture(self) -> None:
        try:
            with fused(fusions(self.model)):
                self.graph = self._captured()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(
                f"A decoding step of {type(self.model).__name__} can't be captured and is run as it is, several times "
                f"slower ({type(error).__name__}: {str(error)[:200]}).",
                stacklevel=2,
            )
            self.is_plain, self.cache.has_kernel = True, False

    def _captured(self) -> torch.cuda.CUDAGraph:
        AttentionInterface.register(IMPLEMENTATION, _attention)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # what is compiled, planned or allocated at first use
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        for _ in range(ROUNDS):
            self.act(self.slot)
        self.push()

    def _attend(self, tokens: Tensor, column: Tensor) -> Tensor:
        """As of `Rollback`, over the whole cache: the kernel reads no further than each row's column."""
        if self.is_plain:
            return super()._attend(tokens, column)
        self.cache.point(self.slot, column, self.depth + 1)
        masks = {
            kind: column[:, None, None, None].expand(-1, 1, 1, window or 1)
            for kind, window in windows(self.config).items()
        }
        with decoding(self.model, IMPLEMENTATION, self.compiled):
            return self.backbone(tokens, masks.get("all", masks), column[:, None])


class Spare:
    """A policy's decoders between two uses. They stay behind when the policy is copied or pickled."""

    def __init__(self) -> None:
        """None yet."""
        self.kept: list[tuple[Any, Replayed]] = []  # the latest is the last

    def __reduce__(self) -> tuple[type["Spare"], tuple[()]]:
        """A copy starts empty."""
        return Spare, ()

    def take(self, key: Any, make: Callable[[], Replayed]) -> Replayed:
        """The decoder that was kept for the same `key`, or a new one."""
        for place, (known, decoder) in enumerate(self.kept):
            if known == key:
                del self.kept[place]
                return decoder
        return make()

    def keep(self, key: Any, decoder: Replayed) -> None:
        """Keep a captured decoder for the next time, and as many earlier ones as there is room for."""
        if decoder.graph is None:
            return
        decoder.clear()
        decoder.head = None  # type: ignore[assignment]  # the graph has it; it would hold on to the policy
        self.kept.append((key, decoder))
        while sum(kept.cache_bytes() for _, kept in self.kept) > KEPT_BYTES:
            del self.kept[0]


def addresses(policy: "Policy") -> Any:
    """What a captured graph depends on: where weights lie, which adapters take part and how much, which action is which."""
    layers: list[Any] = [layer for layer in policy.modules() if hasattr(layer, "merged_adapters")]
    adapters = [
        (list(x.merged_adapters), x.disable_adapters, list(x.active_adapters), dict(getattr(x, "scaling", {})))
        for x in layers
    ]
    tensors = (*policy.parameters(), *policy.buffers())
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors], adapters, vars(policy.space)
