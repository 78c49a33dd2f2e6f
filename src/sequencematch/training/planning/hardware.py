"""What a GPU does in a second, as measured: the constants of the cost model, each with where it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU. `sources` says of each constant which recorded file it was measured in, or that it is a data sheet's.

    `train_flops` and `copy_bandwidth` are what the library reaches, not what the maker promises. `decode_layer_s` is what a layer
    adds to a decoding step however small it is, `generation_s` what a generation takes besides its steps, and `step_layer_s` the
    least that a training step takes for each layer, however few tokens it has.
    """

    name: str
    memory_bytes: float
    train_flops: float
    copy_bandwidth: float
    decode_layer_s: float
    generation_s: float
    step_layer_s: float
    layer_elements: tuple[float, float]
    node_bandwidth: float
    network_bandwidth: float
    sources: Mapping[str, str]


_BENCH, _DATA_SHEET = "results/bench/h200/step_decoding.json", "data sheet"
H200 = Hardware(
    name="H200",
    memory_bytes=141e9,
    train_flops=480e12,
    copy_bandwidth=4.24e12,
    decode_layer_s=25e-6,
    generation_s=0.22,
    step_layer_s=7.7e-3,
    layer_elements=(17.0, 3.0),
    node_bandwidth=450e9,
    network_bandwidth=50e9,
    sources=MappingProxyType(
        {
            "memory_bytes": _DATA_SHEET,
            "train_flops": _BENCH,
            "copy_bandwidth": _BENCH,
            "decode_layer_s": _BENCH,
            "generation_s": _BENCH,
            "step_layer_s": "results/h200/finetuning_full.json",
            "layer_elements": _BENCH,
            "node_bandwidth": _DATA_SHEET,
            "network_bandwidth": _DATA_SHEET,
        }
    ),
)
#: Hardware by name.
HARDWARE: Mapping[str, Hardware] = MappingProxyType({H200.name: H200})
