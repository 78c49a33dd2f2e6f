"""The model card of a trained policy."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sequencematch.data.examples import Example
from sequencematch.data.markdown import table_lines
from sequencematch.policy import Policy
from sequencematch.policy.card import PROMPT, Deletion, card, find_deletion, usage
from sequencematch.training.collator import Collator
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.rollouts import prompt_of

#: How many prompts of the training data a deletion is looked for after.
SAMPLES = 8
_PAPER = "[SequenceMatch](https://arxiv.org/abs/2306.05426)"


def model_card(config: SequenceMatchConfig, base: str, step: int, deletion: Deletion | None = None) -> str:
    """What the policy is, how to use it, a deletion that it made, how it was trained."""
    values = {**config.own_values(), "learning_rate": config.learning_rate, "steps": step}.items()
    rows = [(f"`{key}`", str(value)) for key, value in values]
    settings = "\n".join(table_lines(("setting", "value"), rows))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    origin = f"`{base}`" if base and not Path(base).exists() else "A causal language model"
    if config.objective_value.deletes:
        how = f"{_PAPER}, objective `{config.objective}`: it has a `<bkspc>`\naction that deletes the last token."
    else:
        how = f"\nobjective `{config.objective}`, a baseline of {_PAPER} that does not delete."
    return card(
        config.hub_model_id or Path(config.output_dir or "policy").name,
        f"{origin} fine-tuned with {how}".replace("with \n", "with\n"),
        usage(config.hub_model_id or "path/to/this/folder", PROMPT),
        library="sequencematch",
        tags={"sequencematch", "backspace", config.objective},
        base=base,
        deletion=deletion,
        more=f"## Training\n\n{settings}\n\nVersions: {versions}.",
    )


def trained_deletion(policy: Policy, examples: Sequence[Example], collate: Collator, longest: int) -> Deletion | None:
    """A deletion after prompts of the training data; if the policy makes none there, one of a wrong token put in by hand."""
    prompts = [prompt_of(example, number, collate.seed, longest) for number, example in enumerate(examples)]
    fitting = policy.max_positions - 3  # a wrong token, one more, and <eos>
    prompts = [prompt for prompt in prompts if len(prompt) <= fitting]
    if (found := find_deletion(policy, prompts)) is not None:
        return found
    noised = [replace(collate, noise_rate=1.0, noise_burst=1).trajectory(example) for example in examples]
    mistaken = [
        (*noisy.initial, noisy.executed[0])
        for noisy in noised
        if noisy.chosen[0] != noisy.executed[0] and len(noisy.initial) <= fitting
    ]
    return find_deletion(policy, mistaken, is_given=True)
