"""The trainer: what it logs, what it saves, what it refuses, and that options change what they should and nothing else."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.policy import Policy
from sequencematch.training import NonFiniteError, SequenceMatchTrainer
from sequencematch.training.replay import Experience
from sequencematch.training.rollouts import InlineRollouts, Request, RolloutSource
from sequencematch.training.step import encode_batch
from tests.data.test_examples import ids
from tests.policy.test_fusing import strict
from tests.policy.tiny_models import llama
from tests.training.memory_engine import own_source
from tests.training.tiny_run import config, policy, rows, trainer

LOGGING = (Path(__file__).parents[2] / "docs" / "logging.md").read_text()
TIMES = {"step_seconds", "rollouts/seconds"}


def losses(run: SequenceMatchTrainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_everything_logged_is_in_the_document_and_the_other_way_round(tmp_path: Path) -> None:
    logged: set[str] = set()
    for number, objective in enumerate(["sequencematch", "bc", "mle", "unlikelihood"]):
        apart = {"offset_lr_multiplier": 2.0} if objective == "sequencematch" else {}
        run = trainer(tmp_path / str(number), objective=objective, **apart)
        run.train()
        logged |= {name for entry in run.state.log_history if "loss" in entry for name in entry} - {"step"}
    for divergence in ("chi2_mixture", "mmd"):
        run = judged(tmp_path / divergence, divergence=divergence)
        logged |= {name for entry in run.state.log_history if "loss" in entry for name in entry} - {"step"}
    by_workers = config(tmp_path / "workers")
    run = SequenceMatchTrainer(model=policy(), args=by_workers, train_dataset=rows(), rollouts=own_source())
    run.train()
    logged |= {name for entry in run.state.log_history if "loss" in entry for name in entry} - {"step"}
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", LOGGING, flags=re.MULTILINE) for name in re.findall("`(.+?)`", row)
    }
    assert logged == documented


class Judged(InlineRollouts):
    """Of four rollouts two write the whole word, the third one letter less, and the fourth is cut."""

    def collect(self, request: Request) -> list[Experience]:
        space, made = self.policy.space, []
        for number, prompt in enumerate(request.prompts, request.first):
            (word,) = (w for w in ("cat", "dog", "sun", "tree") if ids(w[0]) == prompt)
            rest = ids(word[1:])
            actions = [(*rest, space.eos), (*rest, space.eos), (*rest[:-1], space.eos), rest][number % 4]
            made.append(Experience(Trajectory.rollout(space, prompt, actions), self.version))
        return made


def judged(folder: Path, **changes: Any) -> SequenceMatchTrainer:
    args = config(folder, learning_rate=1e-9, replay_reuse=0.5, **changes)
    run = SequenceMatchTrainer(policy(), args, rows(["cat", "dog", "sun", "tree"]), rollouts=Judged())
    run.train()
    return run


def test_right_rollouts_are_counted_and_the_values_of_ends_are_told_apart(tmp_path: Path) -> None:
    """Half of them are right. V(s_T) of right and of wrong ends, each alone; cut rollouts belong to neither."""
    run = judged(tmp_path)
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["rollouts/right"] for line in lines] == [0.5] * 4
    assert [line["rollouts/right_deleted"] for line in lines] == [0.0] * 4
    for right in (True, False):
        kept = [e.trajectory for e in run.on_policy.buffer.rollouts if e.right is right and not e.trajectory.truncated]
        values = run.model(encode_batch(kept, None)).final_value
        name = f"values/rollouts/final_{'right' if right else 'wrong'}"
        logged = [line[name] for line in lines if name in line]  # a step may have drawn none
        assert logged
        assert min(values.tolist()) - 1e-4 <= min(logged)
        assert max(logged) <= max(values.tolist()) + 1e-4
    text = trainer(tmp_path / "text", dataset=[{"text": "cat"}, {"text": "dog"}])
    text.train()
    names = {name for line in text.state.log_history for name in line}
    assert "values/rollouts/final" in names
    assert not names & {
        "rollouts/right",
        "rollouts/right_deleted",
        "values/rollouts/final_right",
        "values/rollouts/final_wrong",
    }


class Fickle(Judged):
    """Every rollout deletes its first right letter, and writes it again."""

    def collect(self, request: Request) -> list[Experience]:
        made = []
        for prompt, experience in zip(request.prompts, super().collect(request), strict=True):
            first, space = experience.trajectory.chosen[0], experience.trajectory.space
            made.append(Experience(Trajectory.rollout(space, prompt, (first, space.bkspc, first, space.eos)), 0))
        return made


def test_right_tokens_that_rollouts_delete_are_counted(tmp_path: Path) -> None:
    """Two right letters are written in each, and one is deleted."""
    args = config(tmp_path, learning_rate=1e-9, max_steps=1, bc_steps=0)
    run = SequenceMatchTrainer(policy(), args, rows(["cat", "dog", "sun", "tree"]), rollouts=Fickle())
    run.train()
    assert run.state.log_history[0]["rollouts/right_deleted"] == 0.5


def test_a_correction_is_one_more_decision_in_the_loss_and_in_its_denominator(tmp_path: Path) -> None:
    """Of four rollouts one ended a letter early: its last letter is scored once more, beside every letter of the data."""
    words = ["cat", "dog", "sun", "tree"]
    losses = {}
    for rate in (0.0, 1.0):
        options = {"objective": "bc", "noise_rate": 0.0, "max_steps": 1, "correction_rate": rate, "replay_reuse": 1.0}
        args = config(tmp_path / str(rate), learning_rate=1e-9, generation_batch_size=4, **(options))
        run = SequenceMatchTrainer(policy(), args, rows(words), rollouts=Judged())
        run.train()
        losses[rate] = run.state.log_history[0]["loss"]
        made = [e for e in run.on_policy.buffer.rollouts if e.right_action is not None]
    (early,) = made
    space, read = run.model.space, run.collate.read
    data = [run.collate.clean(read({"prompt": word[0], "completion": word[1:]})) for word in words]
    state = early.trajectory.final_state.tokens[:-1]
    assert early.right_action == ids(next(w for w in words if ids(w[0]) == state[:1]))[len(state)]
    extra = Trajectory(space, state, (early.right_action,), (space.eos,), (False,))
    for rate, wanted in ((0.0, data), (1.0, [*data, extra])):
        with torch.no_grad():
            scores = run.model(encode_batch(wanted, None))
        log_prob = (scores.action_logit - scores.value[:, :-1])[scores.is_step]
        assert len(log_prob) == sum(map(len, data)) + rate
        assert losses[rate] == pytest.approx(-float(log_prob.mean()), rel=1e-5)


def test_corrections_need_answers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`correction_rate` needs examples with prompts and answers"):
        trainer(tmp_path, dataset=[{"text": "cat"}], objective="bc", correction_rate=0.5)


def test_the_logged_numbers_are_those_of_the_equations(tmp_path: Path) -> None:
    run = trainer(tmp_path, bc_weight_final=0.3, alpha=0.2, gamma=0.9)
    run.train()
    entry = run.state.log_history[0]
    terms = {
        name: entry[f"objective/{name}"]
        for name in ("data_reward", "data_tail", "data_value", "model_value", "model_penalty")
    }
    gain = (
        terms["data_reward"] + terms["data_tail"] - terms["data_value"] - terms["model_value"] - terms["model_penalty"]
    )
    assert entry["objective"] == -entry["loss/sequencematch"] == pytest.approx(gain, rel=1e-4)
    assert entry["loss"] == pytest.approx(0.3 * entry["loss/bc"] + 0.7 * entry["loss/sequencematch"], rel=1e-6)
    assert entry["replay/reuse"] == pytest.approx(4 / 8)
    assert entry["replay/size"] == 8


@pytest.mark.parametrize("source", ["data", "rollouts"])
@pytest.mark.parametrize("divergence", ["chi2_mixture", "mmd"])
def test_the_logged_value_sum_is_that_of_its_source(divergence: str, source: str, tmp_path: Path) -> None:
    """B = n/N · ½ mean V(s₀) and D of rollouts n/N · ½ mean V(u₀), so their ratio is that of the logged first values."""
    changes: dict[str, Any] = {} if source == "data" else {"model_value_from": source}
    run = trainer(tmp_path, policy(initializer_range=0.5), divergence=divergence, max_steps=1, **changes)
    run.train()
    line = run.state.log_history[0]
    ratio = line["values/rollouts/first"] / line["values/data/first"]
    assert abs(ratio - 1) > 1e-3
    found = line["objective/model_value"] / line["objective/data_value"]
    assert found == pytest.approx(1 if source == "data" else ratio, rel=1e-5)  # float32 sums of some forty terms


def test_averages_are_over_all_steps_since_the_last_line(tmp_path: Path) -> None:
    every, third = trainer(tmp_path / "1", max_steps=6), trainer(tmp_path / "3", max_steps=6, logging_steps=3)
    for run in (every, third):
        run.train()
    ones, threes = ([e for e in run.state.log_history if "loss" in e] for run in (every, third))
    assert (len(ones), len(threes)) == (6, 2)
    for name in ("loss", "objective", "loss/bc", "bc_weight"):
        for part, entry in enumerate(threes):
            assert entry[name] == pytest.approx(sum(e[name] for e in ones[3 * part : 3 * part + 3]) / 3, rel=1e-5)


def test_during_cloning_and_without_an_on_policy_term_no_rollouts_are_made(tmp_path: Path) -> None:
    cloning, without = trainer(tmp_path / "1", bc_steps=2, bc_anneal_steps=5), trainer(tmp_path / "2", divergence="js")
    for run in (cloning, without):
        run.train()
    has_rollouts = [["rewards/rollouts/mean" in e for e in run.state.log_history[:4]] for run in (cloning, without)]
    assert has_rollouts == [[False, False, False, True], [False] * 4]
    assert (cloning.on_policy.buffer.made, without.on_policy.buffer.made) == (8, 0)


def test_the_policy_changes_and_a_frozen_row_does_not(tmp_path: Path) -> None:
    for objective, moves in (("sequencematch", True), ("mle", False)):
        learner = policy()
        before = {name: p.detach().clone() for name, p in learner.named_parameters()}
        trainer(tmp_path / objective, learner, objective=objective).train()
        changed = {name for name, p in learner.named_parameters() if not torch.equal(p, before[name])}
        assert ("backspace.row" in changed) == ("backspace.offset_out.weight" in changed) == moves
        assert "model.model.layers.0.self_attn.q_proj.weight" in changed


def test_packing_and_worker_processes_change_no_loss(tmp_path: Path) -> None:
    """Up to float32 rounding, which differs with the shape of a batch."""
    plain, packed, workers = (
        trainer(tmp_path / name, noise_rate=0.3, **changes)
        for name, changes in (
            ("plain", {}),
            ("packed", {"packing": True}),
            ("workers", {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}),
        )
    )
    for run in (plain, packed, workers):
        run.train()
    # Garbage collection of a loader whose workers are persistent waits five seconds for each of them.
    workers.callback_handler.train_dataloader._iterator._shutdown_workers()
    assert losses(packed) == pytest.approx(losses(plain), rel=2e-5)
    assert losses(workers) == losses(plain)


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    plain, checkpointed = (trainer(tmp_path / str(on), gradient_checkpointing=on) for on in (False, True))
    for run in (plain, checkpointed):
        run.train()
    assert checkpointed.model.base.is_gradient_checkpointing
    assert losses(checkpointed) == pytest.approx(losses(plain), rel=1e-6)


def test_bfloat16_trains_and_its_rollouts_too(tmp_path: Path) -> None:
    plain, half = (trainer(tmp_path / str(on), bf16=on) for on in (False, True))
    for run in (plain, half):
        run.train()
    assert losses(half) == pytest.approx(losses(plain), rel=0.02)  # bfloat16 has eight bits
    assert losses(half) != losses(plain)


def test_noise_from_the_model_is_what_it_finds_likely(tmp_path: Path) -> None:
    """A model that gives nearly all its mass to one token: that is its mistake wherever it isn't right."""
    learner = policy()
    favourite = 9
    with torch.no_grad():
        learner.base.lm_head.weight.zero_()
    learner.base.lm_head.bias = torch.nn.Parameter(torch.zeros(48).index_fill(0, torch.tensor([favourite]), 50.0))
    run = trainer(tmp_path, learner, noise_source="model", noise_rate=1.0, max_steps=1)
    batch = run.collate([run.train_dataset[i] for i in range(4)])
    for noised in run._data(batch):
        wrong = [(a, e) for a, e in zip(noised.chosen, noised.executed, strict=True) if a != e]
        assert wrong
        assert all(e == favourite or a == favourite for a, e in wrong)
    run.train()
    assert math.isfinite(losses(run)[0])


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
    steps = run.training_step

    def break_at_the_fifth(*arguments: Any, **options: Any) -> Any:
        if run.state.global_step == 4:
            with torch.no_grad():
                run.model.backspace.row.fill_(math.nan)
        return steps(*arguments, **options)

    run.training_step = break_at_the_fifth  # type: ignore[method-assign]
    with pytest.raises(
        NonFiniteError,
        match=r"The loss is nan, of .*loss/bc.* at step 5\. Weights are not finite \(backspace.row\)\. .* is .*/checkpoint-4\.",
    ):
        run.train()
    again = trainer(tmp_path, max_steps=6, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert all(parameter.isfinite().all() for parameter in again.model.parameters())


def test_a_gradient_that_is_no_number_stops_the_run_before_it_is_used(tmp_path: Path) -> None:
    learner = policy()
    learner.backspace.row.register_hook(lambda gradient: gradient * math.inf)
    before = learner.base.lm_head.weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"The gradient's norm is (nan|inf) at step 1"):
        trainer(tmp_path, learner).train()
    assert torch.equal(learner.base.lm_head.weight, before)


