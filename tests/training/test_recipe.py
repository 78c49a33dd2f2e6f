"""A recipe is read and checked before anything is loaded, and a run can be made from it twice alike."""

import dataclasses
import importlib.util
import json
import re
import runpy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchTrainer, recipe
from sequencematch.training.config import OWN_FIELDS
from sequencematch.training.presets import PRESETS
from sequencematch.training.recipe import Recipe, documentation, read_recipe, run, summary
from tests.policy.tiny_models import character_tokenizer, llama
from tests.training import tiny_run

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, Any] = {
    "max_steps": 3,
    "bc_steps": 1,
    "bc_anneal_steps": 1,
    "per_device_train_batch_size": 4,
    "generation_batch_size": 4,
    "max_completion_length": 6,
    "max_length": 24,
    "learning_rate": 3e-3,
    "noise_source": "uniform",
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and its tokenizer on disk, in bfloat16."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    # 64 is a block of 4-bit weights.
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "initializer_range": 0.1}
    sizes["max_position_embeddings"] = 128
    llama(**sizes).bfloat16().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def file(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path, model)


def write(folder: Path, model: Path | str, /, **changes: Any) -> Path:
    """A recipe for a small run on a few words; a change to None leaves a setting out."""
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps(row | {"noise_tokens": list("aeiou")}) + "\n" for row in tiny_run.rows()))
    settings = {"model": str(model), "dataset": str(data), "output_dir": str(folder / "run"), **SMALL, **changes}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in settings.items() if value is not None}))
    return path


def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is loaded from here on: the arguments of every call of the model's loader."""
    calls: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def from_pretrained(*names: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*names, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return calls


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{path.name} {name}": t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def check_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() != set()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# Reading.


def test_a_recipe_holds_its_own_settings_beside_those_of_the_config(file: Path) -> None:
    read = read_recipe(file)
    assert Path(read.dataset).name == "words.jsonl"
    assert (read.dtype, read.peft, read.output_dir) == ("float32", None, file.parent / "run")
    assert {name: getattr(read.config, name) for name in SMALL} == SMALL


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, preset="arithmetic", learning_rate=1e-5, bc_steps=7, max_steps=None)
    config = read_recipe(path, ["--learning-rate", "2e-5", "--packing"]).config
    assert config.learning_rate == 2e-5
    assert config.packing
    assert config.bc_steps == 7
    assert config.max_steps == PRESETS["arithmetic"]["max_steps"] != SMALL["max_steps"]


def test_peft_is_a_lora_config_and_its_parts_can_be_flags(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, peft={"r": 8, "target_modules": ["q_proj"]})
    adapter = read_recipe(path, ["--peft.lora-alpha", "4", "--peft.r=2"]).peft_config()
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (2, 4, {"q_proj"})
    assert adapter.task_type == "CAUSAL_LM"
    assert read_recipe(path, ["--peft", "null"]).peft_config() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "recipe.yaml must say what to train. Add a line `model: …`, or a flag `--model …`."),
        ({"dataset": ""}, "recipe.yaml must say what to train on. Add a line `dataset: …`"),
        (
            {"output_dir": None},
            "recipe.yaml must say where the results go. Add a line `output_dir: …`, or a flag `--output-dir",
        ),
        ({"lerning_rate": 1}, "is not a setting; did you mean 'learning_rate'?"),
        ({"config": {}}, "`config` in "),
        ({"learning_rate": "fast"}, "must be a number. Got 'fast'."),
        ({"gamma": 1.5}, "`gamma` must lie strictly between 0 and 1"),
        ({"preset": "poetry"}, "`preset` must be one of text, arithmetic. Got 'poetry'"),
        ({"eval_strategy": "sometimes"}, "sometimes is not a valid IntervalStrategy"),
        (
            {"dtype": "float23"},
            "`dtype` must be one of float32, bfloat16, float16, auto. Got 'float23'; did you mean 'float32'?",
        ),
        ({"quantization": "3bit", "peft": {}}, "`quantization` must be one of 4bit. Got '3bit'"),
        ({"quantization": "4bit"}, "`quantization` needs an adapter: weights in 4 bits can't be trained. Add `peft`."),
        ({"peft": {"rank": 8}}, "`peft.rank` in "),
        ({"peft": {"r": "many"}}, "must be a whole number. Got 'many'."),
        ({"peft": {"modules_to_save": "lm_head"}}, "must be a list. Got 'lm_head'."),
        (
            {"eval_dataset": "a.txt"},
            "`eval_dataset` would be ignored. Say when to use it, as in `eval_strategy: epoch`.",
        ),
        ({"eval_strategy": "steps"}, "`eval_strategy` needs held-out data. Add an `eval_dataset`."),
        ({"dataset_split": "train"}, "`dataset_split` would be ignored: "),
        ({"dataset_config": "en"}, "words.jsonl is a file. Leave it out."),
        ({"eval_split": "test"}, "`eval_split` would be ignored: there is no `eval_dataset`. Leave it out."),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    calls = loaded(monkeypatch)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        run(read_recipe(write(tmp_path, model, **changes)))
    assert message in str(error.value)
    assert calls == []


