"""A run as a file: model, data and settings, from YAML and flags; checked before a model is loaded."""

import copy
import json
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from sequencematch.data import settings
from sequencematch.data.examples import CHECKED_ROWS
from sequencematch.data.folders import check_folder
from sequencematch.data.rows import ENDINGS, ending, read_rows
from sequencematch.data.spelling import check_choice
from sequencematch.extras import require
from sequencematch.training import checkpoints
from sequencematch.training.config import OWN_FIELDS, SequenceMatchConfig
from sequencematch.training.inputs import prepare
from sequencematch.training.presets import PRESETS
from sequencematch.training.stopping import stopped_by_sigterm
from sequencematch.training.trainer import SequenceMatchTrainer

#: Dtypes of the weights; auto: as saved.
DTYPES = ("float32", "bfloat16", "float16", "auto")
#: Ways to load a model in few bits, as `transformers.BitsAndBytesConfig` has them; 4bit is QLoRA's.
QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {"4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}}
)
#: Fields of `TrainingArguments` that a summary shows even at their defaults.
_ALWAYS_SHOWN = (
    "output_dir",
    "use_cpu",
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
)
#: Where the policy goes when the run has ended, inside `output_dir`.
FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Model, data and settings of a run. A YAML file holds these fields and those of `config` side by side."""

    model: str = field(metadata={"help": "A folder, or a model on the hub."})
    dataset: str = field(
        metadata={"help": f"A file ({', '.join(ENDINGS)} with one text a line), or a dataset on the hub."}
    )
    config: SequenceMatchConfig
    preset: str | None = field(
        default=None, metadata={"help": f"The paper's settings to start from: {' or '.join(PRESETS)}."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Which configuration of a dataset on the hub."})
    dataset_split: str | None = field(
        default=None, metadata={"help": "Which split of a dataset on the hub. Default: train."}
    )
    eval_dataset: str | None = field(
        default=None, metadata={"help": "Held-out data, given like dataset. Needs eval_strategy: steps or epoch."}
    )
    eval_split: str | None = field(default=None, metadata={"help": "Which split of it, on the hub. Default: test."})
    rollout_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Prompts that rollouts start from instead of dataset's, given like dataset; completions are not needed. "
            "Only the on-policy term E is taken from them. Not in the paper."
        },
    )
    peft: dict[str, Any] | None = field(
        default=None, metadata={"help": "Train an adapter: the fields of peft.LoraConfig, as a mapping."}
    )
    quantization: str | None = field(
        default=None, metadata={"help": "4bit keeps the model frozen in 4 bits under the adapter (QLoRA)."}
    )
    dtype: str = field(
        default="float32",
        metadata={"help": f"Dtype of the weights: {', '.join(DTYPES)}. To compute in bfloat16 set bf16."},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager, sdpa or flex_attention. Default: the model's own."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code from the model's repository."})

    def __post_init__(self) -> None:
        """Refuse settings that can't work or would be ignored."""
        check_choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
            require("bitsandbytes", "quantized", "`quantization`")
            if self.peft is None and not (Path(self.model) / "adapter_config.json").is_file():
                raise ValueError("`quantization` needs an adapter: weights in 4 bits can't be trained. Add `peft`.")
        if self.rollout_dataset is not None:
            self.config.check_rollout_dataset()
        evaluates = self.config.eval_strategy != "no"
        if self.eval_dataset is not None and not evaluates:
            raise ValueError("`eval_dataset` would be ignored. Say when to use it, as in `eval_strategy: epoch`.")
        if self.eval_dataset is None and evaluates:
            raise ValueError("`eval_strategy` needs held-out data. Add an `eval_dataset`.")
        for name, source in (
            ("dataset_config", self.dataset),
            ("dataset_split", self.dataset),
            ("eval_split", self.eval_dataset),
        ):
            if getattr(self, name) is not None and (source is None or ending(source) in ENDINGS):
                what = "there is no `eval_dataset`" if source is None else f"{source} is a file"
                raise ValueError(f"`{name}` would be ignored: {what}. Leave it out.")

    @property
    def output_dir(self) -> Path:
        """Where checkpoints go, and the policy."""
        return Path(self.config.output_dir)

    def rows(self) -> tuple[Any, Any]:
        """The data to train on, and held-out data or None."""
        rows = read_rows("dataset", self.dataset, self.dataset_config, self.dataset_split or "train")
        if self.eval_dataset is None:
            return rows, None
        config = self.dataset_config if self.eval_dataset == self.dataset else None
        return rows, read_rows("eval_dataset", self.eval_dataset, config, self.eval_split or "test")

    def rollout_rows(self) -> Any:
        """The prompts that rollouts start from, or None for those of the data."""
        return None if self.rollout_dataset is None else read_rows("rollout_dataset", self.rollout_dataset)

    def peft_config(self) -> Any:
        """The adapter to put on the model, or None."""
        if self.peft is None:
            return None
        from peft import LoraConfig

        return LoraConfig(**{"task_type": "CAUSAL_LM", **self.peft})

    def load_options(self) -> dict[str, Any]:
        """How the model is loaded: `model_init_kwargs` of the trainer."""
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }
        if self.quantization is not None:
            compute = "bfloat16" if self.config.device.type == "cuda" else "float32"
            options["quantization_config"] = {**QUANTIZATIONS[self.quantization], "bnb_4bit_compute_dtype": compute}
        return options | (self.config.model_init_kwargs or {})


