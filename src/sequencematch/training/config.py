"""The settings of a run: `SequenceMatchConfig`, with a preset for each of the paper's two recipes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from transformers import TrainingArguments

from sequencematch.data.spelling import check_choice
from sequencematch.extras import require
from sequencematch.training.losses import OBJECTIVES
from sequencematch.training.objective_settings import ObjectiveSettings
from sequencematch.training.presets import PRESETS
from sequencematch.training.rollout_settings import WHERE, RolloutSettings

#: A setting that the run chooses itself: see `training/defaults.py`.
AUTO = "auto"
#: Sources of wrong tokens: the vocabulary, a set given with each example, or the model's own mistakes; or one of the first two.
NOISE_SOURCES = (AUTO, "uniform", "tokens", "model")

#: Fields of `TrainingArguments` → the values that a policy supports.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "label_smoothing_factor": (0.0,),
        "neftune_noise_alpha": (None,),
        "include_num_input_tokens_seen": ("no", False),
        "train_sampling_strategy": ("random", "sequential"),
        "average_tokens_across_devices": (True,),
    }
)


@dataclass
class SequenceMatchConfig(ObjectiveSettings, RolloutSettings, TrainingArguments):
    """All settings of a run: these fields, and those of `transformers.TrainingArguments`   (Alg. 1, §6, App. E).

    The help texts name the paper's values; `from_preset` sets its numbers.
    """

    noise_rate: float | None = field(
        default=None,
        metadata={
            "help": "Probability η of a wrong token before each decision. Paper: 0.001 for text, up to 0.2 for arithmetic "
            "(§4.2, §6). Default: 0.1, and 0 for mle and unlikelihood."
        },
    )
    noise_source: str = field(
        default=AUTO,
        metadata={
            "help": "Wrong tokens: uniform (any token), tokens (the noise_tokens column; half of all bursts end in a token of "
            "the noise_ends column, if there is one, which is not in the paper), model (its own mistakes), or auto: tokens if "
            "rows have noise_tokens, else uniform (§6.1)."
        },
    )
    noise_burst: int = field(
        default=1,
        metadata={"help": "Longest burst of wrong tokens; lengths are uniform from 1 to this. Paper: 1 (§4.2)."},
    )
    noise_excludes_right: bool = field(
        default=True, metadata={"help": "Never draw the right token as noise. Paper: it may be drawn (§4.2)."}
    )

    bc_steps: int | None = field(
        default=None,
        metadata={
            "help": "Steps of behavioural cloning alone, without Eq. 4. Paper: 1,000 for text, 10,000 for arithmetic (App. E). "
            "Default: a fifth of the run, at most 1,000."
        },
    )
    bc_weight_final: float = field(
        default=0.2, metadata={"help": "Final weight of behavioural cloning; it starts at 1. Paper: 0.2 (App. E)."}
    )
    bc_anneal_steps: int | None = field(
        default=None,
        metadata={
            "help": "Steps over which bc_weight falls to bc_weight_final. Paper: 2,000 (App. E). Default: two fifths of the run, "
            "at most 2,000."
        },
    )

    offset_lr_multiplier: float = field(
        default=1.0,
        metadata={
            "help": "Learning rate of the offset head over learning_rate. Unless it is 1, the head's gradient is clipped apart "
            "from the rest. Paper: 1 (App. E)."
        },
    )

    correction_rate: float = field(
        default=0.0,
        metadata={
            "help": "Rollouts drawn per example with objective bc; the end of each wrong one is labelled with the right action: "
            "<bkspc>, or the next token. This is DAgger (Ross et al. 2011). Paper: none."
        },
    )

    replay_size: int = field(
        default=1000, metadata={"help": "Rollouts kept, the oldest replaced first. Paper: 1,000 (App. E)."}
    )
    replay_reuse: float = field(
        default=8.0, metadata={"help": "How often each rollout is trained on, on average. Paper: 8 (App. E)."}
    )
    generation_batch_size: int = field(
        default=64,
        metadata={"help": "Rollouts made at a time, over all processes; replay_reuse sets how often (App. E)."},
    )
    max_completion_length: int = field(
        default=256, metadata={"help": "Most tokens of a rollout after its prompt. Paper: 512 for text (§6.2)."}
    )
    max_prompt_length: int = field(
        default=256,
        metadata={
            "help": "Longest prefix of plain text that a rollout starts from; lengths are random. Paper: 256 (§6.2)."
        },
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of rollouts. Paper: 1 (App. E)."})
    protect_prompt: bool = field(
        default=False, metadata={"help": "Rollouts can't delete into their prompt. Paper: they can (§3.1)."}
    )

    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Context length T in tokens pushed; longer trajectories are cut (§4.2). Paper: 1,024 (§6.2). Default: the "
            "model's context, at most 1,024."
        },
    )
    truncation: bool | None = field(
        default=None,
        metadata={
            "help": "Whether examples longer than max_length are cut or are an error. Default: plain text is cut."
        },
    )
    completion_only_loss: bool | None = field(
        default=None,
        metadata={"help": "Leave prompts out of the loss. Default: yes where examples have prompts (App. E)."},
    )
    packing: bool | None = field(
        default=None,
        metadata={
            "help": "Pack several sequences into a row, with equal prompts shared. Results don't change. Default: on, except "
            "for unlikelihood."
        },
    )
    compile_layers: bool = field(
        default=False,
        metadata={
            "help": "torch.compile each decoder layer instead of using our fused kernels, for models that these don't fit."
        },
    )
    unlikelihood_weight: float = field(
        default=1.0, metadata={"help": "Weight of the unlikelihood loss beside mle (App. H.1; Welleck et al. 2020: 1)."}
    )

    model_init_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "How a model given by its name is loaded: the options of `Policy.from_pretrained`."},
    )

    resume_anyway: bool = field(
        default=False,
        metadata={
            "help": "Resume with another dataset or global batch size than the run began with. It is then not an exact resume."
        },
    )
    stop_after_minutes: float | None = field(
        default=None,
        metadata={
            "help": "Save a checkpoint and stop after the first step that ends so many minutes after training began: set it "
            "below the time limit of a job, with room for a step and a checkpoint."
        },
    )

    log_completions: bool = field(
        default=False, metadata={"help": "Print some of the new rollouts, with their deletions; trackers get a table."}
    )
    num_completions_to_print: int = field(default=3, metadata={"help": "Rollouts that log_completions shows."})

    logging_steps: float = field(default=10, metadata={"help": "Steps between two log lines."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay off: columns are read by the dataset."}
    )
    hub_strategy: Any = field(default="end", metadata={"help": "Must be end: a push is made when the policy is saved."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Off: a non-finite loss stops the run."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Off: every parameter is used."})
    dataloader_pin_memory: bool = field(
        default=False, metadata={"help": "Off: batches hold trajectories, not tensors."}
    )
    accelerator_config: Any = field(default=None, metadata={"help": "For accelerate; see TrainingArguments."})
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = field(
        default_factory=lambda: {"use_reentrant": False}, metadata={"help": "For torch.utils.checkpoint."}
    )

    def __post_init__(self) -> None:
        """Refuse settings that can't work, before a model is loaded."""
        self._check_objective()
        check_choice("noise_source", self.noise_source, NOISE_SOURCES)
        if self.noise_rate is None:
            self.noise_rate = 0.1 if self.objective_value.deletes else 0.0
        if not 0 <= self.noise_rate <= 1:
            raise ValueError(f"`noise_rate` must be a probability in [0, 1]. Got {self.noise_rate}.")
        if self.noise_rate and not self.objective_value.deletes:
            raise ValueError(
                f"`noise_rate` would be ignored: objective {self.objective!r} does not use <bkspc>. Got {self.noise_rate}; "
                f"leave it out or set it to 0, or use objective 'bc' or 'sequencematch'."
            )
        if self.noise_burst > 1 and not self.noise_rate:
            raise ValueError(
                f"`noise_burst` would be ignored: `noise_rate` is 0. Got noise_burst={self.noise_burst}; leave it out, or "
                f"set `noise_rate`."
            )
        if not 0 < self.offset_lr_multiplier < math.inf:
            raise ValueError(
                f"`offset_lr_multiplier` must be positive and finite: it multiplies a learning rate. Got "
                f"{self.offset_lr_multiplier}."
            )
        if self.offset_lr_multiplier != 1 and not self.objective_value.rolls_out:
            raise ValueError(
                f"`offset_lr_multiplier` would be ignored: the loss of objective {self.objective!r} does not depend on the "
                f"offset head. Got {self.offset_lr_multiplier}; leave it out, or use objective 'sequencematch'."
            )
        if self.packing is None:
            self.packing = self.objective != "unlikelihood"
        if self.packing and self.objective == "unlikelihood":
            raise ValueError("`packing` must be off for objective 'unlikelihood', which needs one trajectory per row.")
        for name in (
            "noise_burst",
            "replay_size",
            "generation_batch_size",
            "max_completion_length",
            "max_prompt_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1. Got {getattr(self, name)}.")
        for name in (
            "bc_steps",
            "bc_anneal_steps",
            "correction_rate",
            "unlikelihood_weight",
            "num_completions_to_print",
        ):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must not be negative. Got {getattr(self, name)}.")
        if not self.replay_reuse > 0:
            raise ValueError(
                f"`replay_reuse` must be positive: every rollout is drawn that often. Got {self.replay_reuse}."
            )
        if not 0 <= self.bc_weight_final <= 1:
            raise ValueError(f"`bc_weight_final` must be a weight in [0, 1]. Got {self.bc_weight_final}.")
        if not self.temperature > 0:
            raise ValueError(
                f"`temperature` must be positive: rollouts are samples of the policy. Got {self.temperature}. The paper uses 1."
            )
        if self.stop_after_minutes is not None and not self.stop_after_minutes > 0:
            raise ValueError(f"`stop_after_minutes` must be positive. Got {self.stop_after_minutes}.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"`max_length` must leave room for a prompt and <eos>: at least 2. Got {self.max_length}.")
        if not math.isfinite(self.correction_rate):
            raise ValueError(f"`correction_rate` must be finite. Got {self.correction_rate}.")
        if self.correction_rate and self.objective != "bc":
            raise ValueError(
                f"`correction_rate` would be ignored: it is for objective 'bc'. Got {self.correction_rate} and objective "
                f"{self.objective!r}; leave it out."
            )
        if (self.needs_rollouts or self.correction_rate) and self.replay_size < self.generation_batch_size:
            raise ValueError(
                f"`replay_size` must be at least `generation_batch_size`, or rollouts are dropped unused. Got {self.replay_size} "
                f"and {self.generation_batch_size}."
            )
        self.check_rollouts(are_made=self.needs_rollouts or bool(self.correction_rate))
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"`max_steps` must be at least 1, or -1 for whole epochs. Got {self.max_steps}.")
        if self.max_steps == -1 and not self.num_train_epochs > 0:
            raise ValueError(f"`num_train_epochs` must be positive. Got {self.num_train_epochs}.")
        for name, allowed in _SUPPORTED.items():
            if getattr(self, name, None) not in (*allowed, None):
                raise ValueError(
                    f"`{name}` is not supported here: it must be {' or '.join(map(repr, allowed))}. Got {getattr(self, name)!r}."
                )
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must stay False: the columns are read by the dataset itself.")
        if self.deepspeed:
            require("deepspeed", "deepspeed", "`deepspeed`")
        if self.accelerator_config is None or isinstance(self.accelerator_config, dict):
            # A stream is read in every process: batches hold trajectories, which can't be sent as tensors.
            self.accelerator_config = {"dispatch_batches": False, **(self.accelerator_config or {})}
        super().__post_init__()

    @classmethod
    def from_preset(cls, preset: str, /, **changes: Any) -> "SequenceMatchConfig":
        """One of the paper's recipes, `"arithmetic"` or `"text"`, with your `changes`."""
        check_choice("preset", preset, PRESETS)
        values = {**PRESETS[preset], **changes}
        objective = OBJECTIVES.get(values.get("objective", "sequencematch"))
        if objective is not None and not objective.deletes and "noise_rate" not in changes:
            del values["noise_rate"]  # a baseline without <bkspc>
        return cls(**values)

    def bc_weight(self, step: int) -> float:
        """β_BC at an optimisation step: 1 for `bc_steps`, then linear to `bc_weight_final` over `bc_anneal_steps`   (App. E)."""
        assert self.bc_steps is not None
        assert self.bc_anneal_steps is not None
        if step < self.bc_steps:
            return 1.0
        progress = min(1.0, (step - self.bc_steps) / self.bc_anneal_steps) if self.bc_anneal_steps else 1.0
        return 1.0 - (1.0 - self.bc_weight_final) * progress

    @property
    def context(self) -> int:
        """`max_length`, which the trainer chooses if it is left open."""
        assert self.max_length is not None
        return self.max_length

    def check_rollout_dataset(self) -> None:
        """Refuse prompts of rollouts where no rollouts are made, or where D would be taken from them."""
        if not self.needs_rollouts:
            raise ValueError(
                f"`rollout_dataset` would be ignored: objective {self.objective!r} with divergence {self.divergence!r} makes no "
                f"rollouts. Leave it out, or use objective 'sequencematch' with divergence 'chi2_mixture'."
            )
        if self.model_value_from != "data":
            raise ValueError(
                f"`model_value_from` must be 'data' with a `rollout_dataset`: D of prompts not in the data would pull V apart. "
                f"Got {self.model_value_from!r}; leave it out."
            )

    def own_values(self) -> dict[str, Any]:
        """The fields that `TrainingArguments` doesn't have, and the seed: together they identify a run.

        Left out are `model_init_kwargs`, which may hold objects, how a run is stopped and resumed, and where rollouts are made.
        """
        left_out = ("model_init_kwargs", "resume_anyway", "stop_after_minutes", *WHERE)
        return {name: getattr(self, name) for name in OWN_FIELDS if name not in left_out} | {"seed": self.seed}


_INHERITED = {f.name for f in fields(TrainingArguments)}
#: The fields of `SequenceMatchConfig` that `TrainingArguments` doesn't have, those of rollout workers last: few runs need them.
OWN_FIELDS = (
    *(f.name for f in fields(SequenceMatchConfig) if f.name not in _INHERITED and f.name not in WHERE),
    *WHERE,
)
