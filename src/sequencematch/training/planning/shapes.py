"""The sizes of a transformer that its costs depend on: from a name, from numbers, or from a model's config."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sequencematch.data.spelling import check_choice

#: The numbers of `Shape.parse`, in their order.
SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab")


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal transformer. `layer_weights` are the numbers in one layer; `width` is that of all its query heads."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    width: int
    kv_width: int
    vocab: int
    layer_weights: int
    tied: bool = False

    @classmethod
    def llama(
        cls,
        name: str,
        layers: int,
        hidden: int,
        intermediate: int,
        heads: int,
        kv_heads: int,
        vocab: int,
        *,
        tied: bool = False,
    ) -> "Shape":
        """A Llama: four matrices of attention, three of a gated MLP, two norms in each layer."""
        kv_width = hidden // heads * kv_heads
        weights = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * intermediate + 2 * hidden
        return cls(name, layers, hidden, intermediate, hidden, kv_width, vocab, weights, tied)

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """A named shape, or a Llama's numbers separated by commas, in the order of `SIZES`."""
        if "," not in text:
            check_choice("shape", text, SHAPES)
            return SHAPES[text]
        parts = text.split(",")
        if len(parts) != len(SIZES) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"`shape` must be a name, or six whole numbers: {','.join(SIZES)}. Got {text!r}.")
        layers, hidden, intermediate, heads, kv_heads, vocab = map(int, parts)
        if hidden % heads or heads % kv_heads:
            raise ValueError(
                f"`shape` must have heads that divide hidden, and kv_heads that divide heads. Got {text!r}."
            )
        return cls.llama(text, layers, hidden, intermediate, heads, kv_heads, vocab)

    @property
    def head_weights(self) -> int:
        """Numbers in the output layer."""
        return self.hidden * self.vocab

    @property
    def weights(self) -> int:
        """Numbers in the model: its layers, the output layer and, unless they are one, the input embedding."""
        return self.layers * self.layer_weights + (1 if self.tied else 2) * self.head_weights + self.hidden

    @property
    def used_weights(self) -> int:
        """Numbers that multiply each token: layers and output layer."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def cache_numbers(self) -> int:
        """Numbers in the keys and values of one token."""
        return 2 * self.layers * self.kv_width

    def adapter_weights(self, rank: int) -> int:
        """Numbers of a LoRA adapter of this rank on all linear layers of a Llama."""
        attention = 2 * (self.hidden + self.width) + 2 * (self.hidden + self.kv_width)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))


#: Shapes by name.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            Shape.llama("SmolLM2-135M", 30, 576, 1536, 9, 3, 49152, tied=True),
            Shape.llama("Llama-2-7b", 32, 4096, 11008, 32, 32, 32000),
            Shape.llama("Llama-2-13b", 40, 5120, 13824, 40, 40, 32000),
            Shape.llama("Llama-2-70b", 80, 8192, 28672, 64, 8, 32000),
        )
    }
)


def shape_of(model: str) -> Shape:
    """The shape of a model: a folder, a bundled name, or a name on the hub. Only its config is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sequencematch.policy import storage
    from sequencematch.policy.attention import text_config

    place = model if Path(model).exists() else str(storage.BUNDLED.get(model, model))
    try:
        whole = AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"`MODEL` must be a folder with a config, or a model on the hub. Got {model!r}: {reason}"
        ) from error
    config = text_config(whole)
    return replace(_from_config(model, config), layer_weights=_layer_weights(AutoModelForCausalLM, config))


def _from_config(name: str, config: Any) -> Shape:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    tied = bool(getattr(config, "tie_word_embeddings", False))
    sizes = (config.num_hidden_layers, config.hidden_size, inner, heads * size, kv_heads * size, config.vocab_size)
    return Shape(name, *sizes, layer_weights=0, tied=tied)


def _layer_weights(auto: Any, config: Any) -> int:
    """The numbers in a layer, counted in a model that has shapes and no numbers."""
    import torch

    with torch.device("meta"):
        model = auto.from_config(config)
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    numbers = sum(math.prod(weight.shape) for weight in model.parameters() if id(weight) not in embeddings)
    return int(numbers) // int(config.num_hidden_layers)
