"""Decoding: actions per second beside `model.generate`, and the share of the memory-bandwidth roofline."""

import statistics
from collections.abc import Iterator

from benchmarks.peers import hf_generate, with_attention
from benchmarks.session import Session, random_prompts
from benchmarks.timing import Call, Measurement, copy_bandwidth, measured, paired
from sequencematch.policy import Policy
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX

DYNAMIC, STATIC = "model.generate, dynamic cache", "model.generate, static cache, compiled"
OURS, CONTROL, DELETING = "Policy.generate", "Policy.generate (A/A control)", "Policy.generate, deleting"


def decoding(session: Session) -> Iterator[Measurement]:
    """Actions per second over `model.generate`'s at temperature 1, and the share of the roofline."""
    yield roofline(session)
    scale = session.scale
    policy = session.policy(scale.decoding)
    policy.eval()
    batch, new_tokens = scale.decoding_batch, scale.decoding_new
    prompts = random_prompts(policy, batch, scale.decoding_prompt)
    actions = {DYNAMIC: batch * new_tokens, STATIC: batch * new_tokens}

    def ours(name: str, bias: float) -> Call:
        def run() -> None:
            result = policy.generate(prompts, max_new_tokens=new_tokens, seed=0, batch_size=batch, backspace_bias=bias)
            actions[name] = sum(map(len, result.trajectories))

        return with_attention(policy, CAUSAL_PREFIX, run)

    variants: dict[str, Call] = {
        DYNAMIC: with_attention(policy, "sdpa", hf_generate(policy, prompts, new_tokens)),
        OURS: ours(OURS, -1e4),
        CONTROL: ours(CONTROL, -1e4),
        DELETING: ours(DELETING, 9.5),
    }
    if session.device.startswith("cuda"):
        static = hf_generate(policy, prompts, new_tokens, cache_implementation="static")
        variants[STATIC] = with_attention(policy, "sdpa", static)
    seconds = session.seconds("decoding", variants)
    rates = {name: actions[name] / statistics.median(times) for name, times in seconds.items()}
    detail = {"model": scale.decoding.name, "batch": batch, "prompt": scale.decoding_prompt, "new_tokens": new_tokens}
    yield measured(
        "decoding",
        "A/A control: Policy.generate / Policy.generate",
        paired(seconds, CONTROL, OURS),
        target="control",
        detail={**detail, "actions_per_s": rates},
    )
    for peer, target in ((DYNAMIC, "decoding, dynamic"), (STATIC, "decoding, static")):
        if peer in seconds:
            faster = actions[OURS] / actions[peer]
            yield measured(
                "decoding",
                f"Policy.generate / {peer}",
                [faster * r for r in paired(seconds, peer, OURS)],
                target=target,
            )
    faster = actions[DELETING] / actions[DYNAMIC]
    yield measured(
        "decoding",
        f"{DELETING} / {DYNAMIC}, actions per second",
        [faster * r for r in paired(seconds, DYNAMIC, DELETING)],
        detail={"actions": actions[DELETING]},
    )


def roofline(session: Session) -> Measurement:
    """(Bytes that a decoding step must read / copy bandwidth) / seconds of the step.

    The bytes are the weights of layers and head, and the keys and values of all live nodes, averaged over the generation.
    """
    scale, policy = session.scale, session.step_policy()
    new_tokens = scale.context - scale.generation_prompt
    generated = session.generation(scale.generation_prompt, new_tokens)
    bandwidth = copy_bandwidth(session.device)
    bytes_per_step = weight_bytes(policy) + scale.generation_batch * cache_bytes(policy) * (
        scale.generation_prompt + (new_tokens + 1) / 2
    )
    per_step = generated.seconds / new_tokens
    return Measurement(
        "decoding",
        f"share of the memory-bandwidth roofline, batch {scale.generation_batch}",
        bytes_per_step / bandwidth / per_step,
        unit="of 1",
        rounds=generated.times,
        target="roofline",
        detail={
            "model": scale.step.name,
            "ms_per_step": 1e3 * per_step,
            "gb_per_step": bytes_per_step / 1e9,
            "copy_gb_per_s": bandwidth / 1e9,
            "actions": generated.actions,
            "actions_per_s": generated.actions / generated.seconds,
        },
    )


def weight_bytes(policy: Policy) -> int:
    """Layers and head. Left out are the input embedding, of which a step reads a few rows, and adapters, which can be merged."""
    left_out = {id(policy.base.get_input_embeddings().weight)} - {id(policy.unembedding().weight)}
    return sum(
        p.numel() * p.element_size()
        for name, p in policy.base.named_parameters()
        if "lora_" not in name and id(p) not in left_out
    )


def cache_bytes(policy: Policy) -> int:
    """Bytes of the keys and values of one node."""
    config = policy.base.config
    element = policy.base.get_input_embeddings().weight.element_size()
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element
