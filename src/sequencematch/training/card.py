"""The model card of a trained policy."""

import importlib.metadata
from pathlib import Path
from typing import Any

import yaml

from sequencematch.data.markdown import table_lines
from sequencematch.training.config import SequenceMatchConfig

_BODY = """
# {title}

{base} {how}

```python
from sequencematch import Policy

policy = Policy.from_pretrained("{name}")
print(policy.generate("Once upon a time", max_new_tokens=64).texts[0])
```

## Training

{settings}

Versions: {versions}.

## Citation

```bibtex
@inproceedings{{cundy2024sequencematch,
    title     = {{SequenceMatch: Imitation Learning for Autoregressive Sequence Modelling with Backtracking}},
    author    = {{Chris Cundy and Stefano Ermon}},
    booktitle = {{International Conference on Learning Representations}},
    year      = {{2024}},
}}
```
"""


_HOW = {
    "deletes": "fine-tuned with [SequenceMatch](https://arxiv.org/abs/2306.05426), objective `{objective}`: it has a `<bkspc>` "
    "action that deletes the last token.",
    "writes": "fine-tuned with objective `{objective}`, a baseline of [SequenceMatch](https://arxiv.org/abs/2306.05426) that does "
    "not delete.",
}


def model_card(config: SequenceMatchConfig, base: str, step: int) -> str:
    """What it is, how to use it, how it was trained."""
    name = config.hub_model_id or "path/to/this/folder"
    is_known = base and not Path(base).exists()  # a folder's name says nothing to others
    header: dict[str, Any] = {
        "library_name": "sequencematch",
        "tags": sorted({"sequencematch", "backspace", config.objective}),
    }
    if is_known:
        header["base_model"] = base
    values = {**config.own_values(), "learning_rate": config.learning_rate, "steps": step}
    rows = [(f"`{key}`", str(value)) for key, value in values.items()]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    body = _BODY.format(
        title=config.hub_model_id or Path(config.output_dir or "policy").name,
        base=f"`{base}`" if is_known else "A causal language model",
        how=_HOW["deletes" if config.objective_value.deletes else "writes"].format(objective=config.objective),
        name=name,
        settings="\n".join(table_lines(("setting", "value"), rows)),
        versions=versions,
    )
    return f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n{body}"