def test_a_saved_run_is_a_policy_with_a_card(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    run.save_model()
    loaded = Policy.from_pretrained(tmp_path / "run")
    prompts = [row["prompt"] for row in rows()]
    written, read = (p.generate(prompts, max_new_tokens=6, seed=1).trajectories for p in (run.model, loaded))
    assert [t.chosen for t in written] == [t.chosen for t in read]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "library_name: sequencematch" in card
    assert "| `divergence` | chi2_mixture |" in card
    assert (tmp_path / "run" / "checkpoint-4" / "README.md").is_file()


def test_the_same_script_works_with_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = config(tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    run = SequenceMatchTrainer(model=policy(), args=args, train_dataset=rows(), peft_config=lora)
    base = run.model.base.lm_head.weight.detach().clone()
    run.train()
    moved = (run.model.base.lm_head.weight - base).abs().sum(1)
    assert moved.nonzero().flatten().tolist() == [run.model.space.eos]  # the other rows are frozen
    adapted = [p for name, p in run.model.named_parameters() if "lora_B" in name]
    assert adapted
    assert all(p.abs().sum() > 0 for p in adapted)  # they start at zero
    names = {path.name for path in (tmp_path / "run" / "checkpoint-6").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_adapters_train_fused_and_as_they_do_in_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")

    def made(name: str, **changes: Any) -> SequenceMatchTrainer:
        args = config(tmp_path / name, max_steps=3, **changes)
        return SequenceMatchTrainer(model=policy(), args=args, train_dataset=rows(), peft_config=lora)

    ours, plain, disabled = made("ours"), made("plain"), made("disabled")
    assert len(ours.fusions) == sum(hasattr(module, "lora_A") for module in ours.model.modules()) > 0
    ours.fusions, plain.fusions, disabled.fusions = strict(ours.fusions), [], strict(disabled.fusions)
    ours.train()
    plain.train()
    with pytest.raises(AssertionError, match="fell back"), disabled.model.model.disable_adapter():
        disabled.train()  # control: steps are fused, and the adapter's state counts
    assert not any("forward" in vars(module) for module in ours.model.modules())
    assert not made("compiled", compile_layers=True).fusions
    monkeypatch.setattr("sequencematch.training.trainer.is_sharded", lambda _: True)
    assert not made("sharded").fusions
    for mine, its in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_evaluation_gives_the_loss_on_held_out_data_for_each_set(tmp_path: Path) -> None:
    args = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, objective="bc", noise_rate=0.2)
    sets = {"seen": rows()[:4], "other": [{"prompt": "z", "completion": "zz zz"}]}
    run = SequenceMatchTrainer(model=policy(), args=args, train_dataset=rows(), eval_dataset=sets)
    run.train()
    logged = {name: e[name] for e in run.state.log_history for name in e if name.endswith("_loss")}
    assert set(logged) >= {"eval_seen_loss", "eval_other_loss"}
    assert all(math.isfinite(value) for value in logged.values())
    first, second = (run.evaluate()["eval_seen_loss"] for _ in range(2))
    assert first == second  # its noise is the same every time


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    args = config(
        tmp_path, max_steps=8, learning_rate=0.3, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=False, save_total_limit=2, objective="mle", **options,
    )  # fmt: skip
    run = SequenceMatchTrainer(model=policy(), args=args, train_dataset=rows(), eval_dataset=rows())
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-6)
    assert Path(best).is_dir()


def test_rollouts_come_from_whoever_is_asked(tmp_path: Path) -> None:
    """A source that counts: it is started once, told of every version, and stopped."""

    class Counting(InlineRollouts):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def start(self, *arguments: Any) -> None:
            self.calls.append("start")
            super().start(*arguments)

        def sync(self, version: int) -> None:
            self.calls.append(f"sync {version}")
            super().sync(version)

        def stop(self) -> None:
            self.calls.append("stop")

    source = Counting()
    assert isinstance(source, RolloutSource)
    args = config(tmp_path, max_steps=5, replay_reuse=1)
    SequenceMatchTrainer(model=policy(), args=args, train_dataset=rows(), rollouts=source).train()
    assert source.calls == ["start", "sync 0", "sync 2", "sync 4", "stop"]


def test_sample_rollouts_are_printed_with_their_deletions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, max_steps=1, log_completions=True, num_completions_to_print=2)
    space = run.model.space
    run.train()
    printed = capsys.readouterr().err
    assert "rollouts at step 0" in printed
    assert printed.split("rollouts at step 0")[1].count("\n") >= 3
    run.progress.show(run.model, [Trajectory.rollout(space, (4, 5), (6, space.bkspc, 7, space.eos))], 7)
    assert "abc<bkspc>d<eos>" in capsys.readouterr().err  # on a terminal the c is struck through