def test_a_wrong_part_of_peft_is_named_by_its_line_or_flag(tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, model, peft={"r": 8})
    line = 1 + path.read_text().splitlines().index("peft:")
    with pytest.raises(ValueError, match=r"^`--peft\.lora-alpa` is not a setting; did you mean 'lora_alpha'\?"):
        read_recipe(path, ["--peft.lora-alpa", "3"])
    path.write_text(path.read_text().replace("r: 8", "lora_r: 8"))
    with pytest.raises(ValueError, match=rf"^`peft\.lora_r` in {re.escape(str(path))}, line {line}, is not a setting"):
        read_recipe(path)


@pytest.mark.parametrize(("package", "setting"), [("peft", "peft"), ("bitsandbytes", "quantization")])
def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, package: str, setting: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))
    with pytest.raises(ValueError, match=rf"`{setting}` needs the package {package}: pip install 'sequencematch\["):
        read_recipe(write(tmp_path, model, peft={}, quantization="4bit"))


def test_rollouts_may_have_prompts_of_their_own(tmp_path: Path, model: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": "yz"}\n')
    path = write(tmp_path, model, rollout_dataset=str(prompts))
    assert "# rollout_dataset: 2 rows, prompts of up to 2 tokens, completions of up to 0" in summary(read_recipe(path))
    trained = run(read_recipe(path))
    assert {len(e.trajectory.initial) for e in trained.on_policy.buffer.rollouts} <= {1, 2}
    assert trained.has_own_prompts
    with pytest.raises(ValueError, match="`rollout_dataset` would be ignored: objective 'bc'"):
        read_recipe(path, ["--objective", "bc"])
    with pytest.raises(ValueError, match="`model_value_from` must be 'data' with a `rollout_dataset`"):
        read_recipe(path, ["--model-value-from", "rollouts"])


# The examples.


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_recipe_whose_data_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    read = read_recipe(path, ["--use-cpu"])  # so that bf16 is no matter of the machine
    assert read.config.objective == "sequencematch"
    if read.dataset.startswith("examples/"):  # others are on the hub, or written by `sequencematch data`
        rows, held_out = read.rows()
        questions = [row["prompt"] for row in (*rows, *(held_out or []))]
        assert len(questions) == len(set(questions)) >= 50


def test_the_recipe_of_the_bundled_model_takes_d_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    assert read_recipe(EXAMPLES / "bundled_arithmetic.yaml", ["--use-cpu"]).config.model_value_from == "rollouts"


@pytest.mark.parametrize("task", ["arithmetic", "text"])
def test_the_papers_recipes_have_the_papers_numbers(task: str) -> None:
    read = read_recipe(EXAMPLES / f"llama2_{task}_qlora.yaml", ["--use-cpu"])
    adapter, config = read.peft_config(), read.config
    assert (read.preset, read.quantization) == (task, "4bit")
    assert (adapter.r, adapter.lora_alpha, adapter.modules_to_save) == (64, 16, ["lm_head"])
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 32
    assert (config.gradient_checkpointing, config.bf16) == (True, True)
    assert (config.warmup_steps, config.lr_scheduler_type) == (2000, "cosine")
    assert (config.bc_steps, config.bc_anneal_steps, config.bc_weight_final) == (
        {"arithmetic": 10_000, "text": 1_000}[task],
        2000,
        0.2,
    )
    assert (config.replay_size, config.replay_reuse) == (1000, 8)


def test_the_examples_answers_are_right_and_their_noise_is_the_digits_of_the_base() -> None:
    for path in EXAMPLES.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found = re.fullmatch(r"In base (\d+), what is (-?\d+) ([+-]) (-?\d+)\? Solution:", row["prompt"])
            assert found
            base, left, sign, right = int(found[1]), found[2], found[3], found[4]
            sum_ = int(left, base) + int(right, base) * (1 if sign == "+" else -1)
            assert (row["completion"][0], int(row["completion"], base)) == (" ", sum_)
            assert row["noise_tokens"] == [str(digit) for digit in range(base)]


def test_the_dates_are_right_and_their_recipe_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runpy.run_path(str(EXAMPLES / "dates.py"))["main"](tmp_path / "out" / "dates")
    monkeypatch.chdir(tmp_path)
    train, test = (
        [json.loads(line) for line in (tmp_path / "out" / "dates" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert (len(train), len(test)) == (4000, 300)
    assert not {row["completion"] for row in train} & {row["completion"] for row in test}
    months = {date(2000, month, 1).strftime("%B"): month for month in range(1, 13)}
    for row in test:
        words = re.findall(r"\w+", row["prompt"].removesuffix("? Solution:").replace("th of", ""))
        month = next((months[word] for word in words if word in months), None)
        numbers = [int(word) for word in words if word not in months]
        day, year = numbers[0], numbers[-1]
        assert row["completion"] == f" {date(year, numbers[1] if month is None else month, day).isoformat()}"
    short = tmp_path / "out" / "dates" / "train.jsonl"
    short.write_text("".join(json.dumps(row) + "\n" for row in train[:50]))
    shown = summary(read_recipe(EXAMPLES / "dates.yaml", ["--use-cpu"]))
    assert yaml.safe_load(shown)["noise_source"] == "tokens"
    assert "\n# dataset: 50 rows" in shown


def test_the_small_example_runs_and_half_its_steps_reach_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    flags = ["--output-dir", str(tmp_path / "run"), "--use-cpu", "--max-steps", "60"]
    flags += ["--per-device-train-batch-size", "4", "--generation-batch-size", "8"]
    trainer = run(read_recipe(EXAMPLES / "train_small.yaml", flags))
    assert trainer.state.global_step == 60
    assert any("objective" in entry for entry in trainer.state.log_history)
    assert isinstance(Policy.from_pretrained(tmp_path / "run" / "final"), Policy)


# Running.


def test_two_runs_of_a_recipe_are_equal_to_the_bit_and_another_seed_is_another_run(tmp_path: Path, model: Path) -> None:
    """The adapter and the offset head, which are drawn before the trainer seeds anything, too."""
    made = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.manual_seed(number)
        run(read_recipe(write(folder, model, peft={"r": 2}, seed=seed)))
        made.append(weights(folder / "run" / "final"))
    check_same(made[0], made[1])
    with pytest.raises(AssertionError):
        check_same(made[0], made[2])


def test_weights_are_kept_in_float32_unless_the_recipe_says_otherwise(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = loaded(monkeypatch)
    for dtype, expected in ((None, torch.float32), ("auto", torch.bfloat16)):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        trainer = run(read_recipe(write(folder, model, dtype=dtype, attn_implementation="eager")))
        assert trainer.model.base.dtype == expected
        assert calls[-1]["attn_implementation"] == trainer.model.base.config._attn_implementation == "eager"


def test_model_init_kwargs_of_a_recipe_reach_the_loader(tmp_path: Path, model: Path) -> None:
    read = read_recipe(write(tmp_path, model, model_init_kwargs={"dtype": "float16", "revision": "main"}))
    assert read.load_options() == {
        "dtype": "float16",
        "attn_implementation": None,
        "trust_remote_code": False,
        "revision": "main",
    }


def test_model_init_kwargs_are_no_part_of_what_makes_a_run(tmp_path: Path) -> None:
    config = tiny_run.config(tmp_path, model_init_kwargs={"dtype": torch.float32})
    assert "model_init_kwargs" not in config.own_values()
    json.dumps(config.own_values())
    with pytest.raises(ValueError, match="`model_init_kwargs` would be ignored: the model is loaded already"):
        SequenceMatchTrainer(tiny_run.policy(), config, tiny_run.rows())


def test_qlora_trains_the_adapter_the_unembedding_and_the_row_and_leaves_the_rest(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("bitsandbytes")
    changes = {
        "quantization": "4bit",
        "peft": {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
        "gradient_checkpointing": True,
        "bf16": True,
    }
    read = read_recipe(write(tmp_path, model, **changes))
    assert read.load_options()["quantization_config"] == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float32",
    }
    trainer = run(read)
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert all(
        "lora_" in name or "lm_head.modules_to_save" in name or name.startswith("backspace.") for name in trained
    )
    for part in ("lora_A", "lm_head.modules_to_save", "backspace.row"):
        assert any(part in name for name in trained)
    assert any(parameter.dtype == torch.uint8 for parameter in trainer.model.parameters())
    again = Policy.from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    assert torch.equal(again.backspace.row, trainer.model.backspace.row)
    assert torch.equal(again.unembedding().weight, trainer.model.unembedding().weight)


def test_held_out_data_is_evaluated(tmp_path: Path, model: Path) -> None:
    (tmp_path / "held_out.txt").write_text("moon\nriver\n")
    changes = {"eval_dataset": str(tmp_path / "held_out.txt"), "eval_strategy": "steps", "eval_steps": 1}
    (tmp_path / "texts.txt").write_text("cat\ndog\nhouse\ntree\n")
    trainer = run(read_recipe(write(tmp_path, model, **changes, dataset=str(tmp_path / "texts.txt"))))
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2, 3]


def test_a_run_is_not_started_over_and_goes_on_if_that_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--save-steps", "1"]
    run(read_recipe(file, [*flags, "--max-steps", "2"]), resume=True)  # nothing there yet
    calls = loaded(monkeypatch)
    with pytest.raises(
        ValueError, match=r"which has checkpoint-2\. Resume it with `--resume`, or choose another folder\."
    ):
        run(read_recipe(file, flags))
    assert calls == []
    trainer = run(read_recipe(file, flags), resume=True)
    assert [entry["step"] for entry in trainer.state.log_history if "train_runtime" in entry][-1] == 3


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(file: Path) -> None:
    run(read_recipe(file))
    (file.parent / "run" / "checkpoint-3" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="needs a complete checkpoint in"):
        run(read_recipe(file), resume=True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "words.jsonl, line 13) must have the columns `text`, `prompt` and `completion`"),
        ({"prompt": "a", "completion": "b" * 40}, "words.jsonl, line 13) must fit `max_length`=24."),
        (
            {"prompt": "a", "completion": "b", "noise_tokens": ["%"]},
            "must have `noise_tokens` that are ids or tokens of",
        ),
    ],
)
def test_a_bad_row_is_found_before_the_model_is_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], message: str
) -> None:
    with (file.parent / "words.jsonl").open("a") as data:
        data.write(json.dumps(row) + "\n")
    calls = loaded(monkeypatch)
    for attempt in (run, summary):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            attempt(read_recipe(file, ["--noise-source", "tokens"]))
        assert message in str(error.value)
    assert calls == []
    assert not (file.parent / "run").exists()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, tmp_path / "no such model")
    for attempt in (run, summary):
        with pytest.raises(
            ValueError, match=r"`model` must be a folder or a model on the hub\. Got '.*no such model': "
        ):
            attempt(read_recipe(path))


