"""The model card of a trained policy."""

import importlib.metadata
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from sequencematch.data.markdown import table_lines
from sequencematch.training.config import SequenceMatchConfig

_TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ "`" ~ base_model ~ "`" if base_model else "A causal language model" }} fine-tuned with {% if deletes -%}
[SequenceMatch](https://arxiv.org/abs/2306.05426), objective `{{ objective }}`: it has a `<bkspc>`
action that deletes the last token.
{%- else -%}
objective `{{ objective }}`, a baseline of [SequenceMatch](https://arxiv.org/abs/2306.05426) that does not delete.
{%- endif %}

```python
from sequencematch import Policy

policy = Policy.from_pretrained("{{ name }}")
print(policy.generate("Once upon a time", max_new_tokens=64).texts[0])
```

## Training

{{ settings }}

Versions: {{ versions }}.

## Citation

```bibtex
@inproceedings{cundy2024sequencematch,
    title     = {SequenceMatch: Imitation Learning for Autoregressive Sequence Modelling with Backtracking},
    author    = {Chris Cundy and Stefano Ermon},
    booktitle = {International Conference on Learning Representations},
    year      = {2024},
}
```

"""


def model_card(config: SequenceMatchConfig, base: str, step: int) -> str:
    """What the policy is, how to use it, how it was trained."""
    values = {**config.own_values(), "learning_rate": config.learning_rate, "steps": step}.items()
    card = ModelCard.from_template(
        ModelCardData(
            library_name="sequencematch",
            tags=sorted({"sequencematch", "backspace", config.objective}),
            base_model=base if base and not Path(base).exists() else None,  # a folder's name says nothing to others
        ),
        template_str=_TEMPLATE,
        title=config.hub_model_id or Path(config.output_dir or "policy").name,
        name=config.hub_model_id or "path/to/this/folder",
        deletes=config.objective_value.deletes,
        objective=config.objective,
        settings="\n".join(table_lines(("setting", "value"), [(f"`{key}`", str(value)) for key, value in values])),
        versions=", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")),
    )
    return str(card)