_OWN = {f.name: f for f in fields(Recipe) if f.name != "config"}
_REQUIRED = {"model": "what to train", "dataset": "what to train on", "output_dir": "where the results go"}
#: Every setting a recipe may have → its type.
SETTINGS: Mapping[str, Any] = types.MappingProxyType(
    {f.name: typing.get_type_hints(SequenceMatchConfig)[f.name] for f in fields(SequenceMatchConfig) if f.init}
    | {name: typing.get_type_hints(Recipe)[name] for name in _OWN}
)


def read_recipe(path: str | Path, flags: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file, with flags such as `--learning-rate 1e-4` on top."""
    given, places = settings.override(*settings.read_yaml(Path(path)), dict(settings.parse_flags(flags, SETTINGS)))
    values = settings.typed(given, SETTINGS, places)
    for name, what in _REQUIRED.items():
        if not values.get(name):
            raise ValueError(
                f"{path} must say {what}. Add a line `{name}: …`, or a flag `--{name.replace('_', '-')} …`."
            )
    if values.get("peft") is not None:
        require("peft", "peft", "`peft`")
        from peft import LoraConfig

        inside = {name: places["peft"].replace("peft`", f"peft.{name}`") for name in values["peft"]}
        inside |= {name: places[f"peft.{name}"] for name in inside if f"peft.{name}" in places}
        values["peft"] = settings.typed(values["peft"], typing.get_type_hints(LoraConfig), inside)
    own = {name: values.pop(name) for name in _OWN if name in values}
    preset = own.get("preset")
    config = SequenceMatchConfig.from_preset(preset, **values) if preset else SequenceMatchConfig(**values)
    return Recipe(config=config, **own)


def run(recipe: Recipe, *, resume: bool = False, stops_at_sigterm: bool = False) -> SequenceMatchTrainer:
    """Train, and save the policy in `output_dir/final`; `resume` continues from the latest complete checkpoint, if any.

    Data is read and checked before the model is loaded. With `stops_at_sigterm`, SIGTERM ends the run by `StoppedEarlyError` after
    the step, with a checkpoint.
    """
    has_checkpoints = _check_output(recipe, resume=resume)
    rows, held_out = recipe.rows()
    prompts = recipe.rollout_rows()
    recipe.config.model_init_kwargs = recipe.load_options()
    trainer = SequenceMatchTrainer(
        recipe.model, recipe.config, rows, held_out, peft_config=recipe.peft_config(), rollout_dataset=prompts
    )
    with stopped_by_sigterm(trainer.stop) if stops_at_sigterm else nullcontext():
        trainer.train(resume_from_checkpoint=True if has_checkpoints and resume else None)
    trainer.save_model(str(recipe.output_dir / FINAL))
    return trainer


def summary(recipe: Recipe, *, resume: bool = False) -> str:
    """The recipe in full, as YAML, and the size of its data, its first 10,000 rows checked; no model is loaded.

    What `run` would refuse before it loads the model is refused here, too. Settings that were left open are those that the
    run would choose.
    """
    _check_output(recipe, resume=resume)
    loaded = copy.copy(recipe.config)
    loaded.model_init_kwargs = recipe.load_options()
    inputs = prepare(recipe.model, loaded, *recipe.rows(), rollout_rows=recipe.rollout_rows())
    read = {"dataset": inputs.examples, "eval_dataset": inputs.held_out}
    if recipe.rollout_dataset is not None:
        read["rollout_dataset"] = inputs.prompts
    sizes = [f"# {name}: {_size(examples)}" for name, examples in read.items() if examples is not None]
    config = recipe.config
    plain = SequenceMatchConfig(output_dir=config.output_dir, use_cpu=config.use_cpu)
    changed = [f.name for f in fields(config) if f.init and getattr(config, f.name) != getattr(plain, f.name)]
    values = {name: getattr(recipe, name) for name in _OWN if getattr(recipe, name) is not None}
    values.pop("preset", None)  # it is spelled out
    values |= {name: getattr(config, name) for name in (*_ALWAYS_SHOWN, *changed)} | inputs.args.own_values()
    return "\n".join([yaml.safe_dump(json.loads(json.dumps(values, default=vars)), sort_keys=False), *sizes])


def _check_output(recipe: Recipe, *, resume: bool) -> bool:
    """Whether `output_dir` has checkpoints, which are refused unless they are resumed; so is a place that can't be written."""
    found = checkpoints.checkpoints(recipe.output_dir)
    if found and not resume and not recipe.config.resume_from_checkpoint:
        raise ValueError(
            f"`output_dir` must not hold another run. Got {recipe.output_dir}, which has {found[0].name}. Resume it with "
            f"`--resume`, or choose another folder."
        )
    check_folder("output_dir", recipe.output_dir)
    return bool(found)


def describe_saved(recipe: Recipe) -> str:
    """One sentence about the checkpoints that an interrupted run has saved."""
    found = checkpoints.checkpoints(recipe.output_dir)
    return f"The last checkpoint is {found[0]}." if found else "There is no checkpoint yet."


def prompt(trainer: SequenceMatchTrainer) -> str:
    """Something to try the policy on: the first row's prompt, where it has one."""
    first = next(iter(trainer.train_dataset.rows))
    text = first.get("prompt")
    return text if isinstance(text, str) else "Once upon a time"


def documentation() -> dict[str, list[tuple[str, str]]]:
    """Heading → names of settings, with their help texts."""
    fields_of_config = {f.name: f for f in fields(SequenceMatchConfig)}
    return {
        "What to train": [
            _explained(_OWN["model"]),
            _explained(_OWN["dataset"]),
            ("output_dir", "Where checkpoints and the policy go. [required]"),
            *(_explained(setting) for name, setting in _OWN.items() if name not in _REQUIRED),
        ],
        "How to train": [_explained(fields_of_config[name]) for name in OWN_FIELDS],
    }


def _explained(setting: "Field[Any]") -> tuple[str, str]:
    default = setting.default
    note = "" if default is None else " [required]" if default is MISSING else f" [default: {default}]"
    return setting.name, setting.metadata["help"] + note


def _size(examples: Any) -> str:
    read = [examples[index] for index in range(min(len(examples), CHECKED_ROWS))]
    prompt, completion = max(len(e.prompt) for e in read), max(len(e.completion) for e in read)
    return f"{len(examples)} rows, prompts of up to {prompt} tokens, completions of up to {completion}"
