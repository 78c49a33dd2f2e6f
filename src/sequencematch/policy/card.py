"""Model cards: a header for the hub, what the model is, a deletion that it made, and how to use it."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from sequencematch.core.mdp import Trajectory
from sequencematch.data.pieces import Piece, as_html, pieces
from sequencematch.policy.display import decoder
from sequencematch.policy.generation import generate, prompt_tokens
from sequencematch.policy.sampling import Sampling
from sequencematch.policy.scoring import Scorer
from sequencematch.policy.storage import BUNDLED

#: The most tokens of a sample in a card.
LONGEST = 48
CITATION = """## Citation

```bibtex
@inproceedings{cundy2024sequencematch,
    title     = {SequenceMatch: Imitation Learning for Autoregressive Sequence Modelling with Backtracking},
    author    = {Chris Cundy and Stefano Ermon},
    booktitle = {International Conference on Learning Representations},
    year      = {2024},
}
```"""
_USAGE = """```python
from sequencematch import Policy

policy = Policy.from_pretrained("{name}")
print(policy.generate({prompt}, max_new_tokens=64).texts[0])
```"""
_PLAIN_USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)  # custom_generate/generate.py
inputs = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=True)[0], skip_special_tokens=True))
```

Without `trust_remote_code` it writes like any other model: `<bkspc>` is suppressed."""
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class Deletion:
    """Everything that a policy wrote after a prompt, some of it deleted. `is_given`: the prompt ends in a wrong token."""

    written: tuple[Piece, ...]
    is_given: bool = False

    def markdown(self) -> str:
        """A section of a card."""
        (prompt, _), *rest = self.written
        given = " The last token of the prompt is a mistake, put in by hand." if self.is_given else ""
        html = f"<b>{as_html([Piece(prompt, 'prompt')])}</b>{as_html(rest)}"
        return (
            f"## A deletion\n\nThe prompt is bold. Struck-out text was deleted by the model itself, also where it belonged to the "
            f"prompt.{given}\n\n<pre>{html}</pre>"
        )


def find_deletion(policy: Scorer, prompts: Sequence[Sequence[int] | str], *, is_given: bool = False) -> Deletion | None:
    """The shortest sample with a deletion, greedy ones first; None if nothing is deleted, or without a tokenizer.

    Samples that were cut come after those that ended by themselves.
    """
    if policy.tokenizer is None or not prompts:
        return None
    decode, one = decoder(policy.tokenizer), Sampling(max_new_tokens=1)
    tokens = [prompt_tokens(policy, prompt, one, room_for_end=True) for prompt in prompts]
    room = min(LONGEST, policy.max_positions - max(map(len, tokens)) - 1)
    for temperature in (0.0, 1.0):
        sampling = Sampling(max_new_tokens=room, temperature=temperature, seed=0 if temperature else None)
        found = [t for t in generate(policy, tokens, sampling).trajectories if _deleted(t)]
        if found:
            shortest = min(found, key=lambda trajectory: (trajectory.truncated, len(trajectory), _deleted(trajectory)))
            prompt = decode(shortest.initial).removeprefix(policy.tokenizer.bos_token or "")
            return Deletion(pieces(shortest, decode, prompt), is_given)
    return None


def _deleted(trajectory: Trajectory) -> int:
    """How many tokens were deleted."""
    tokens, _, alive = trajectory.replay()
    return len(tokens) - len(alive)


def card(
    title: str,
    intro: str,
    usage: str,
    *,
    library: str,
    tags: Collection[str],
    base: str,
    deletion: Deletion | None = None,
    more: str = "",
) -> str:
    """A model card. The header names the base model if it may be on the hub: a folder's name says nothing to others."""
    header = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        tags=sorted(tags),
        base_model=base if is_public(base) else None,
    )
    shown = "" if deletion is None else deletion.markdown()
    parts = (f"---\n{header.to_yaml()}\n---", f"# {title}", intro, usage, shown, more, CITATION)
    return "\n\n".join(part for part in parts if part) + "\n"


def is_public(name: str) -> bool:
    """Whether a model's name may be one on the hub: it is no folder, and no bundled model."""
    return bool(name) and not Path(name).exists() and name not in BUNDLED


def usage(name: str, prompt: str = PROMPT) -> str:
    """How to use a saved policy."""
    return _USAGE.format(name=name, prompt=_quoted(prompt))


def _quoted(text: str) -> str:
    """A text in double quotes, as Python reads it."""
    return json.dumps(text, ensure_ascii=False)


def policy_card(policy: Scorer, name: str, prompts: Sequence[str]) -> str:
    """The card of a saved policy. The deletion is looked for after `prompts`."""
    base = policy.base.name_or_path
    origin = f"`{base}`" if base and not Path(base).exists() else "A causal language model"
    intro = (
        f"{origin} with a `<bkspc>` action that deletes the last token\n"
        f"([SequenceMatch](https://arxiv.org/abs/2306.05426), Cundy & Ermon, ICLR 2024)."
    )
    return card(
        name,
        intro,
        usage(name, prompts[0] if prompts else PROMPT),
        library="sequencematch",
        tags={"sequencematch", "backspace"},
        base=base,
        deletion=find_deletion(policy, prompts),
    )


def export_card(policy: Scorer, name: str, prompts: Sequence[str]) -> str:
    """The card of a plain checkpoint that deletes by itself."""
    intro = (
        f"This checkpoint has a `<bkspc>` action (id {policy.space.bkspc}) that removes the last token it wrote\n"
        f"([SequenceMatch](https://arxiv.org/abs/2306.05426), Cundy & Ermon, ICLR 2024). It needs torch and transformers only:"
    )
    return card(
        "A language model that can delete",
        intro,
        _PLAIN_USAGE.format(name=name, prompt=_quoted(prompts[0] if prompts else PROMPT)),
        library="transformers",
        tags={"sequencematch", "backtracking"},
        base=policy.base.name_or_path,
        deletion=find_deletion(policy, prompts),
    )