def test_a_run_is_the_same_twice_and_another_with_another_seed(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / str(n), policy(), seed=seed, noise_rate=0.3) for n, seed in enumerate([1, 1, 2])]
    for run in runs:
        run.train()
    entries = [[{k: v for k, v in e.items() if k not in TIMES} for e in run.state.log_history[:-1]] for run in runs]
    assert json.dumps(entries[0]) == json.dumps(entries[1])
    assert losses(runs[0]) != losses(runs[2])


def test_a_run_that_would_only_clone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`bc_steps`=10 must be below the run's 4 steps, or Eq. 4 is never used"):
        trainer(tmp_path, bc_steps=10).train()


def test_a_policy_can_be_trained_again_with_another_objective(tmp_path: Path) -> None:
    learner = policy()
    trainer(tmp_path / "first", learner, objective="mle").train()
    row = learner.backspace.row.detach().clone()
    trainer(tmp_path / "second", learner).train()
    assert not torch.equal(learner.backspace.row, row)


def test_an_adapter_on_a_trained_policy_keeps_its_row(tmp_path: Path) -> None:
    from peft import LoraConfig

    learner = policy()
    with torch.no_grad():
        learner.backspace.row.fill_(7.0)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    run = SequenceMatchTrainer(model=learner, args=config(tmp_path), train_dataset=rows(), peft_config=lora)
    assert run.model.backspace.row.eq(7).all()


