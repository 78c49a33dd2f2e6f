"""A tiny model, a few words and short runs, for tests of training."""

from pathlib import Path
from typing import Any

from sequencematch.policy import Policy
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from tests.policy.tiny_models import character_tokenizer, exact_llama, llama

WORDS = ["cat", "dog", "house", "tree", "river", "stone", "cloud", "apple", "moon", "sun", "a", "grass"]


def rows(words: list[str] = WORDS) -> list[dict[str, str]]:
    """The first letter is the prompt."""
    return [{"prompt": word[0], "completion": word[1:]} for word in words]


def policy(*, exact: bool = False, **changes: Any) -> Policy:
    """A fresh policy; `exact` in float64 throughout, the row and the offset head included."""
    model = exact_llama() if exact else llama(**({"initializer_range": 0.1} | changes))
    made = Policy.from_pretrained(model, tokenizer=character_tokenizer())
    return made.double() if exact else made


def config(folder: Path, **changes: Any) -> SequenceMatchConfig:
    """Short, on the CPU, without reporting."""
    values: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "bc_steps": 0,
        "bc_anneal_steps": 0,
        "generation_batch_size": 8,
        "max_completion_length": 8,
        "max_length": 32,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return SequenceMatchConfig(**(values | changes))


def trainer(
    folder: Path, model: Any = None, dataset: Any = None, rollout_dataset: Any = None, **changes: Any
) -> SequenceMatchTrainer:
    """A trainer on `rows`, unless others are given."""
    return SequenceMatchTrainer(
        model=policy() if model is None else model,
        args=config(folder, **changes),
        train_dataset=rows() if dataset is None else dataset,
        rollout_dataset=rollout_dataset,
    )
