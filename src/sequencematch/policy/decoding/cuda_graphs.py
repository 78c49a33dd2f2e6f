"""Decoding on a GPU without the host: a whole step is captured as a CUDA graph and replayed."""

import importlib.util
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface

from sequencematch.policy.attention import windows
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.changes import decoding, lock_of
from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.decoding.decoder import Decoder
from sequencematch.policy.fusing import fused, fusions

#: Choices a row may make in one step: a row that deletes chooses again without a forward pass.
ROUNDS = 2
#: Steps between two checks for ended rows.
STEPS = 8
#: The name of the ragged attention kernel in transformers.
RAGGED = "sequencematch_ragged"
#: The most bytes that the idle decoders of a pool may hold.
POOL_BYTES = 2**31


def _attention(
    module: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers. The mask holds the column of each row's new token; the mask's width is the window, or 1."""
    from sequencematch.policy.decoding.ragged_attention import ragged_attention

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_mask.shape[-1] if attention_mask.shape[-1] > 1 else None
    seen = ragged_attention(query.to(key.dtype), key, value, attention_mask[:, 0, 0, 0], scale, window)
    return seen.transpose(1, 2), None


def can_capture(policy: Module, model: Any) -> bool:
    """Whether to try to capture a decoding step of a policy's model, with attention by our kernel.

    False where capturing is known to fail. If a capture fails anyway, the step runs uncaptured.
    """
    return why_not_captured(policy, model) is None


def why_not_captured(policy: Module, model: Any) -> str | None:
    """What keeps a decoding step from being captured, as a clause; None if nothing is known to."""
    device = model.get_input_embeddings().weight.device
    if device.type != "cuda":
        return f"the model is on {device.type}, not on a CUDA GPU"
    if {parameter.device for parameter in policy.parameters()} != {device}:
        return "the model is spread over several devices"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    return why_not_as_it_is(model)


def why_not_as_it_is(model: Any) -> str | None:
    """What in a model would keep its step from being captured on any GPU, as a clause."""
    config = model.config
    is_ours = config._attn_implementation in ("sdpa", CAUSAL_PREFIX, "flex_attention")
    if not (is_ours and model._supports_attention_backend):
        return f"attention is {config._attn_implementation!r}"
    # Gemma 2 caps its scores, gpt-oss has sinks, DeepSeek has values of another size than keys.
    is_plain = model._supports_sdpa and not getattr(config, "attn_logit_softcapping", None)
    has_one_dim = getattr(config, "v_head_dim", None) in (None, getattr(config, "qk_head_dim", None))
    if not (is_plain and has_one_dim):
        return "the model's attention is more than softmax(qk)v"
    # These rotary embeddings read positions on the host.
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if on_host := kinds & {"dynamic", "longrope"}:
        return f"rotary embeddings of type {min(on_host)} read positions on the host"
    # A hook would run at capture and never again. PEFT's hook on the input embeddings does nothing here.
    embeddings = model.get_input_embeddings()
    if any((m._forward_hooks or m._forward_pre_hooks) and m is not embeddings for m in model.modules()):
        return "the model has forward hooks, which a graph would not call"
    return None


class KernelCache(StackCache):
    """`StackCache` that writes a layer's keys and values with one kernel."""

    has_kernel = True

    def write(self, stored: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Write one token of each row at its column."""
        if not self.has_kernel:
            super().write(stored, new)
            return
        from sequencematch.policy.decoding.ragged_attention import write_columns

        write_columns(*stored, *new, self.column)


class GraphDecoder(Decoder):
    """`Decoder` whose step is a CUDA graph. Rows that end early wait for the next check; results are the same."""

    cache_type = KernelCache
    cache: KernelCache
    graph: torch.cuda.CUDAGraph | None = None
    is_uncaptured = False  # the step could not be captured
    due: Mapping[int, int] = MappingProxyType({})  # slot → steps until its row ends if it deletes nothing

    def fill(
        self, slots: Sequence[int], rows: Sequence[int], prompts: Sequence[Sequence[int]], uniform: Sequence[Tensor]
    ) -> None:
        """Start rows in free slots; capture the step before the first."""
        with torch.cuda.device(self.device), lock_of(self.model):
            if self.graph is None and not self.is_uncaptured:
                super().fill(slots[:1], rows[:1], [prompts[0][:1]], uniform[:1])  # allocates the memory
                self.clear()
                self._try_to_capture()
            super().fill(slots, rows, prompts, uniform)
        limit = min(self.limits.max_new_tokens + 1, self.limits.max_actions)
        self.due = {**self.due, **dict.fromkeys(slots, limit)}

    def advance(self) -> None:
        """Enqueue some steps without waiting for the device."""
        with torch.cuda.device(self.device), lock_of(self.model):
            if self.graph is None:
                super().advance()
                return
            steps = self._steps()
            for _ in range(steps):
                self.graph.replay()
        self._count(steps)

    def _count(self, steps: int) -> None:
        self.forwards += steps
        self.due = {slot: left - steps for slot, left in self.due.items()}

    def _left(self) -> list[int]:
        """Of each row, the steps until it ends if it deletes nothing."""
        return [left for slot, left in self.due.items() if self.numbers[slot] is not None]

    def _steps(self) -> int:
        """Steps until the next check: fewer where every row is about to reach its limit."""
        return min(STEPS, max((left if left > 0 else STEPS for left in self._left()), default=STEPS))

    def clear(self) -> None:
        """Free all slots, also of rows whose caller has stopped early."""
        self.due = {}
        self.is_running.fill_(False)
        self.has_pushed.fill_(False)
        self.numbers, self.forwards = [None] * len(self.numbers), 0

    def cache_bytes(self) -> int:
        """Bytes of keys, values, hidden vectors and records."""
        stored = [tensor for layer in self.cache.stored.values() for tensor in layer]
        stored += [] if self.deleted is None else [self.deleted.tokens]
        return sum(t.nbytes for t in (*stored, self.hidden, self.uniform, self.chosen, self.log_probs, self.values))

    def drop_ended(self) -> None:
        """Do nothing: the graph's shapes are fixed, and an ended row costs one column."""

    def _try_to_capture(self) -> None:
        try:
            with fused(fusions(self.model)):
                self.graph = self._captured()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warnings.warn(
                f"A decoding step of {type(self.model).__name__} can't be captured as a CUDA graph. It runs without "
                f"one, several times slower ({type(error).__name__}: {str(error)[:200]}).",
                stacklevel=2,
            )
            self.is_uncaptured, self.cache.has_kernel = True, False

    def _captured(self) -> torch.cuda.CUDAGraph:
        AttentionInterface.register(RAGGED, _attention)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled and memory allocated at first use
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate
            self._step()
        return graph

    def _step(self) -> None:
        for _ in range(ROUNDS):
            self.act(self.slot)
        self.push()

    def _attend(self, tokens: Tensor, column: Tensor) -> Tensor:
        """As `Decoder` does, over the whole cache: the kernel reads no further than each row's column."""
        if self.is_uncaptured:
            return super()._attend(tokens, column)
        self.cache.point(self.slot, column, self.depth + 1)
        masks = {
            kind: column[:, None, None, None].expand(-1, 1, 1, window or 1)
            for kind, window in windows(self.config).items()
        }
        with decoding(self.model, RAGGED, self.compiled):
            return self.backbone(tokens, masks.get("all", masks), column[:, None])

    def _search(self, logits: Tensor, min_p: float | Tensor, slot: Tensor, acts: Tensor) -> Tensor:
        if self.is_uncaptured or isinstance(min_p, Tensor):  # the kernel has one `min_p` for all rows
            return super()._search(logits, min_p, slot, acts)
        from sequencematch.policy.decoding.search_kernels import keep_open

        limits = self.limits
        assert self.deleted is not None
        assert limits.bkspc is not None
        return keep_open(
            logits,
            self.deleted,
            self.size,
            self.prompt,
            self.floor,
            self.taken,
            acts,
            min_p=min_p,
            bkspc=limits.bkspc,
            ends=self.all_ends,
            eos=limits.eos,
            max_new_tokens=limits.max_new_tokens,
            max_actions=limits.max_actions,
        )

    def _remember(self, slot: Tensor, stays: Tensor | None, pops: Tensor, pushes: Tensor) -> None:
        if self.is_uncaptured or stays is None:
            super()._remember(slot, stays, pops, pushes)
            return
        from sequencematch.policy.decoding.search_kernels import remember

        assert self.deleted is not None
        remember(self.deleted, self.floor, self.tokens, self.size, stays, pops, pushes)


class DecoderPool:
    """A policy's idle captured decoders, the latest used last. A copied or pickled policy starts with an empty pool."""

    def __init__(self) -> None:
        """An empty pool."""
        self.idle: list[tuple[Any, GraphDecoder]] = []
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type["DecoderPool"], tuple[()]]:
        """A copy starts empty."""
        return DecoderPool, ()

    def take(self, key: Any, make: Callable[[], GraphDecoder]) -> GraphDecoder:
        """An idle decoder of the same `key`, or a new one."""
        with self.lock:
            for place, (known, decoder) in enumerate(self.idle):
                if known == key:
                    del self.idle[place]
                    return decoder
        return make()

    def put_back(self, key: Any, decoder: GraphDecoder) -> None:
        """Keep a captured decoder for the next call. Beyond `POOL_BYTES` the least recently used decoders are dropped."""
        if decoder.graph is None:
            return
        decoder.clear()
        decoder.head = None  # type: ignore[assignment]  # captured in the graph; it would keep the policy alive
        with self.lock:
            self.idle.append((key, decoder))
            while sum(idle.cache_bytes() for _, idle in self.idle) > POOL_BYTES:
                del self.idle[0]


def addresses(policy: Module) -> Any:
    """A key of everything that a captured graph depends on: addresses of weights, active adapters and their scaling."""
    layers: list[Any] = [layer for layer in policy.modules() if hasattr(layer, "merged_adapters")]
    adapters = [
        (list(x.merged_adapters), x.disable_adapters, list(x.active_adapters), dict(getattr(x, "scaling", {})))
        for x in layers
    ]
    tensors = (*policy.parameters(), *policy.buffers())
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors], adapters
