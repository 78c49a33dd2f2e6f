"""The cost model: hand-worked sizes, how costs grow, shares of GPUs that keep pace, and errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import shapes as benchmarks_shapes
from sequencematch import Policy
from sequencematch.training.planning import HARDWARE, SHAPES, Shape, Workload, plan, shape_of
from sequencematch.training.planning.costs import (
    exchange_seconds,
    generation_seconds,
    rollout_bytes,
    shards,
    state_bytes,
    step_bytes,
    step_flops,
    step_seconds,
    sync_bytes,
)

H200 = HARDWARE["H200"]
SEVEN = Workload(SHAPES["Llama-2-7b"], context=1024, prompt=64, completion=960, batch_size=8, rank=64)
FULL = replace(SEVEN, rank=None)
#: Two layers of hidden 4, inner 6, two heads of which one has keys; ten tokens.
TINY = Shape.parse("2,4,6,2,1,10")


def test_sizes_of_a_tiny_llama_are_those_counted_by_hand() -> None:
    # q and o 4×4, k and v 4×2; gate, up and down 4×6; two norms of 4.
    assert TINY.layer_weights == 2 * 16 + 2 * 8 + 3 * 24 + 2 * 4 == 128
    assert TINY.weights == 2 * 128 + 2 * 40 + 4  # embedding and output layer 10×4, a last norm
    assert TINY.used_weights == 2 * 128 + 40
    assert TINY.cache_numbers == 2 * 2 * 2
    assert TINY.adapter_weights(1) == 2 * ((4 + 4) + (4 + 2) + (4 + 2) + (4 + 4) + 3 * (4 + 6))


def test_flops_and_bytes_of_a_tiny_step_are_those_counted_by_hand() -> None:
    work = Workload(TINY, context=10, prompt=2, completion=8, batch_size=3, generation_batch=5, checkpointing=False)
    nodes = 3 * 10 + 3 * 10
    scores = (
        (1 + 2.5) * 4 * 4 * 2 * (nodes * 10) / 2
    )  # 3.5 passes, two products of width 4 in two layers, half the length
    assert step_flops(work) == nodes * 6 * 296 + scores
    assert step_flops(replace(work, checkpointing=True)) == nodes * 8 * 296 + scores * 4.5 / 3.5
    assert state_bytes(work, 1) == 12 * TINY.weights
    assert state_bytes(work, 4) == 3 * TINY.weights
    assert rollout_bytes(work) == 2 * TINY.weights + 2 * 8 * 5 * 10
    assert sync_bytes(work) == 2 * TINY.weights + 4 * (9 * 4 + 25)


@pytest.mark.parametrize(
    "shape", [benchmarks_shapes.LLAMA_2_7B, benchmarks_shapes.SMOLLM2_135M], ids=lambda shape: shape.name
)
def test_named_shapes_have_the_weights_of_the_models_that_transformers_makes(shape: benchmarks_shapes.Shape) -> None:
    config = shape.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert SHAPES[shape.name].weights == sum(p.numel() for p in model.parameters())


def test_the_shape_of_a_bundled_model_is_read_from_its_config() -> None:
    model = Policy.from_pretrained("sequencematch/arithmetic").base
    found = shape_of("sequencematch/arithmetic")
    counted = sum(weight.numel() for weight in model.parameters())
    assert found.weights == pytest.approx(counted, abs=found.hidden)  # the last norm is counted with the layers
    assert (found.layers, found.hidden) == (model.config.num_hidden_layers, model.config.hidden_size)


def test_costs_grow_with_what_causes_them() -> None:
    longer = replace(SEVEN, context=2048, completion=1984)
    assert step_flops(longer) > 2 * step_flops(SEVEN)  # attention grows faster than the length
    assert step_flops(FULL) > step_flops(SEVEN)
    assert step_flops(replace(SEVEN, checkpointing=False)) < step_flops(SEVEN)
    assert step_flops(replace(SEVEN, rollouts=False)) == pytest.approx(step_flops(SEVEN) / 2)
    assert generation_seconds(replace(SEVEN, generation_batch=128), H200) < 2 * generation_seconds(SEVEN, H200)
    assert step_bytes(FULL, 8, H200) < step_bytes(FULL, 1, H200)
    assert step_bytes(replace(SEVEN, checkpointing=False), 1, H200) > step_bytes(SEVEN, 1, H200)
    tiny = replace(SEVEN, context=16, prompt=4, completion=12, batch_size=1)
    assert step_seconds(tiny, 1, H200) == 32 * H200.step_layer_s  # starting kernels takes all of it


def test_weights_are_sharded_only_where_they_do_not_fit() -> None:
    large = replace(FULL, shape=SHAPES["Llama-2-70b"])
    assert (shards(SEVEN, 8, H200), shards(large, 8, H200)) == (1, 8)
    assert exchange_seconds(large, 1, H200) == 0
    assert exchange_seconds(large, 16, H200) > 8 * exchange_seconds(large, 8, H200)  # a network in place of NVLink


def test_gpus_are_shared_out_so_that_the_trainer_does_not_wait_and_one_less_would_make_it() -> None:
    found = plan(SEVEN, 64, H200)
    assert found.apart is not None
    assert found.apart.train_gpus + found.apart.rollout_gpus == 64
    assert found.apart.waiting_s == 0
    assert found.apart.rollout_gpus / found.apart.train_gpus >= found.rollout_gpus_per_train_gpu
    assert (found.apart.rollout_gpus - 1) / (found.apart.train_gpus + 1) < found.rollout_gpus_per_train_gpu
    # 1.44 s a step; a rollout is used 8 times, so a GPU's 8 rows use up one, of which a rollout GPU makes 64 in 9.9 s.
    assert found.rollout_gpus_per_train_gpu == pytest.approx(9.92 / 64 / 1.438, rel=0.01)
    # 57 GPUs use 57 rollouts a step of a buffer of 1,000, half of which is younger.
    assert found.age_steps == pytest.approx(1000 / 57 / 2)


def test_rollouts_that_are_used_once_need_eight_times_the_gpus() -> None:
    once, often = plan(replace(SEVEN, reuse=1.0), 64, H200), plan(SEVEN, 64, H200)
    assert once.rollout_gpus_per_train_gpu == pytest.approx(8 * often.rollout_gpus_per_train_gpu)
    assert once.apart is not None
    assert often.apart is not None
    assert once.apart.rollout_gpus > 4 * often.apart.rollout_gpus
    two = plan(replace(SEVEN, reuse=0.1), 2, H200)
    assert two.apart is not None
    assert two.apart.waiting_s > 0  # one GPU can't make them as fast as the other uses them up


def test_a_single_gpu_takes_turns() -> None:
    found = plan(SEVEN, 1, H200)
    assert found.apart is None
    assert found.best is found.inline
    assert found.inline.step_s == pytest.approx(found.train_s + found.generation_s / 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"context": 0}, "`context` must be at least 1. Got 0."),
        ({"rank": 0}, "`rank` must be at least 1. Got 0."),
        ({"reuse": 0.0}, "`reuse` must be positive. Got 0.0."),
        ({"completion": 961}, "`completion` must fit `context`=1024 after a prompt of 64. Got 961."),
    ],
)
def test_workloads_that_no_run_has_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        replace(SEVEN, **changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Llama-2-7", r"`shape` must be one of .*did you mean 'Llama-2-7b'"),
        ("1,2,3", "six whole numbers: layers,hidden,intermediate,heads,kv_heads,vocab. Got '1,2,3'"),
        ("1,2,3,4,5,x", "six whole numbers"),
        ("2,5,6,2,1,10", "`shape` must have heads that divide hidden"),
    ],
)
def test_shapes_that_no_model_has_are_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Shape.parse(text)
