"""Step time against row length, at an equal number of tokens, beside maximum likelihood."""

import statistics
from collections.abc import Iterator

from benchmarks.peers import mle_step, updater, with_attention
from benchmarks.session import Session
from benchmarks.step import our_step
from benchmarks.timing import Call, Measurement, measured, paired
from benchmarks.workloads import text
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX


def length(session: Session) -> Iterator[Measurement]:
    """Growth of our step's time from the shortest rows, over the growth of maximum likelihood's; rollouts as long as the data."""
    scale = session.scale
    policy = session.policy(scale.length, is_lora=scale.is_lora)
    policy.train()
    update = updater(policy, session.device)
    variants: dict[str, Call] = {}
    for nodes in scale.lengths:
        work = text(policy.space, scale.length_tokens // nodes, nodes, nodes)
        mle = mle_step(policy.model, work.clean, session.device, update)
        ours = our_step(policy, work, update)
        variants[f"MLE, {nodes}"] = with_attention(policy, "sdpa", mle)
        variants[f"ours, {nodes}"] = with_attention(policy, CAUSAL_PREFIX, ours)
    first = scale.lengths[0]
    variants["control"] = variants[f"MLE, {first}"]
    seconds = session.seconds("cost against length", variants)
    times = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    control = paired(seconds, "control", f"MLE, {first}")
    detail = {"model": scale.length.name, "data_tokens": scale.length_tokens, "ms": times}
    yield measured("length", f"A/A control: MLE / MLE at {first}", control, target="control", detail=detail)
    for nodes in scale.lengths[1:]:
        ours_growth, mle_growth = (paired(seconds, f"{who}, {nodes}", f"{who}, {first}") for who in ("ours", "MLE"))
        yield measured(
            "length",
            f"growth {first} → {nodes}, ours / MLE",
            [o / m for o, m in zip(ours_growth, mle_growth, strict=True)],
            target="length",
            detail={"ours": statistics.median(ours_growth), "MLE": statistics.median(mle_growth)},
        )