# What is printed.


def test_a_summary_is_the_same_recipe_in_full_and_says_how_much_data_there_is(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = loaded(monkeypatch)
    changes: dict[str, Any] = {
        "preset": "arithmetic",
        "peft": {"r": 2},
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
    }
    changes |= {"accelerator_config": {"non_blocking": True}, "learning_rate": None}
    read = read_recipe(write(tmp_path, model, **changes))
    text = summary(read)
    longest = max(len(word) for word in tiny_run.WORDS)
    assert text.endswith(
        f"\n# dataset: {len(tiny_run.WORDS)} rows, prompts of up to 1 tokens, completions of up to {longest - 1}"
    )
    assert calls == []
    (tmp_path / "full.yaml").write_text(text)
    again = read_recipe(tmp_path / "full.yaml")
    assert dataclasses.replace(again, preset="arithmetic", config=read.config) == read
    same = {f.name for f in dataclasses.fields(read.config)} - {"logging_dir"}
    for name in same:
        assert getattr(again.config, name) == getattr(read.config, name), name


def test_every_setting_is_documented() -> None:
    documented = [name for entries in documentation().values() for name, _ in entries]
    assert len(documented) == len(set(documented))
    own = {f.name for f in dataclasses.fields(Recipe)} - {"config"}
    assert own | {*OWN_FIELDS, "output_dir"} == set(documented)
    assert set(documented) <= set(recipe.SETTINGS)