def test_the_evaluation_loss_is_over_all_decisions_however_they_are_batched(tmp_path: Path) -> None:
    """By hand: the sum of −log p over all decisions, each sequence scored alone, over their number."""
    learner = policy()
    found = []
    for size in (1, 5, 12):
        args = config(tmp_path / str(size), objective="mle", per_device_eval_batch_size=size)
        run = SequenceMatchTrainer(model=learner, args=args, train_dataset=rows(), eval_dataset=rows())
        found.append(run.evaluate()["eval_loss"])
    total, decisions = 0.0, 0
    for row in rows():
        tokens = torch.tensor([[*learner.tokenizer(row["prompt"] + row["completion"])["input_ids"], 2]])  # type: ignore[misc]
        log_probs = learner.base(input_ids=tokens).logits[0].log_softmax(-1).detach()
        total -= float(log_probs[torch.arange(tokens.shape[1] - 1), tokens[0, 1:]].sum())
        decisions += tokens.shape[1] - 1
    assert found == pytest.approx([total / decisions] * 3, rel=1e-5)


def test_the_evaluation_loss_of_unlikelihood_has_its_weight(tmp_path: Path) -> None:
    learner, found = policy(), []
    for weight in (0.0, 2.0):
        args = config(tmp_path / str(weight), objective="unlikelihood", unlikelihood_weight=weight)
        run = SequenceMatchTrainer(model=learner, args=args, train_dataset=rows(), eval_dataset=rows())
        found.append(run.evaluate()["eval_loss"])
    assert found[1] > found[0] + 0.01


