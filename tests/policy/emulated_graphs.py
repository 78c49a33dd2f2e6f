"""CUDA graphs emulated on a CPU: a graph is a step that is done again. All but the capture itself is what runs on a GPU."""

from contextlib import nullcontext

import pytest
from torch import Tensor
from transformers import AttentionInterface

from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.decoding.cuda_graphs import RAGGED, GraphDecoder, _attention
from sequencematch.policy.decoding.decoder import Decoder


class Graph:
    """Does a decoder's step again."""

    def __init__(self, decoder: GraphDecoder) -> None:
        self.decoder, self.head = decoder, decoder.head

    def replay(self) -> None:
        self.decoder.head = self.head  # an idle decoder has let go of it
        self.decoder._step()


def captured(decoder: GraphDecoder) -> Graph:
    """After the two steps that warm up."""
    for _ in range(2):
        decoder._step()
    return Graph(decoder)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies on a CPU decode by replaying steps, with our kernels."""
    AttentionInterface.register(RAGGED, _attention)
    monkeypatch.setattr("sequencematch.policy.generation.can_capture", lambda *_: True)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    monkeypatch.setattr(GraphDecoder, "_captured", captured)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions for a CPU do what the kernels do."""
    own = GraphDecoder._attend

    def attend(decoder: GraphDecoder, tokens: Tensor, column: Tensor) -> Tensor:
        """Passes of a graph are counted when it is replayed."""
        if decoder.is_uncaptured:
            return own(decoder, tokens, column)
        counted = decoder.forwards
        hidden = Decoder._attend(decoder, tokens, column)
        decoder.forwards = counted
        return hidden

    monkeypatch.setattr(GraphDecoder, "cache_type", StackCache)
    monkeypatch.setattr(GraphDecoder, "_attend", attend)
    for name in ("_search", "_remember"):
        monkeypatch.setattr(GraphDecoder, name, getattr(Decoder, name))
