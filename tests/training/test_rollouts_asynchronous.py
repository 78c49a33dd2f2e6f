"""Copies of policies, weights on their way to them, and when they are taken; workers run in the test's own process."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from sequencematch.policy import Policy, Sampling
from sequencematch.training import SequenceMatchTrainer
from sequencematch.training.rollouts import InlineRollouts, Request
from sequencematch.training.rollouts.asynchronous import split
from sequencematch.training.rollouts.copies import put_together, take_apart
from sequencematch.training.rollouts.source import AsynchronousSource, RolloutSource, make_rollouts
from sequencematch.training.rollouts.weights import Layout, pack, unpack
from tests.training import tiny_run
from tests.training.memory_engine import OwnEngine, own_source
from tests.training.rollout_runs import SETTINGS, Outcome, outcome

REQUEST = Request([(4, 5), (6,), (7, 8, 9)], 5)
SAMPLING = Sampling(max_new_tokens=8, seed=3, self_loops=True)


def policy(*, lora: bool = False, **changes: Any) -> Policy:
    """With random numbers in every trained tensor."""
    made = tiny_run.policy(**changes)
    if lora:
        from sequencematch.policy.adapters import with_adapter

        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        made = Policy(with_adapter(made.model, config, made.space.ends), made.tokenizer, made.backspace)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def copy_of(made: Policy) -> Policy:
    """The policy, taken apart, sent as bytes, and put together."""
    blueprint, trained, frozen = take_apart(made)
    blocks = []
    for tensors, layout in ((frozen, blueprint.frozen), (trained, blueprint.trained)):
        blocks.append(torch.zeros(layout.size, dtype=torch.uint8))
        pack(tensors, layout, blocks[-1])
    found, empty = put_together(pickle.loads(pickle.dumps(blueprint)), blocks[0], torch.device("cpu"))
    unpack(blocks[1], blueprint.trained, empty)
    return found


# ----------------------------------------------------------------------------------------------------------- weights


def test_a_layout_by_hand() -> None:
    """Five bytes, three floats and nothing at all: each begins at a multiple of 64."""
    tensors = [
        torch.arange(5, dtype=torch.uint8),
        torch.tensor([1.5, -2.0, 3.25]),
        torch.empty(0, 4, dtype=torch.bfloat16),
    ]
    layout = Layout.of(tensors)
    assert [start for _, _, start in layout.places] == [0, 64, 128]
    assert layout.size == 128
    block = torch.zeros(layout.size, dtype=torch.uint8)
    pack(tensors, layout, block)
    assert block[:5].tolist() == [0, 1, 2, 3, 4]
    assert block[64:76].tolist() == [0, 0, 192, 63, 0, 0, 0, 192, 0, 0, 80, 64]
    found = [torch.full_like(tensor, 7) for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in found]
    unpack(block, layout, found)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert addresses == [tensor.data_ptr() for tensor in found]
    assert Layout.of([]).size == 1


def test_requests_are_split_evenly_and_keep_their_numbers() -> None:
    whole = Request([(n,) for n in range(7)], 20)
    parts = split(whole, 3)
    assert [(part.first, len(part.prompts)) for part in parts] == [(20, 2), (22, 2), (24, 3)]
    assert [prompt for part in parts for prompt in part.prompts] == list(whole.prompts)
    assert [part.first for part in split(Request([(1,), (2,)], 8), 5)] == [8, 9]


# ------------------------------------------------------------------------------------------------------------ copies


@pytest.mark.parametrize(
    "options",
    [{}, {"lora": True}, {"tie_word_embeddings": True}, {"exact": True}],
    ids=["full", "LoRA", "tied", "float64"],
)
def test_a_copy_makes_the_same_rollouts(options: dict[str, Any]) -> None:
    """With the same parameters under the same names, trained or not, and tied where they were tied."""
    made = policy(**options)
    found = copy_of(made)
    assert make_rollouts(found, REQUEST, SAMPLING) == make_rollouts(made, REQUEST, SAMPLING)
    assert found.space == made.space
    pairs = zip(made.named_parameters(), found.named_parameters(), strict=True)
    for (name, own), (same, other) in pairs:
        assert (name, own.requires_grad) == (same, other.requires_grad)
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()


def test_under_lora_only_the_adapter_the_rows_and_the_heads_are_sent_again() -> None:
    blueprint, trained, frozen = take_apart(policy(lora=True))
    full, all_trained, constants = take_apart(policy())
    assert blueprint.trained.size < full.trained.size / 2
    assert sum(tensor.numel() for tensor in frozen) > sum(tensor.numel() for tensor in trained)
    assert all(not isinstance(tensor, torch.nn.Parameter) for tensor in constants)
    assert len(all_trained) == len(dict(policy().named_parameters()))
    assert len(blueprint.structure) < 500_000


def test_what_training_hangs_on_a_policy_is_not_copied(tmp_path: Path) -> None:
    """Checkpointed activations need hooks, accelerate wraps the forward pass, and layers may be compiled."""
    made = policy(lora=True)
    made.base.gradient_checkpointing_enable({"use_reentrant": False})
    made.base.enable_input_require_grads()
    args = tiny_run.config(tmp_path, bf16=True, max_steps=1, bc_steps=0)
    SequenceMatchTrainer(model=made, args=args, train_dataset=tiny_run.rows()).train()
    assert "forward" in vars(made)
    made.base.model.layers[0].compile()
    found = copy_of(made)
    assert "forward" not in vars(found)
    assert make_rollouts(found, REQUEST, SAMPLING) == make_rollouts(made, REQUEST, SAMPLING)


def test_a_hook_of_the_models_own_is_copied() -> None:
    made = policy()
    made.base.lm_head.register_forward_hook(print)
    found = copy_of(made)
    assert list(found.base.lm_head._forward_hooks.values()) == [print]


def test_a_policy_that_can_not_be_pickled_is_refused() -> None:
    made = policy()
    made.base.lm_head.register_forward_hook(lambda module, args, output: output)  # noqa: ARG005
    with pytest.raises(
        ValueError, match=r"`rollouts` must be 'inline' for a policy that can't be pickled.*Got: .*lambda"
    ):
        take_apart(made)


# ---------------------------------------------------------------------------------------------------------- training


def train(
    folder: Path, source: RolloutSource | None, dataset: Any = None, **changes: Any
) -> tuple[Outcome, SequenceMatchTrainer]:
    torch.manual_seed(0)
    args = tiny_run.config(folder, **(SETTINGS | changes))
    dataset = tiny_run.rows() if dataset is None else dataset
    trainer = SequenceMatchTrainer(model=tiny_run.policy(), args=args, train_dataset=dataset, rollouts=source)
    trainer.train()
    return outcome(trainer), trainer


@pytest.fixture
def with_workers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Outcome, SequenceMatchTrainer]]:
    """Train with `rollouts="process"`, but with workers in this process."""
    from sequencematch.training.rollouts import making

    monkeypatch.setattr(making, "ProcessEngine", OwnEngine)

    def run(folder: Path, **changes: Any) -> tuple[Outcome, SequenceMatchTrainer]:
        return train(folder, None, **({"rollouts": "process"} | changes))

    return run


Run = Callable[..., tuple[Outcome, SequenceMatchTrainer]]


def test_sources_are_told_apart() -> None:
    assert isinstance(own_source(), AsynchronousSource)
    assert not isinstance(InlineRollouts(), AsynchronousSource)
    assert isinstance(InlineRollouts(), RolloutSource)


@pytest.mark.parametrize(
    ("max_staleness", "versions"),
    [(0, [0, 3, 7, 11]), (1, [0, 2, 6, 10]), (3, [0, 0, 4, 8]), (4, [0, 0, 3, 7]), (50, [0, 0, 3, 7])],
)
def test_rollouts_are_as_old_as_they_may_be_and_no_older_than_a_batch(
    tmp_path: Path, with_workers: Run, max_staleness: int, versions: list[int]
) -> None:
    """Batches are due at steps 3, 7 and 11, and each lasts four steps. By hand: due less min(4, `max_staleness`), from 0 on."""
    found, _ = with_workers(tmp_path, max_staleness=max_staleness)
    assert sorted({experience.version for experience in found.rollouts}) == sorted(set(versions[1:]))


def test_weights_are_published_only_for_batches_that_need_them(tmp_path: Path, with_workers: Run) -> None:
    """A batch lasts one step: with `rollout_sync_steps` = 3, three batches share the weights."""
    fast = {"replay_reuse": 1, "generation_batch_size": 4, "bc_steps": 0, "bc_anneal_steps": 0}
    found, trainer = with_workers(tmp_path, rollout_sync_steps=3, max_staleness=3, **fast)
    ages = [line["rollouts/staleness"] for line in trainer.state.log_history if "rollouts/staleness" in line]
    assert sorted({experience.version for experience in found.rollouts}) == [0, 3, 6, 9]
    assert ages == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_a_batch_that_grew_too_old_while_it_waited_is_made_anew(tmp_path: Path, with_workers: Run) -> None:
    """Ten rows make steps of four, four and two: batches are due later than it seemed. None is older than allowed."""
    rows, schedule = tiny_run.rows(tiny_run.WORDS[:10]), {"max_steps": 40, "bc_steps": 0, "bc_anneal_steps": 0}
    _, trainer = with_workers(tmp_path, dataset=rows, max_staleness=2, **schedule)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert max(line.get("rollouts/staleness_max", 0) for line in lines) <= 2
    assert sum(line["rollouts/dropped_stale"] for line in lines) > 0
    assert sum(line["rollouts/duplicates"] for line in lines) == 0


def test_two_workers_make_the_same_rollouts_as_one_up_to_batch_composition(tmp_path: Path, with_workers: Run) -> None:
    """Tokens are drawn by rollouts' numbers, whoever makes them."""
    one, _ = with_workers(tmp_path / "1", max_staleness=0)
    two, _ = with_workers(tmp_path / "2", max_staleness=0, rollout_workers=3)
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.rollouts == one.rollouts