def test_a_term_is_averaged_over_the_steps_that_had_it(tmp_path: Path) -> None:
    """Eq. 4 counts from the third step on, of six in one log line."""
    settings: dict[str, Any] = {"max_steps": 6, "bc_steps": 2, "bc_anneal_steps": 0}
    whole, single = trainer(tmp_path / "6", logging_steps=6, **settings), trainer(tmp_path / "1", **settings)
    for run in (whole, single):
        run.train()
    objective = [e["objective"] for e in single.state.log_history if "objective" in e]
    assert len(objective) == 4
    assert whole.state.log_history[0]["objective"] == pytest.approx(sum(objective) / 4, rel=1e-5)


def test_prompts_of_rollouts_may_come_from_another_dataset_without_answers(tmp_path: Path) -> None:
    run = trainer(tmp_path, rollout_dataset=[{"prompt": "x"}, {"prompt": "yz"}], max_steps=6, replay_reuse=1)
    run.train()
    assert {e.trajectory.initial for e in run.on_policy.buffer.rollouts} == {ids("x"), ids("yz")}
    assert {e.right for e in run.on_policy.buffer.rollouts} == {None}
    line = run.state.log_history[0]
    assert line["objective/model_value"] == pytest.approx(line["objective/data_value"])
    plain = trainer(tmp_path / "plain", model_value_from="rollouts")
    plain.train()
    entry = plain.state.log_history[0]
    assert entry["objective/model_value"] != pytest.approx(entry["objective/data_value"])
    with pytest.raises(
        ValueError,
        match=r"`model_value_from` must be 'data' with a `rollout_dataset`: .* Got 'rollouts'; leave it out\.",
    ):
        trainer(tmp_path / "refused", rollout_dataset=[{"prompt": "x"}], model_value_from="rollouts")
    for changes, named in (
        ({"objective": "bc"}, "'bc'"),
        ({"divergence": "js"}, "'sequencematch' with divergence 'js'"),
    ):
        with pytest.raises(
            ValueError, match=f"`rollout_dataset` would be ignored: objective {named}.* makes no rollouts"
        ):
            trainer(tmp_path / "refused", rollout_dataset=[{"prompt": "x"}], **changes)
    with pytest.raises(ValueError, match=r"Row 0 of the dataset must have the columns `text`, `prompt`, `messages`"):
        trainer(tmp_path / "refused", rollout_dataset=[{"completion": "x"}])


