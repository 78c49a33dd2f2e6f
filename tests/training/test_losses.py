"""One optimisation step against a recomputation from raw trajectories: every state run alone, every sum a loop."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from sequencematch.core.divergences import DIVERGENCES
from sequencematch.core.encoding import Encoding
from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.training import step as step_module
from sequencematch.training.step import encode_batch
from tests.data.test_examples import ids
from tests.oracles import equations
from tests.training.tiny_run import policy as tiny_policy
from tests.training.tiny_run import trainer

ALPHA, GAMMA, BC_WEIGHT = 0.1, 0.9, 0.3


class Gradients(TrainerCallback):
    """Keeps the gradients of the last optimisation step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        self.found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[Policy, list[tuple[Trajectory, ...]], float, dict[str, Tensor]]:
    """A policy before a step of two batches of three, the trajectories of each batch, the logged loss and the gradients."""
    batches: list[tuple[Trajectory, ...]] = []

    def record(trajectories: Sequence[Trajectory], hidden_size: int | None) -> Encoding:
        batches.append(tuple(trajectories))
        return encode_batch(trajectories, hidden_size)

    monkeypatch.setattr(step_module, "encode_batch", record)
    policy, gradients = tiny_policy(exact=True), Gradients()
    with torch.no_grad():  # an offset head that does something, and a row that is not the mean of the others
        for parameter in policy.backspace.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 4
            )
    before = tiny_policy(exact=True)
    before.load_state_dict(policy.state_dict())
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "alpha": ALPHA,
        "gamma": GAMMA,
        "bc_weight_final": BC_WEIGHT,
        "max_grad_norm": 0.0,
    }
    run = trainer(folder, policy, **(settings | changes))
    run.add_callback(gradients)
    run.train()
    return before, batches, run.state.log_history[0]["loss"], gradients.found


def raw(policy: Policy, trajectory: Trajectory, *, backspace: bool = True) -> equations.Raw:
    """A trajectory's states one by one through the model; the row and the offset head by their formulas."""
    head, logits = policy.backspace, []
    for state in trajectory.states():
        hidden = policy.base.model(input_ids=torch.tensor([state.tokens])).last_hidden_state[0, -1]
        position = hidden.new_tensor([(len(state.tokens) - 1) / policy.max_positions])
        inner = head.offset_in.weight @ torch.cat([hidden, position]) + head.offset_in.bias
        gelu = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
        offset = head.offset_out.weight[0] @ gelu + head.offset_out.bias[0]
        tokens = (policy.base.lm_head.weight @ hidden + offset).unbind()
        logits.append([*tokens, head.row @ hidden + offset] if backspace else [*tokens])
    return equations.Raw(logits, list(trajectory.chosen), list(trajectory.policy_chosen))


def check_step(policy: Policy, expected: Tensor, logged: float, gradients: dict[str, Tensor]) -> None:
    """The loss to what a float32 log keeps; gradients to float64 rounding through two layers and some sixty states."""
    assert logged == pytest.approx(float(expected.detach()), rel=1e-6)
    trained = {name: p for name, p in policy.named_parameters() if name in gradients}
    for (name, _), gradient in zip(
        trained.items(), torch.autograd.grad(expected, list(trained.values()), allow_unused=True), strict=True
    ):
        wanted = torch.zeros_like(gradients[name]) if gradient is None else gradient
        assert float((gradients[name] - wanted).norm()) <= 1e-9 * (1 + float(wanted.norm())), name