def test_corrections_are_made_by_workers_too(tmp_path: Path, with_workers: Run) -> None:
    options = {"objective": "bc", "correction_rate": 0.7, "bc_steps": None, "bc_anneal_steps": None}
    inline, _ = train(tmp_path / "inline", None, **options)
    found, _ = with_workers(tmp_path / "workers", max_staleness=0, **options)
    assert found.equals(inline)
    older, _ = with_workers(tmp_path / "older", **options)
    assert not older.equals(inline)


def test_a_stream_is_read_once_for_each_batch(tmp_path: Path, with_workers: Run) -> None:
    class Stream:
        """Counts how often it is read."""

        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            return iter(tiny_run.rows() * 20)

    passes = []
    for place in ("inline", "process"):
        stream = Stream()
        with_workers(tmp_path / place, dataset=stream, rollouts=place)
        passes.append(stream.passes)
    assert passes[0] == passes[1]


def test_training_again_starts_new_workers_with_the_weights_of_now(tmp_path: Path, with_workers: Run) -> None:
    plain = train(tmp_path / "inline", None)[1]
    plain.train()
    _, same = with_workers(tmp_path / "again", max_staleness=0)
    same.train()
    assert outcome(same).equals(outcome(plain))


# ---------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rollouts": "prozess"},
            "`rollouts` must be one of inline, process, ray. Got 'prozess'; did you mean 'process'",
        ),
        (
            {"rollout_workers": 2},
            "`rollout_workers` would be ignored: it belongs to rollouts='process' or 'ray'. Got 2",
        ),
        ({"max_staleness": 3}, "`max_staleness` would be ignored: it belongs to rollouts='process' or 'ray'"),
        ({"rollouts": "process", "rollout_gpus": 0.5}, "`rollout_gpus` would be ignored: it belongs to rollouts='ray'"),
        (
            {"rollouts": "process", "ray_address": "auto"},
            "`ray_address` would be ignored: it belongs to rollouts='ray'",
        ),
        (
            {"rollouts": "ray", "rollout_device": "cpu"},
            "`rollout_device` would be ignored: it belongs to rollouts='process'",
        ),
        ({"rollouts": "process", "rollout_workers": 0}, "`rollout_workers` must be at least 1. Got 0"),
        ({"rollouts": "process", "max_staleness": -1}, "`max_staleness` must not be negative. Got -1"),
        ({"rollouts": "process", "rollout_timeout_s": 0}, "`rollout_timeout_s` must be positive. Got 0"),
        (
            {"rollouts": "process", "rollout_without_workers": "stop"},
            "`rollout_without_workers` must be one of wait, fail",
        ),
        (
            {"rollouts": "process", "rollout_sync_steps": 5, "max_staleness": 2},
            r"`rollout_sync_steps` must be at most `max_staleness` \+ 1, or it would be ignored.* Got 5 and 2",
        ),
        ({"rollouts": "process", "objective": "mle"}, "`rollouts` would be ignored: this objective makes none"),
        ({"rollouts": "process", "divergence": "js"}, "`rollouts` would be ignored: this objective makes none"),
    ],
)
def test_settings_that_can_not_work_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run.config(tmp_path, **settings)


def test_a_missing_ray_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(ValueError, match=r"rollouts='ray' needs the package ray: pip install 'sequencematch\[ray\]'"):
        tiny_run.config(tmp_path, rollouts="ray")


def test_two_sources_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`args\.rollouts` would be ignored: `rollouts` says where they come from"):
        train(tmp_path, own_source(), rollouts="process")


def test_a_run_may_be_resumed_with_rollouts_made_elsewhere(tmp_path: Path) -> None:
    inline, process = (tiny_run.config(tmp_path, rollouts=place) for place in ("inline", "process"))
    assert inline.own_values() == process.own_values()
