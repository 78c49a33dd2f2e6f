"""The configuration: the schedule, the paper's recipes, and errors before anything is loaded."""

import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer, checkpoints
from sequencematch.training.config import OWN_FIELDS
from sequencematch.training.presets import PRESETS
from tests.policy.tiny_models import character_tokenizer
from tests.training.tiny_run import config, rows, trainer


def test_the_schedule_by_hand(tmp_path: Path) -> None:
    """1 for ten steps, then down to 0.2 over four: 0.8, 0.6, 0.4 on the way."""
    args = config(tmp_path, bc_steps=10, bc_anneal_steps=4, bc_weight_final=0.2)
    weights = [args.bc_weight(step) for step in (0, 9, 10, 11, 12, 13, 14, 99)]
    assert weights == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_every_own_field_says_what_it_is() -> None:
    own = [f for f in fields(SequenceMatchConfig) if f.name in OWN_FIELDS]
    assert len(own) == len(OWN_FIELDS) >= 20
    for field in own:
        assert len(field.metadata["help"]) > 5, field.name


def test_the_presets_are_the_papers_recipes(tmp_path: Path) -> None:
    text = SequenceMatchConfig.from_preset("text", output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert (text.alpha, text.gamma, text.noise_rate, text.bc_steps, text.max_steps) == (0.01, 0.998, 0.001, 1000, 5000)
    assert (text.max_length, text.max_prompt_length, text.replay_size, text.replay_reuse) == (1024, 256, 1000, 8)
    arithmetic = SequenceMatchConfig.from_preset("arithmetic", output_dir=str(tmp_path), use_cpu=True, alpha=0.1)
    assert (arithmetic.bc_steps, arithmetic.bc_anneal_steps, arithmetic.bc_weight_final) == (10000, 2000, 0.2)
    assert (arithmetic.noise_source, arithmetic.alpha, arithmetic.per_device_train_batch_size) == ("tokens", 0.1, 32)
    known = {f.name for f in fields(SequenceMatchConfig)}
    assert all(set(values) <= known for values in PRESETS.values())


def test_all_other_fields_are_those_of_transformers() -> None:
    inherited = {f.name for f in fields(TrainingArguments)}
    assert {f.name for f in fields(SequenceMatchConfig)} == inherited | set(OWN_FIELDS)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "divergence": ({"divergence": "chi2_mixtur"}, "`divergence` must be one of .* did you mean 'chi2_mixture'"),
    "objective": ({"objective": "mlee"}, "`objective` must be one of .* did you mean 'mle'"),
    "noise source": ({"noise_source": "token"}, "`noise_source` must be one of .* did you mean 'tokens'"),
    "gamma": ({"gamma": 1.0}, "`gamma` must lie strictly between 0 and 1"),
    "alpha": ({"alpha": 0.0}, "`alpha` must be positive"),
    "noise rate": ({"noise_rate": 1.5}, r"`noise_rate` must be a probability"),
    "ignored noise": ({"objective": "mle", "noise_rate": 0.1}, "`noise_rate` would be ignored"),
    "ignored bursts": (
        {"noise_rate": 0.0, "noise_burst": 2},
        "`noise_burst` would be ignored: `noise_rate` is 0. Got noise_burst=2; leave it out, or set `noise_rate`.",
    ),
    "ignored corrections": ({"correction_rate": 0.5}, "`correction_rate` would be ignored: it is for objective 'bc'"),
    "endless corrections": ({"objective": "bc", "correction_rate": float("inf")}, "`correction_rate` must be finite"),
    "corrections": ({"objective": "bc", "correction_rate": -1.0}, "`correction_rate` must not be negative"),
    "ignored mixture": ({"divergence": "js", "mixture_weight": 0.4}, "`mixture_weight` would be ignored"),
    "source of D": (
        {"model_value_from": "rollout"},
        "`model_value_from` must be one of data, rollouts. Got 'rollout'; did you mean 'rollouts'",
    ),
    "D without an on-policy term": (
        {"model_value_from": "rollouts", "mixture_weight": 1.0},
        "`model_value_from` would be ignored: objective 'sequencematch' with divergence 'chi2_mixture' makes no rollouts",
    ),
    "D of cloning": (
        {"model_value_from": "rollouts", "objective": "bc"},
        "`model_value_from` would be ignored: objective 'bc' .* makes no rollouts. Got 'rollouts'; leave it out.",
    ),
    "mixture": ({"mixture_weight": 0.0}, "`mixture_weight` must lie in"),
    "packing": ({"objective": "unlikelihood", "packing": True}, "`packing` must be off for objective 'unlikelihood'"),
    "reuse": ({"replay_reuse": 0}, "`replay_reuse` must be positive"),
    "size": ({"replay_size": 0}, "`replay_size` must be at least 1"),
    "steps": ({"bc_steps": -1}, "`bc_steps` must not be negative"),
    "weight": ({"bc_weight_final": 1.2}, "`bc_weight_final` must be a weight"),
    "temperature": ({"temperature": 0.0}, "`temperature` must be positive"),
    "length": ({"max_length": 1}, "`max_length` must leave room"),
    "columns": ({"remove_unused_columns": True}, "`remove_unused_columns` must stay False"),
}


