"""The models of the study, the ways to decode them, and its presets   (§6.2, App. E)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from sequencematch.policy.sampling import Sampling


@dataclass(frozen=True)
class Budget:
    """A preset: the base model, how long each method fine-tunes it, and how much each model writes. The same for all methods.

    Lengths are in tokens. `rollout_length` limits the rollouts of SequenceMatch. Each of `draws` has `samples` prompts and a
    seed of its own; `rows_at_once` of them are generated side by side. `noise_rate` is about one wrong token per training row,
    as in the paper. `own_noise_rate` is that of noise which the model makes itself; 0 leaves these methods out. `encoder` is
    MAUVE's.
    """

    model: str
    steps: int
    warmup_steps: int
    batch_size: int
    learning_rate: float
    context: int
    prompt_length: int
    max_new_tokens: int
    rollout_length: int
    samples: int
    seeds: int
    noise_rate: float
    own_noise_rate: float
    encoder: str = "minilm"
    draws: int = 2
    rows_at_once: int = 256
    alpha: float = 0.01
    gamma: float = 0.998
    adapter: bool = False


#: Presets by name. The paper's numbers that it does not give are those of `training.presets`.
BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "cpu": Budget(
            "sequencematch/arithmetic-base",
            steps=600,
            warmup_steps=60,
            batch_size=4,
            learning_rate=3e-3,
            context=128,
            prompt_length=32,
            max_new_tokens=64,
            rollout_length=64,
            samples=100,
            seeds=1,
            noise_rate=0.01,
            own_noise_rate=0.3,
        ),
        "small": Budget(
            "stories260K",
            steps=1200,
            warmup_steps=100,
            batch_size=16,
            learning_rate=3e-3,
            context=128,
            prompt_length=16,
            max_new_tokens=64,
            rollout_length=64,
            samples=850,
            seeds=2,
            noise_rate=0.01,
            own_noise_rate=0.3,
            encoder="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        "gpu": Budget(
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            steps=500,
            warmup_steps=50,
            batch_size=16,
            learning_rate=1e-4,
            context=512,
            prompt_length=128,
            max_new_tokens=256,
            rollout_length=256,
            samples=1000,
            seeds=2,
            noise_rate=0.002,
            own_noise_rate=0.1,
            encoder="HuggingFaceTB/SmolLM2-135M-Instruct",
            rows_at_once=512,
        ),
        "paper": Budget(
            "meta-llama/Llama-2-7b-hf",
            steps=5000,
            warmup_steps=2000,
            batch_size=32,
            learning_rate=2e-4,
            context=1024,
            prompt_length=256,
            max_new_tokens=256,
            rollout_length=512,
            samples=1000,
            seeds=1,
            noise_rate=0.001,
            own_noise_rate=0.0,
            encoder="gpt2-large",
            rows_at_once=32,
            adapter=True,
        ),
    }
)
#: How models are trained: name → objective and where wrong tokens come from. The last two are not in the paper's table; it suggests
#: noise that the model makes itself   (App. G.2).
METHODS: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "mle": ("mle", None),
        "unlikelihood": ("unlikelihood", None),
        "bc": ("bc", "uniform"),
        "sequencematch": ("sequencematch", "uniform"),
        "bc_own": ("bc", "model"),
        "sequencematch_own": ("sequencematch", "model"),
    }
)
#: Ways to decode. `MISTAKEN` starts from prompts whose last token was replaced by a random one   (App. I). The paper has no
#: top-p; it is the usual way to leave out unlikely tokens, and so what deleting them has to be compared with.
SAMPLED, CONTRASTIVE, NUCLEUS, FORBIDDEN, MISTAKEN = (
    "temperature 1",
    "contrastive search",
    "top-p 0.95",
    "<bkspc> forbidden",
    "random last token",
)


@dataclass(frozen=True)
class Way:
    """A row of the table: a trained model and a way to decode it. `name` is Markdown; `label` goes into a figure."""

    method: str
    decoding: str
    name: str

    @property
    def label(self) -> str:
        """The name without marks."""
        return self.name.replace("`", "")


#: The paper's five, two with noise of the model's own, two with top-p, and four that say what deleting is worth.
WAYS = (
    Way("mle", SAMPLED, "MLE"),
    Way("mle", CONTRASTIVE, "MLE + contrastive search"),
    Way("unlikelihood", SAMPLED, "MLE + unlikelihood"),
    Way("bc", SAMPLED, "MLE + `<bkspc>`"),
    Way("sequencematch", SAMPLED, "SequenceMatch"),
    Way("bc_own", SAMPLED, "MLE + `<bkspc>`, own noise"),
    Way("sequencematch_own", SAMPLED, "SequenceMatch, own noise"),
    Way("mle", NUCLEUS, "MLE, top-p 0.95"),
    Way("bc_own", NUCLEUS, "MLE + `<bkspc>`, own noise, top-p 0.95"),
    Way("bc", FORBIDDEN, "MLE + `<bkspc>`, forbidden"),
    Way("sequencematch", FORBIDDEN, "SequenceMatch, `<bkspc>` forbidden"),
    Way("bc_own", FORBIDDEN, "MLE + `<bkspc>`, own noise, forbidden"),
    Way("sequencematch_own", FORBIDDEN, "SequenceMatch, own noise, `<bkspc>` forbidden"),
)


@dataclass(frozen=True)
class Cell:
    """One fine-tuned model."""

    method: str
    seed: int = 0
    start: ClassVar[None] = None  # every model starts from the base model

    @property
    def name(self) -> str:
        """The beginning of the names of its files."""
        return f"{self.method}_{self.seed}"

    @property
    def deletes(self) -> bool:
        """Whether the model has `<bkspc>`."""
        return METHODS[self.method][1] is not None

    def settings(self, budget: Budget) -> dict[str, Any]:
        """The settings of the trainer that are its own. SequenceMatch clones and anneals in the paper's proportions."""
        objective, noise = METHODS[self.method]
        own: dict[str, Any] = {"objective": objective}
        if noise is not None:
            own |= {
                "noise_rate": budget.own_noise_rate if noise == "model" else budget.noise_rate,
                "noise_source": noise,
            }
        if objective == "sequencematch":
            own |= {"alpha": budget.alpha, "gamma": budget.gamma}
            own |= {"bc_steps": budget.steps // 5, "bc_anneal_steps": 2 * budget.steps // 5}
        return own

    def decodings(self, budget: Budget) -> list[tuple[str, int]]:
        """The ways to decode it, each with the number of a draw."""
        own = [way.decoding for way in WAYS if way.method == self.method]
        return [*((decoding, draw) for decoding in own for draw in range(budget.draws)), (MISTAKEN, 0)]


def cells(budget: Budget) -> list[Cell]:
    """Every model, seed by seed."""
    methods = [name for name, (_, noise) in METHODS.items() if noise != "model" or budget.own_noise_rate]
    return [Cell(method, seed) for seed in range(budget.seeds) for method in methods]


def sampling(cell: Cell, decoding: str, draw: int, budget: Budget) -> Sampling:
    """How a draw samples: at temperature 1, without top-p unless `decoding` says so; all methods with the same random numbers.

    A model that was trained without `<bkspc>` is a plain language model: the untrained row of `<bkspc>` takes no part.
    """
    bias = -math.inf if decoding == FORBIDDEN or not cell.deletes else 0.0
    top_p = 0.95 if decoding == NUCLEUS else None
    return Sampling(max_new_tokens=budget.max_new_tokens, temperature=1.0, top_p=top_p, seed=draw, backspace_bias=bias)
