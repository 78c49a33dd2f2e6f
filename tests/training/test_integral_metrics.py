"""Training with Wasserstein and MMD: a step against loops over points and segments, every state run alone; resume; refusals."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from sequencematch.core.encoding import Encoding
from sequencematch.core.mdp import State, Trajectory
from sequencematch.core.transitions import STAY, Transitions, draw_transitions
from sequencematch.policy import Policy
from sequencematch.training import step as step_module
from tests.oracles import equations
from tests.policy.tiny_models import character_tokenizer, llama
from tests.training.test_losses import BC_WEIGHT, GAMMA, check_step, one_step, raw
from tests.training.tiny_run import config, trainer

every_metric = pytest.mark.parametrize("metric", ["wasserstein", "mmd"])
#: α at which the rewards of an untrained model leave the ball, so that every part of the penalty has a gradient.
STEEP = 4.0


@dataclass(frozen=True)
class Point:
    """A transition, run alone: reward, hidden vectors, positions and action."""

    reward: Tensor
    hidden: tuple[Tensor, Tensor]
    position: tuple[int, int]
    action: int


def hidden_of(policy: Policy, state: State) -> Tensor:
    return policy.base.model(input_ids=torch.tensor([state.tokens])).last_hidden_state[0, -1]


def all_logits(policy: Policy, hidden: Tensor, position: int) -> list[Tensor]:
    """ℓ(·|s) of a hidden vector by the formulas of the output layer, the row and the offset head."""
    head = policy.backspace
    scaled = hidden.new_tensor([position / policy.max_positions])
    inner = head.offset_in.weight @ torch.cat([hidden, scaled]) + head.offset_in.bias
    gelu = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
    offset = head.offset_out.weight[0] @ gelu + head.offset_out.bias[0]
    return [row @ hidden + offset for row in (*policy.base.lm_head.weight, head.row)]


def point_of(policy: Policy, trajectory: Trajectory, t: int) -> Point:
    states = list(trajectory.states())
    here, after = states[t], states[min(t + 1, len(states) - 1)]
    hidden = hidden_of(policy, here), hidden_of(policy, after)
    position = len(here.tokens) - 1, len(after.tokens) - 1
    value = equations.value(all_logits(policy, hidden[1], position[1]))
    if t == len(trajectory):
        return Point((1 - GAMMA) * value, hidden, position, STAY)
    logit = all_logits(policy, hidden[0], position[0])[trajectory.chosen[t]]
    return Point(logit - GAMMA * value, hidden, position, trajectory.chosen[t])


def distance(one: Point, two: Point) -> float:
    """The Euclidean distance of both hidden vectors, over √d, and 1 if the actions differ."""
    squares = sum(float(((x - y).detach() ** 2).sum()) for x, y in zip(one.hidden, two.hidden, strict=True))
    return math.sqrt(squares / len(one.hidden[0])) + (one.action != two.action)


def steepness(policy: Policy, one: Point, two: Point, share: float) -> Tensor:
    """‖∂r/∂z‖ between two points, with the action and positions of the first."""
    between = [(x + share * (y - x)).detach().requires_grad_() for x, y in zip(one.hidden, two.hidden, strict=True)]
    logit = all_logits(policy, between[0], one.position[0])[one.action]
    reward = logit - GAMMA * equations.value(all_logits(policy, between[1], one.position[1]))
    slopes = torch.autograd.grad(reward, between, create_graph=True)
    return math.sqrt(len(between[0])) * torch.cat(slopes).norm()  # in units of z = h/√d


def penalty(policy: Policy, metric: str, batch: tuple[Trajectory, ...], drawn: Transitions) -> Tensor:
    """(1/α) ψ(α r) of one forward pass, by loops."""
    places = zip(drawn.trajectory.tolist(), drawn.step.tolist(), strict=True)
    points = [point_of(policy, batch[b], t) for b, t in places]
    assert [point.action for point in points] == drawn.action.tolist()
    n = len(points)
    if metric == "mmd":
        kernel = [
            [math.exp(-distance(p, q)) + 1e-3 * (i == j) for j, q in enumerate(points)] for i, p in enumerate(points)
        ]
        inverse = torch.linalg.inv(torch.tensor(kernel, dtype=torch.float64)).tolist()
        rewards = [STEEP * point.reward for point in points]
        terms = [rewards[i] * inverse[i][j] * rewards[j] for i in range(n) for j in range(n)]
        return torch.stack(terms).sum() / 4 / STEEP
    rises = [STEEP * (p.reward - q.reward) - distance(p, q) for p in points for q in points]
    lipschitz = torch.stack(rises).clamp(min=0).square().sum() / n**2
    slopes = [
        STEEP * steepness(policy, points[i], points[j], u)
        for (i, j), u in zip(drawn.segment.tolist(), drawn.share.tolist(), strict=True)
    ]
    too_steep = (torch.stack(slopes) - 1).clamp(min=0).square().sum() / len(slopes)
    assert float(lipschitz.detach()) > 1e-3
    assert float(too_steep.detach()) > 1e-3
    return 10 * (lipschitz + too_steep) / STEEP


def recorded_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Policy, list[tuple[Trajectory, ...]], list[Transitions], float, dict[str, Tensor]]:
    """One step of few points and segments, and which they were."""
    drawn: list[Transitions] = []

    def record(encoding: Encoding, num_data: int, **options: Any) -> Transitions:
        drawn.append(draw_transitions(encoding, num_data, **options))
        return drawn[-1]

    monkeypatch.setattr(step_module, "draw_transitions", record)
    monkeypatch.setattr(step_module, "POINTS", 12)
    monkeypatch.setattr(step_module, "SEGMENTS", 5)
    policy, batches, logged, gradients = one_step(folder, monkeypatch, alpha=STEEP, noise_rate=0.4, **changes)
    return policy, batches, drawn, logged, gradients


@every_metric
@pytest.mark.parametrize(("passes", "source"), [(1, "rollouts"), (2, "rollouts"), (1, "data")])
def test_a_step_equals_the_loops(
    metric: str, passes: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches to a step, each in one forward pass or two: each pass has a penalty, weighted by its data trajectories."""
    words = [{"prompt": word[:3], "completion": word[3:]} for word in ("rivers", "stones", "clouds", "apples") * 2]
    split = {"dataset": words, "truncation": True, "max_length": 9, "max_completion_length": 6} if passes == 2 else {}
    policy, batches, drawn, logged, gradients = recorded_step(
        tmp_path, monkeypatch, divergence=metric, model_value_from=source, **split
    )
    assert len(batches) == len(drawn) == 2 * passes
    assert all(len(transitions.step) == 12 for transitions in drawn)
    data = [raw(policy, t) for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [raw(policy, t) for batch in batches for t in batch if any(t.policy_chosen)]
    assert (len(data), len(model)) == (6, 6)
    # φ is the identity, and both V sums telescope to V at first states.
    decisions = sum(len(d.actions) for d in data)
    likelihood: Any = 0.0
    for d in data:
        values = [equations.value(logits) for logits in d.logits]
        for t, action in enumerate(d.actions):
            likelihood = likelihood + GAMMA**t * (d.logits[t][action] - GAMMA * values[t + 1])
        likelihood = likelihood + GAMMA ** len(d.actions) * values[-1] - values[0] / 2
    starts = sum(equations.value(d.logits[0]) / 2 for d in (data if source == "data" else model))
    penalties = [
        sum(not any(t.policy_chosen) for t in batch) * penalty(policy, metric, batch, transitions)
        for batch, transitions in zip(batches, drawn, strict=True)
    ]
    ours = (-likelihood + starts + sum(penalties)) / decisions
    expected = BC_WEIGHT * equations.negative_log_likelihood(data) + (1 - BC_WEIGHT) * ours
    check_step(policy, expected, logged, gradients)


@every_metric
def test_training_lowers_the_loss_and_logs_the_penalty(metric: str, tmp_path: Path) -> None:
    """At α = 1 the penalty is felt; likelihood is learnt beside it."""
    run = trainer(tmp_path, divergence=metric, alpha=1.0, gamma=0.9, max_steps=40, noise_rate=0.0)
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert all(math.isfinite(line["loss"]) and line["objective/reward_penalty"] > 0 for line in lines)
    first, last = (sum(line["loss/bc"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last < 0.8 * first


@every_metric
def test_a_resumed_run_equals_one_that_was_not_interrupted(metric: str, tmp_path: Path) -> None:
    """The points of a step follow from the seed and the step: to the last bit, with dropout."""
    settings = {
        "divergence": metric,
        "alpha": 1.0,
        "gamma": 0.9,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    settings |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    whole = trainer(tmp_path, _policy(), **settings)
    whole.train()
    again = trainer(tmp_path, _policy(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for (name, ours), theirs in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_other_points_are_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the draw of points matters."""
    monkeypatch.setattr(step_module, "POINTS", 6)
    losses = []
    for shift in (0, 1):
        draw = step_module.point_draw
        with monkeypatch.context() as patch:
            patch.setattr(
                "sequencematch.training.trainer.point_draw",
                lambda metric, gamma, seed, draw=draw, shift=shift: draw(metric, gamma, seed + shift),
            )
            run = trainer(tmp_path, divergence="mmd", alpha=1.0, max_steps=1)
            run.train()
        losses.append(run.state.log_history[0]["objective/reward_penalty"])
    assert losses[0] != losses[1]


@every_metric
@pytest.mark.parametrize("half", ["no", "weights", "autocast"])
def test_adapters_and_bfloat16_train(metric: str, half: str, tmp_path: Path) -> None:
    """A frozen output layer has slopes, too; in bfloat16 they are taken between float32 features."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    base = llama().bfloat16() if half == "weights" else llama()
    adapted = Policy.from_pretrained(base, tokenizer=character_tokenizer(), peft_config=lora)
    run = trainer(tmp_path, adapted, divergence=metric, alpha=1.0, max_steps=2, bf16=half == "autocast")
    before = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    run.train()
    assert all(math.isfinite(line["loss"]) for line in run.state.log_history if "loss" in line)
    after = dict(adapted.named_parameters())
    assert any("lora_B" in name and not torch.equal(after[name], p) for name, p in before.items())


def test_points_are_drawn_once_cloning_alone_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("points were drawn")

    monkeypatch.setattr(step_module, "draw_transitions", refuse)
    run = trainer(tmp_path, divergence="mmd", bc_steps=2, max_steps=3)
    with pytest.raises(AssertionError, match="points were drawn"):
        run.train()
    assert run.state.global_step == 2


def test_settings_that_would_be_ignored_or_can_not_work_are_refused(tmp_path: Path) -> None:
    bad: dict[str, dict[str, Any]] = {
        "`lipschitz_weight` would be ignored: it belongs to wasserstein. Got divergence 'mmd'.": {
            "divergence": "mmd",
            "lipschitz_weight": 3.0,
        },
        "`lipschitz_weight` must be positive and finite": {"divergence": "wasserstein", "lipschitz_weight": 0.0},
        "`mixture_weight` would be ignored": {"divergence": "wasserstein", "mixture_weight": 0.4},
        "`divergence` must be one of .* did you mean 'wasserstein'": {"divergence": "wassertein"},
    }
    for text, changes in bad.items():
        with pytest.raises(ValueError, match=text):
            config(tmp_path, **changes)
    assert config(tmp_path, divergence="mmd").needs_rollouts
    assert not config(tmp_path, divergence="mmd", objective="bc").needs_rollouts


def _policy() -> Policy:
    return Policy.from_pretrained(llama(attention_dropout=0.2), tokenizer=character_tokenizer())
