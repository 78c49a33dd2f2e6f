"""Every suite runs through the real functions and yields the measurements that the targets know."""

import functools
import itertools

import pytest
import torch

from benchmarks import decoding, end_to_end, peers
from benchmarks.session import Session
from benchmarks.suites import SUITES, chosen, run, session_for
from benchmarks.targets import TARGETS
from benchmarks.timing import Measurement
from tests.benchmarks.known import policy, session

EXPECTED = {
    "encoding": {"control"},
    "attention": {"control"},
    "head": {"control"},
    "step": {
        "control",
        "same rows, BC",
        "same rows, equal",
        "step, equal",
        "step, short",
        "step, shared",
        "memory",
        "amortised, equal",
        "amortised, short",
        "amortised, shared",
        "paper",
    },
    "decoding": {"roofline", "control", "decoding, dynamic"},
    "search": {"control", "search"},
    "length": {"control", "length"},
    "end_to_end": {"control"},
}


@functools.cache
def rows_of(name: str) -> list[Measurement]:
    return list(SUITES[name](session()))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_yields_its_rows(name: str) -> None:
    rows = rows_of(name)
    assert {row.target for row in rows} - {None} == EXPECTED[name]
    assert {row.suite for row in rows} == {name}
    assert all(row.value > 0 and row.rounds >= 1 for row in rows)
    assert len({row.name for row in rows}) == len(rows)


def test_every_target_is_some_suites_row() -> None:
    known = set().union(*EXPECTED.values()) | {"decoding, static"}  # compiled, on a GPU only
    assert {key for targets in TARGETS.values() for key in targets} <= known


def test_the_step_with_adapters_has_no_rows_of_bookkeeping_alone() -> None:
    rows = list(SUITES["step"](session(is_lora=True, same_rows=False)))
    assert {row.target for row in rows} - {None} == EXPECTED["step"] - {"same rows, BC", "same rows, equal"}


def test_rows_of_an_interrupted_run_are_those_measured_before() -> None:
    rows = list(itertools.islice(run(session(), ["encoding", "head"]), 3))
    assert [row.suite for row in rows] == ["encoding"] * 3


def test_a_run_is_on_one_thread_and_gives_the_others_back() -> None:
    torch.set_num_threads(2)
    try:
        rows: list[Measurement] = []
        for row in run(session(), ["encoding"]):
            rows.append(row)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_suites_run_in_their_own_order_and_all_by_default() -> None:
    assert chosen(["step", "encoding"]) == ["encoding", "step"]
    assert chosen([]) == list(SUITES)


def test_a_session_keeps_the_last_model_and_the_time_of_its_generations() -> None:
    run = session()
    assert run.step_policy() is run.step_policy()
    assert run.generation(4, 3) is run.generation(4, 3)
    assert 4 <= run.generation(4, 3).actions <= 4 * 4


def test_bytes_of_weights_leave_out_an_embedding_that_is_only_looked_up() -> None:
    tiny = policy()
    everything = 4 * sum(p.numel() for p in tiny.base.parameters())
    assert decoding.weight_bytes(tiny) == everything - 4 * 64 * 16
    assert decoding.cache_bytes(tiny) == 4 * 2 * 2 * 16  # keys and values, two layers, hidden 16


def test_a_peer_that_is_not_installed_is_named_with_the_reason() -> None:
    assert peers.missing("torch") is None
    assert peers.missing("no_such_package") == "no_such_package is not installed"
    if peers.missing("trl"):
        control, *_ = rows_of("end_to_end")
        assert control.detail[end_to_end.TRL] == "left out: trl is not installed"


def test_quick_takes_three_rounds_and_a_whole_run_at_least_eleven() -> None:
    assert session_for("cpu", quick=True).rounds == 3
    assert session_for("cpu").rounds == 11
    with pytest.raises(ValueError, match=r"`--rounds` must be at least 11.* Got 5; `--quick` takes fewer"):
        session_for("cpu", rounds=5)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`--device` must be a device of this machine. Got 'nowhere'"):
        session_for("nowhere")


def test_gradients_are_dropped_after_a_step_on_a_cpu() -> None:
    tiny = Session("cpu", session().scale, 1).step_policy()
    update = peers.updater(tiny, "cpu")
    peers.mle_step(tiny.model, torch.tensor([[1, 5, 2]]), "cpu", update)()
    assert all(p.grad is None for p in tiny.parameters())
