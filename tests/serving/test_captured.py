"""The engine on captured steps, emulated on a CPU: a graph is a step that does what it did when it was captured.

It checks all but the kernels and the capture itself: steps over all slots, two rounds in each, a graph for each combination of
features, warm-up steps in the middle of rows, and reading one chunk of steps late.
"""

from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor

from sequencematch.policy import Sampling
from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.decoding.decoder import Decoder
from sequencematch.policy.decoding.slot_graphs import SERVED_STEPS, GraphSlotDecoder
from sequencematch.policy.decoding.slots import RING, SlotDecoder, Uses
from sequencematch.serving.engine import Engine
from sequencematch.serving.jobs import Job
from tests.serving.rows import VOCAB, Collected, policy, submit
from tests.serving.test_engine import LONG, alone, random_rows


class FakeGraph:
    """Replays a step with the features that it was captured with."""

    def __init__(self, decoder: "Emulated") -> None:
        self.decoder, self.uses, self.replays = decoder, decoder.uses, 0

    def replay(self) -> None:
        held, self.decoder.uses = self.decoder.uses, self.uses
        self.decoder._step()
        self.decoder.uses = held
        self.replays += 1


class Emulated(GraphSlotDecoder):
    """Without kernels, and with graphs that are none."""

    cache_type = StackCache

    def _try_to_capture(self) -> None:
        for _ in range(2):
            self._step()
        self.graph = FakeGraph(self)  # type: ignore[assignment]

    def _attend(self, tokens: Tensor, column: Tensor) -> Tensor:
        return Decoder._attend(self, tokens, column)

    def _remember(self, slot: Tensor, stays: Tensor | None, pops: Tensor, pushes: Tensor) -> None:
        if self.uses.bans or self.uses.searches:
            Decoder._remember(self, slot, stays, pops, pushes)


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sequencematch.serving.engine.can_capture", lambda *_: True)
    monkeypatch.setattr("sequencematch.serving.engine.GraphSlotDecoder", Emulated)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())


def test_rows_on_captured_steps_equal_rows_alone() -> None:
    prompts, settings = random_rows(24, seed=4)
    engine = Engine(policy(), slots=12).start()
    assert engine.is_captured
    together = submit(engine, prompts, settings)
    engine.close()
    assert sum(VOCAB in row.chosen for row in together) > 8, "too few rows delete"
    for prompt, options, row in zip(prompts, settings, together, strict=True):
        assert row.chosen == alone(prompt, options), options
    decoder: Any = engine.decoder
    print({tuple(uses): graph.replays for uses, graph in decoder.graphs.items()})
    assert len(decoder.graphs) > 2


def test_rows_that_delete_nothing_take_no_steps_beyond_their_end() -> None:
    """A row of n tokens takes n + 1 steps. The first rows also warm up the graph."""
    engine = Engine(policy(), slots=3).start()
    rows = [{"max_new_tokens": n, "min_new_tokens": n, "seed": n, "backspace_bias": -1e4} for n in (4, 9, 13)]
    submit(engine, [[5], [6, 7], [8]], rows)
    decoder: Any = engine.decoder
    before = decoder.graphs[Uses()].replays
    submit(engine, [[5], [6, 7], [8]], rows)
    engine.close()
    assert decoder.graphs[Uses()].replays - before == 14


def test_a_feature_that_nobody_uses_is_in_no_step() -> None:
    engine = Engine(policy(), slots=2).start()
    submit(engine, [[5], [6]], [LONG, LONG])
    decoder: Any = engine.decoder
    assert list(decoder.graphs) == [Uses()]
    submit(engine, [[5], [6]], [LONG, {**LONG, "temperature": 1.0, "top_p": 0.5, "seed": 0}])
    assert list(decoder.graphs) == [Uses(), Uses(warps=True)]
    engine.close()


def test_a_read_has_room_for_every_action_between_two() -> None:
    """Two rounds a step, and two more steps where a graph is captured."""
    assert 2 * (SERVED_STEPS + 2) <= RING // 2


def test_a_processor_is_refused_where_steps_are_captured() -> None:
    engine = Engine(policy(), slots=1)
    job = Job([5], Sampling(**LONG, logits_processor=lambda _, logits: logits), Collected())
    with pytest.raises(ValueError, match="`logits_processor` must be left out on a GPU"):
        engine.submit([job])


def test_when_a_step_cannot_be_captured_it_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Emulated) -> None:
        self.is_uncaptured = True

    monkeypatch.setattr(Emulated, "_try_to_capture", fails)
    engine = Engine(policy(), slots=4).start()
    assert isinstance(engine.decoder, SlotDecoder)
    prompts, settings = random_rows(8, seed=5)
    together = submit(engine, prompts, settings)
    engine.close()
    for prompt, options, row in zip(prompts, settings, together, strict=True):
        assert row.chosen == alone(prompt, options)