@pytest.mark.parametrize(
    ("packing", "divergence"),
    # Packing lays out what the divergence then sums: with and without rollouts is enough.
    [*((False, name) for name in DIVERGENCES), (True, "chi2_mixture"), (True, "js")],
)
def test_a_sequencematch_step_equals_the_loops(
    divergence: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"divergence": divergence, "packing": packing, "noise_rate": 0.4}
    if divergence == "chi2_mixture":
        changes["model_value_from"] = "rollouts"
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, **changes)
    data = [t for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [t for batch in batches for t in batch if any(t.policy_chosen)]
    needs_rollouts = divergence == "chi2_mixture"
    assert (len(batches), len(data), len(model)) == (2, 6, 6 if needs_rollouts else 0)
    assert any(policy.space.bkspc in t.chosen for t in data)
    ours, theirs = [raw(policy, t) for t in data], [raw(policy, t) for t in model]
    terms = equations.sequencematch_terms(ours, theirs or ours, divergence, ALPHA, GAMMA)
    expected = BC_WEIGHT * equations.negative_log_likelihood(ours) + (1 - BC_WEIGHT) * terms["loss"]
    check_step(policy, expected, logged, gradients)
    assert set(gradients) == {name for name, _ in policy.named_parameters()}


@pytest.mark.parametrize("source", ["data", "rollouts"])
def test_d_is_the_datas_unless_it_is_asked_for_as_printed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle telescopes D of the data to ½ Σ V(s₀); D of the other source is another loss with other gradients."""
    changes: dict[str, Any] = {} if source == "data" else {"model_value_from": source}
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, noise_rate=0.4, **changes)
    data = [t for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [t for batch in batches for t in batch if any(t.policy_chosen)]
    assert (len(data), len(model)) == (6, 6)
    assert sorted(t.initial for t in data) != sorted(t.initial for t in model)
    ours, theirs = [raw(policy, t) for t in data], [raw(policy, t) for t in model]
    losses = {
        of_data: equations.sequencematch_terms(ours, theirs, "chi2_mixture", ALPHA, GAMMA, value_of_data=of_data)[
            "loss"
        ]
        for of_data in (True, False)
    }
    difference = losses[True] - losses[False]
    head = policy.backspace.offset_out.weight  # it moves V alone
    assert abs(float(difference.detach())) > 1e-3
    assert float(torch.autograd.grad(difference, head, retain_graph=True)[0].norm()) > 1e-3
    cloning = BC_WEIGHT * equations.negative_log_likelihood(ours)
    check_step(policy, cloning + (1 - BC_WEIGHT) * losses[source == "data"], logged, gradients)


@pytest.mark.parametrize("source", ["data", "rollouts"])
def test_a_step_with_scored_prompts_cut_sequences_and_a_floor_equals_the_loops(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of three letters count as decisions; data is cut by noise, and rollouts can't delete their prompts."""
    words = [
        {"prompt": word[:3], "completion": word[3:]}
        for word in ("river", "stone", "cloud", "apples", "grasses", "moons")
    ]
    changes = {
        "noise_rate": 0.6,
        "completion_only_loss": False,
        "protect_prompt": True,
        "model_value_from": source,
        "truncation": True,
        "max_length": 9,
    }
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, dataset=words, **changes)
    data = [t for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [t for batch in batches for t in batch if any(t.policy_chosen)]
    assert any(t.truncated for t in data)
    assert all(t.floor == 3 and t.policy_chosen[:2] == (False, False) for t in model)
    ours, theirs = [raw(policy, t) for t in data], [raw(policy, t) for t in model]
    of_data = source == "data"
    terms = equations.sequencematch_terms(ours, theirs, "chi2_mixture", ALPHA, GAMMA, value_of_data=of_data)
    check_step(
        policy, BC_WEIGHT * equations.negative_log_likelihood(ours) + (1 - BC_WEIGHT) * terms["loss"], logged, gradients
    )


def test_a_step_with_prompts_of_their_own_for_rollouts_equals_the_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E from rollouts that start at x, y or z, and D of the data; with D of the rollouts it would be another loss."""
    prompts = [{"prompt": letter} for letter in "xyz"]
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, noise_rate=0.4, rollout_dataset=prompts)
    data = [t for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [t for batch in batches for t in batch if any(t.policy_chosen)]
    assert (len(data), len(model)) == (6, 6)
    assert {t.initial for t in model} <= {ids(letter) for letter in "xyz"}
    ours, theirs = [raw(policy, t) for t in data], [raw(policy, t) for t in model]
    cloning = BC_WEIGHT * equations.negative_log_likelihood(ours)
    terms = equations.sequencematch_terms(ours, theirs, "chi2_mixture", ALPHA, GAMMA, value_of_data=True)
    check_step(policy, cloning + (1 - BC_WEIGHT) * terms["loss"], logged, gradients)
    other = equations.sequencematch_terms(ours, theirs, "chi2_mixture", ALPHA, GAMMA)
    assert abs(float((other["loss"] - terms["loss"]).detach())) > 1e-3


def test_a_step_in_several_forward_passes_equals_the_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences of nine nodes and as long rollouts: twice the node budget of the data, so two passes."""
    words = [{"prompt": word[:3], "completion": word[3:]} for word in ("rivers", "stones", "clouds", "apples") * 2]
    changes = {"noise_rate": 0.6, "truncation": True, "max_length": 9, "max_completion_length": 6}
    policy, batches, logged, gradients = one_step(
        tmp_path, monkeypatch, dataset=words, model_value_from="rollouts", **changes
    )
    data = [t for batch in batches for t in batch if not any(t.policy_chosen)]
    model = [t for batch in batches for t in batch if any(t.policy_chosen)]
    assert [len(batch) for batch in batches] == [4, 2, 4, 2]
    assert (len(data), len(model)) == (6, 6)
    ours, theirs = [raw(policy, t) for t in data], [raw(policy, t) for t in model]
    terms = equations.sequencematch_terms(ours, theirs, "chi2_mixture", ALPHA, GAMMA)
    expected = BC_WEIGHT * equations.negative_log_likelihood(ours) + (1 - BC_WEIGHT) * terms["loss"]
    check_step(policy, expected, logged, gradients)


@pytest.mark.parametrize("objective", ["bc", "mle"])
def test_a_step_of_cloning_or_likelihood_equals_the_loops(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, objective=objective)
    raws = [raw(policy, t, backspace=objective == "bc") for batch in batches for t in batch]
    check_step(policy, equations.negative_log_likelihood(raws), logged, gradients)


def test_a_step_of_unlikelihood_equals_the_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"objective": "unlikelihood", "unlikelihood_weight": 0.7, "completion_only_loss": False}
    policy, batches, logged, gradients = one_step(tmp_path, monkeypatch, **changes)
    trajectories = [t for batch in batches for t in batch]
    raws = [raw(policy, t, backspace=False) for t in trajectories]
    contexts = [[*t.initial, *t.executed] for t in trajectories]
    unlikely = equations.token_unlikelihood(raws, contexts)
    assert float(unlikely.detach()) > 0.01
    check_step(policy, equations.negative_log_likelihood(raws) + 0.7 * unlikely, logged, gradients)


def test_dividing_each_batch_by_its_own_decisions_is_another_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: the step's N counts, not a batch's."""
    policy, batches, logged, _ = one_step(tmp_path, monkeypatch, objective="mle")
    per_batch = [equations.negative_log_likelihood([raw(policy, t, backspace=False) for t in b]) for b in batches]
    assert abs(logged - float(sum(per_batch).detach() / 2)) > 1e-4
