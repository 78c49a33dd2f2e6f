"""FLOPs, bytes and seconds of a training step and of rollouts. A *node* is one transformer position."""

from dataclasses import dataclass

from sequencematch.training.planning.hardware import Hardware
from sequencematch.training.planning.shapes import Shape
from sequencematch.training.step import GPU_NODES

#: Bytes of a number in bfloat16 and in float32, of Adam's two moments, and of a gradient.
HALF, SINGLE, MOMENTS, GRADIENT = 2, 4, 8, 4
#: GPUs in a machine: beyond it, weights and gradients cross the network.
NODE = 8


@dataclass(frozen=True)
class Workload:
    """What a run trains and how: a GPU takes `batch_size` rows of `context` tokens a step, and as many rollouts.

    Rollouts have `prompt` + `completion` tokens, and are made `generation_batch` at a time on a GPU. `rank` is LoRA's, None for
    full fine-tuning: float32 weights under bfloat16 autocast. Under LoRA the model stays in bfloat16 and is frozen.
    """

    shape: Shape
    context: int
    prompt: int
    completion: int
    batch_size: int
    rank: int | None = None
    generation_batch: int = 64
    reuse: float = 8.0
    checkpointing: bool = True
    rollouts: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that no run has, and rollouts that don't fit the context."""
        for name in ("context", "prompt", "completion", "batch_size", "generation_batch", "rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1. Got {getattr(self, name)}.")
        if not self.reuse > 0:
            raise ValueError(f"`reuse` must be positive. Got {self.reuse}.")
        if self.prompt + self.completion > self.context:
            raise ValueError(
                f"`completion` must fit `context`={self.context} after a prompt of {self.prompt}. Got {self.completion}."
            )

    @property
    def trained(self) -> int:
        """Numbers that are trained, but for the `<bkspc>` row and the offset head, which are few."""
        return self.shape.weights if self.rank is None else self.shape.adapter_weights(self.rank)

    @property
    def nodes(self) -> int:
        """Nodes of a step on one GPU: the data, and rollouts of the same number."""
        rollouts = self.batch_size * (self.prompt + self.completion) if self.rollouts else 0
        return self.batch_size * self.context + rollouts

    @property
    def pass_nodes(self) -> int:
        """Nodes of one forward pass: a step is split so that each fits the data, and saturates the GPU."""
        return min(self.nodes, max(self.batch_size * self.context, GPU_NODES))


def step_flops(work: Workload) -> float:
    """FLOPs of a step on one GPU.

    A weight costs two FLOPs a node in the forward pass, two where the backward pass computes layers again, two for the gradient
    of the input, and two for its own if it is trained. Attention to s earlier tokens costs 4·s·width, on average s is half the
    length; its backward pass costs 2.5 times as much, as it computes the scores again.
    """
    shape, again = work.shape, int(work.checkpointing)
    own = work.trained if work.rank is not None else shape.used_weights
    matrices = 2 * (2 + again) * shape.used_weights + 2 * own
    if work.rank is not None:
        matrices += 2 * (2 + again) * own
    rollouts = work.nodes - work.batch_size * work.context
    lengths = work.batch_size * work.context * work.context + rollouts * (work.prompt + work.completion)
    attention = (1 + again + 2.5) * 4 * shape.width * shape.layers * lengths / 2
    return work.nodes * matrices + attention


def shards(work: Workload, gpus: int, hardware: Hardware) -> int:
    """Over how many GPUs FSDP2 spreads the weights: one, with DDP over all, if a step fits nine tenths of a GPU's memory."""
    return 1 if step_bytes(work, 1, hardware) <= 0.9 * hardware.memory_bytes else gpus


def exchange_seconds(work: Workload, gpus: int, hardware: Hardware) -> float:
    """Seconds in which a step's weights and gradients cross the links: modelled, and taken to overlap with computing.

    Sharded weights are gathered for each forward and each backward pass, in bfloat16; gradients are summed once, in float32.
    """
    if gpus == 1:
        return 0.0
    passes = -(-work.nodes // work.pass_nodes)
    share = (gpus - 1) / gpus
    gathered = 2 * passes * HALF * work.shape.weights if shards(work, gpus, hardware) > 1 else 0
    return share * (gathered + 2 * GRADIENT * work.trained) / _link(gpus, hardware)


def step_seconds(work: Workload, gpus: int, hardware: Hardware) -> float:
    """Seconds of a step: computing or exchanging, whichever takes longer, and no less than its kernels take to start."""
    started = hardware.step_layer_s * work.shape.layers if work.nodes < GPU_NODES else 0.0
    return max(step_flops(work) / hardware.train_flops, exchange_seconds(work, gpus, hardware), started)


def state_bytes(work: Workload, gpus: int) -> float:
    """Weights and the optimizer's state on each of the GPUs that share them."""
    weights = SINGLE * work.trained
    if work.rank is not None:
        weights += HALF * work.shape.weights
    return (weights + MOMENTS * work.trained) / gpus


def step_bytes(work: Workload, gpus: int, hardware: Hardware) -> float:
    """Memory of a step on each of the GPUs that share the weights: state, gradients, gathered layers, and activations.

    Checkpoints keep a hidden vector per layer and node; one layer at a time, or without checkpointing every layer, keeps what
    its backward pass needs. Two layers are gathered at once, and the embeddings throughout.
    """
    shape = work.shape
    gathered = 0.0
    if gpus > 1:
        gathered = HALF * (2 * shape.layer_weights + (1 if shape.tied else 2) * shape.head_weights)
    wide, inner = hardware.layer_elements
    layer = wide * shape.hidden + inner * shape.intermediate
    per_node = shape.layers * shape.hidden + layer if work.checkpointing else shape.layers * layer
    return state_bytes(work, gpus) + GRADIENT * work.trained / gpus + gathered + HALF * per_node * work.pass_nodes


def rollout_bytes(work: Workload) -> float:
    """Memory of a generation: weights in bfloat16, under LoRA the adapted ones twice, and keys and values of every row."""
    copies = 1 if work.rank is None else 2
    weights = HALF * (work.shape.weights + (copies - 1) * work.shape.layers * work.shape.layer_weights)
    return weights + HALF * work.shape.cache_numbers * work.generation_batch * (work.prompt + work.completion)


def decoding_step_seconds(work: Workload, hardware: Hardware, length: float) -> float:
    """Seconds of one token in every row at a mean length: reading weights, keys and values, multiplying, starting kernels."""
    read = HALF * (work.shape.used_weights + work.generation_batch * length * work.shape.cache_numbers)
    flops = 2 * work.shape.used_weights * work.generation_batch
    starting = hardware.decode_layer_s * work.shape.layers
    return read / hardware.copy_bandwidth + flops / hardware.train_flops + starting


def generation_seconds(work: Workload, hardware: Hardware) -> float:
    """Seconds in which one GPU makes `generation_batch` rollouts."""
    prefill = 2 * work.shape.used_weights * work.generation_batch * work.prompt / hardware.train_flops
    per_token = decoding_step_seconds(work, hardware, work.prompt + (work.completion + 1) / 2)
    return hardware.generation_s + prefill + work.completion * per_token


def sync_bytes(work: Workload) -> float:
    """Bytes of the weights that the trainer publishes: all in bfloat16, or the adapter in float32; `<bkspc>` row and heads."""
    own = SINGLE * (9 * work.shape.hidden + 25)
    return own + (HALF * work.shape.weights if work.rank is None else SINGLE * work.trained)


def _link(gpus: int, hardware: Hardware) -> float:
    return hardware.node_bandwidth if gpus <= NODE else hardware.network_bandwidth