@pytest.mark.parametrize(("changes", "text"), BAD.values(), ids=BAD.keys())
def test_a_bad_setting_is_named(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        config(tmp_path, **changes)


def test_an_unknown_preset_and_an_unknown_field_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`preset` must be one of text, arithmetic. Got 'txt'; did you mean 'text'"):
        SequenceMatchConfig.from_preset("txt", output_dir=str(tmp_path))
    with pytest.raises(TypeError, match="noise_rat"):
        SequenceMatchConfig(output_dir=str(tmp_path), noise_rat=0.1)


DATASETS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "columns": ([{"txt": "a"}], {}, r"Row 0 of the dataset must have the columns .* Got 'txt'"),
    "no completion": ([{"prompt": "a"}], {}, r"Row 0 of the dataset must have the columns"),
    "empty": ([], {}, "`train_dataset` must hold at least one row"),
    "text": ("a file", {}, "`train_dataset` must be a dataset or a list of dicts. Got text"),
    "a row": ({"text": "a"}, {}, "`train_dataset` must be a dataset or a list of dicts. Got one dict"),
    "no dict": (["a"], {}, "Row 0 of the dataset must be a dict"),
    "long completion": (
        [*rows(), {"prompt": "a", "completion": "b" * 40}],
        {},
        r"Row 12 of the dataset must fit `max_length`=32. Got a prompt of 1 and a completion of 40 tokens and <eos>",
    ),
    "long prompt": ([{"prompt": "a" * 32, "completion": "b"}], {}, "Row 0 .* must leave room after its prompt"),
    "no noise tokens": (rows(), {"noise_source": "tokens"}, "Row 0 .* must have a column `noise_tokens`"),
    "not text": ([{"text": 3}], {}, "Row 0 .* must have text in `text`. Got int"),
    "no template": (
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        {},
        "Row 0 .* need a tokenizer with a chat template",
    ),
    "nothing": (None, {}, "`train_dataset` must be given"),
}


@pytest.mark.parametrize(("dataset", "changes", "text"), DATASETS.values(), ids=DATASETS.keys())
def test_a_bad_dataset_is_named_before_a_model_is_loaded(
    dataset: Any, changes: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Policy, "from_pretrained", refuse)
    args = config(tmp_path, **changes)
    with pytest.raises(ValueError, match=text):
        SequenceMatchTrainer("some/model", args, train_dataset=dataset, processing_class=character_tokenizer())
    # Control: with a good dataset the model is what comes next.
    good = [{**row, "noise_tokens": ["a", "b"]} for row in rows()]
    with pytest.raises(AssertionError, match="a model was loaded"):
        SequenceMatchTrainer("some/model", args, train_dataset=good, processing_class=character_tokenizer())


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"must not hold another run. Got .* whose run had alpha=0.01 and not 0.5"):
        trainer(tmp_path, alpha=0.5)
    again = trainer(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"which has checkpoint-2. Resume it with `resume_from_checkpoint=True`"):
        again.train()


def test_a_run_that_took_d_from_rollouts_is_not_resumed_with_that_of_the_data(tmp_path: Path) -> None:
    """As all older versions did, whose run files don't say so."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, max_steps=1, model_value_from="rollouts", **saving).train()
    path = tmp_path / "run" / checkpoints.RUN
    begun = json.loads(path.read_text())
    assert begun.pop("model_value_from") == "rollouts"
    for known in (begun, begun | {"model_value_from": "rollouts"}):
        path.write_text(json.dumps(known))
        with pytest.raises(
            ValueError,
            match=r"whose run had model_value_from='rollouts' and not 'data'\. .* set `model_value_from` to 'rollouts'\.",
        ):
            trainer(tmp_path, max_steps=2, resume_anyway=True)
    path.write_text(json.dumps(begun))
    resumed = trainer(tmp_path, max_steps=2, model_value_from="rollouts", **saving)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert json.loads(path.read_text())["model_value_from"] == "rollouts"


@pytest.mark.parametrize(
    "changes",
    [{"objective": "bc"}, {"divergence": "js"}, {"rollout_dataset": [{"prompt": "x"}, {"prompt": "yz"}]}],
    ids=["no rollouts", "no on-policy term", "prompts of their own"],
)
def test_an_older_run_without_d_of_rollouts_is_resumed(changes: dict[str, Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, max_steps=1, **saving, **changes).train()
    path = tmp_path / "run" / checkpoints.RUN
    begun = json.loads(path.read_text())
    del begun["model_value_from"]
    path.write_text(json.dumps(begun))
    resumed = trainer(tmp_path, max_steps=2, **saving, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_deepspeed_is_asked_for_where_it_is_missing(tmp_path: Path) -> None:
    text = r"`deepspeed` needs the package deepspeed: pip install 'sequencematch\[deepspeed\]'\."
    with pytest.raises(ValueError, match=text):
        config(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize("wrong", [{"split_batches": True}, {"even_batches": False}])
def test_batches_must_be_equal_in_all_processes(wrong: dict[str, bool], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`accelerator_config` must leave `split_batches` off and `even_batches` on"):
        trainer(tmp_path, accelerator_config=wrong)


def test_a_context_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`max_length` must fit the model's context of 64 tokens. Got 65"):
        trainer(tmp_path, max_length=65)


def test_plain_text_has_no_completions_to_score_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`completion_only_loss` needs examples with prompts"):
        trainer(tmp_path, dataset=[{"text": "a cat"}], completion_only_loss=True)
