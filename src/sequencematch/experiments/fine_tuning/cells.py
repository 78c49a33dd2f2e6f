"""The models of a study: a base model, fine-tuned by one method with one kind and rate of noise   (§6.1, App. G)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from sequencematch.data.spelling import check_choice
from sequencematch.experiments.networks import as_printed
from sequencematch.tasks import Arithmetic


@dataclass(frozen=True)
class Budget:
    """A preset: the base model, how long each method fine-tunes it, and on how many questions it is tested.

    The same for all methods, but for `own`: method → settings of the trainer that `selection` chose for it, on questions that are
    not in the test. `adapter` trains LoRA's adapters instead of all weights, and `four_bits` those of QLoRA, as in the paper.
    """

    model: str
    steps: int
    learning_rate: float
    seeds: int
    test_rows: int
    alpha: float
    gamma: float
    batch_size: int = 32
    adapter: bool = False
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    four_bits: bool = False

    def of(self, method: str) -> "Budget":
        """What concerns one method: without the settings of the others."""
        return replace(self, own={name: settings for name, settings in self.own.items() if name == method})


@dataclass(frozen=True)
class FileBudget(Budget):
    """A preset on rows from a file; `data` is its SHA-256, so that models trained on another file are not taken for these."""

    data: str = ""


#: Presets by name. The paper's numbers that it does not give are those of `training.presets`.
BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "cpu": Budget("sequencematch/arithmetic-base", 200, 1e-3, 1, 200, alpha=0.1, gamma=0.99),
        "small": Budget(
            "sequencematch/arithmetic-base",
            400,
            1e-3,
            3,
            1000,
            alpha=0.1,
            gamma=0.99,
            own={  # results/small/selection
                "mle": {"learning_rate": 1e-3},
                "bc": {"learning_rate": 1e-3},
                "sequencematch": {
                    "learning_rate": 1e-3,
                    "alpha": 0.01,
                    "gamma": 0.998,
                    "model_value_from": "data",
                },
            },
        ),
        "gpu": Budget(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            1000,
            1e-4,
            3,
            1000,
            alpha=0.1,
            gamma=0.99,
            own={  # results/selection
                "mle": {"learning_rate": 3e-4},
                "bc": {"learning_rate": 3e-4},
                "sequencematch": {
                    "learning_rate": 1e-4,
                    "alpha": 0.1,
                    "gamma": 0.99,
                    "offset_lr_multiplier": 100.0,
                },
            },
        ),
        "large": Budget("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1000, 2e-4, 2, 1000, alpha=0.1, gamma=0.99, adapter=True),
        "paper": Budget(
            "meta-llama/Llama-2-7b-hf",
            15_000,
            2e-4,
            2,
            200,
            alpha=0.01,
            gamma=0.998,
            adapter=True,
            four_bits=True,
        ),
    }
)


def chosen(budgets: Mapping[str, Budget], preset: str, model: str | None) -> Budget:
    """The preset of this name, with another base model if one is given."""
    check_choice("--preset", preset, budgets)
    return replace(budgets[preset], model=model) if model else budgets[preset]


#: Kinds of noise, by name: the settings of the trainer.
NOISES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": MappingProxyType({}),
        "digits": MappingProxyType({"noise_source": "tokens"}),  # "ground-truth noise"
        "uniform": MappingProxyType({"noise_source": "uniform"}),  # "random noise"
        "own": MappingProxyType({"noise_source": "model"}),  # suggested in App. G.2
    }
)
#: The noise of the models that are saved.
KEPT = ("digits", 0.1)
#: Methods in the order of tables: name → its name for people.
METHODS: Mapping[str, str] = MappingProxyType({"mle": "MLE", "bc": "BC", "sequencematch": "SequenceMatch"})


@dataclass(frozen=True)
class Cell:
    """One fine-tuned model. `module` names its questions, `noise` is in `NOISES`, `divergence` is the φ of SequenceMatch."""

    module: str
    method: str
    noise: str = "none"
    rate: float = 0.0
    seed: int = 0
    divergence: str = "chi2_mixture"
    start: ClassVar[None] = None  # every model starts from the base model

    @property
    def file(self) -> str:
        """The name of its result."""
        parts = [self.module, self.method, self.noise, f"{self.rate:g}", str(self.seed)]
        parts += [] if self.divergence == "chi2_mixture" else [self.divergence]
        return "_".join(parts) + ".json"

    def settings(self, budget: Budget) -> dict[str, Any]:
        """The settings of the trainer that are its own: half of SequenceMatch's steps clone or move away from cloning."""
        own: dict[str, Any] = {"objective": self.method}
        if self.method != "mle":
            own |= {"noise_rate": self.rate, **NOISES[self.noise]}
        if self.method == "sequencematch":
            own |= {"divergence": self.divergence, "alpha": budget.alpha, "gamma": budget.gamma}
            own |= {"bc_steps": budget.steps // 4, "bc_anneal_steps": budget.steps // 4}
            own |= as_printed(self.divergence)
        return own | budget.own.get(self.method, {})

    @property
    def is_kept(self) -> bool:
        """Whether the model is saved: `mistakes` and `thinking` measure it again."""
        return self.method == "mle" or (self.noise, self.rate, self.divergence) == (*KEPT, "chi2_mixture")


#: Presets whose base model is the bundled one.
_BUNDLED = ("cpu", "small")
#: Module → options of their task: small numbers, and answers of up to twelve characters.
_SMALL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "add_or_sub_in_base": {"entropy": (2.0, 4.0), "bases": (5, 9), "max_new_tokens": 12},
        "mul": {"entropy": (2.0, 3.0), "max_new_tokens": 12},
        "list_prime_factors": {"entropy": (3.0, 5.0), "max_new_tokens": 24, "train_size": 5000},
    }
)


def task(module: str, preset: str, budget: Budget) -> Arithmetic:
    """The questions of a module; but for the presets of the bundled model they are the paper's   (App. E)."""
    options = _SMALL[module] if preset in _BUNDLED else {}
    return Arithmetic(module=module, test_size=budget.test_rows, **options)