def test_settings_of_rollouts_and_noise_reach_them(tmp_path: Path) -> None:
    prompts = [{"prompt": "abc", "completion": "def"}] * 4
    run = trainer(tmp_path, dataset=prompts, protect_prompt=True, temperature=0.7, noise_burst=2, noise_rate=1.0)
    run.train()
    assert all(e.trajectory.floor == 3 for e in run.on_policy.buffer.rollouts)
    assert run.on_policy.source.sampling.temperature == 0.7  # type: ignore[attr-defined]
    bkspc = run.model.space.bkspc
    executed = [action for row in range(4) for action in run.collate.trajectory(run.train_dataset[row]).executed]
    runs = [len(list(actions)) for deletes, actions in itertools.groupby(executed, bkspc.__eq__) if deletes]
    assert (len(runs), set(runs)) == (16, {1, 2})
    plain = trainer(tmp_path / "plain", dataset=prompts, mixture_weight=0.25, noise_excludes_right=False)
    assert plain.collate.noise_excludes_right is False
    assert plain.args.divergence_value.on_policy == pytest.approx(0.5 * 0.75)


def test_rollouts_stop_where_the_context_ends_and_prefixes_leave_room(tmp_path: Path) -> None:
    """A model of 64 positions: prompts of 60 tokens, and text whose prefix could fill `max_length`."""
    long = [{"prompt": "a" * 60, "completion": "b"}] * 4
    run = trainer(tmp_path / "long", dataset=long, max_length=64, max_completion_length=50)
    run.train()
    assert all(len(e.trajectory.final_state.tokens) <= 65 for e in run.on_policy.buffer.rollouts)
    text = trainer(tmp_path / "text", dataset=[{"text": "abcdefgh" * 4}] * 4, max_length=12, max_prompt_length=40)
    text.train()
    assert all(e.trajectory.num_nodes <= 12 for e in text.on_policy.buffer.rollouts)


def test_what_a_policy_can_not_do_is_refused(tmp_path: Path) -> None:
    for changes, text in (
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` is not supported"),
        ({"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` is not supported"),
        ({"train_sampling_strategy": "group_by_length"}, "must be 'random' or 'sequential'"),
        ({"replay_size": 4}, "`replay_size` must be at least `generation_batch_size`"),
    ):
        with pytest.raises(ValueError, match=text):
            config(tmp_path, **changes)


def test_rows_of_tokens_may_end_in_eos_without_a_tokenizer(tmp_path: Path) -> None:
    data = [{"input_ids": [5, 6, 7, 2], "completion_mask": [0, 1, 1, 1]}] * 4
    run = SequenceMatchTrainer(model=llama(initializer_range=0.1), args=config(tmp_path), train_dataset=data)
    run.train()
    assert math.isfinite(losses(run)[-1])
