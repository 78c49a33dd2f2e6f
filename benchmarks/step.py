"""The training step beside plain Hugging Face's maximum likelihood and the paper's recipe."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import paper_recipe
from benchmarks.peers import autocast, mle_step, same_rows_step, updater, with_attention
from benchmarks.session import Generated, Session, random_prompts
from benchmarks.timing import Call, Measurement, measured, paired, peak_bytes, seconds_of
from benchmarks.workloads import NOISE, Workload, of_step, text
from sequencematch.core.divergences import CHI2_MIXTURE
from sequencematch.policy import Policy
from sequencematch.policy.adapters import without_input_casts
from sequencematch.policy.causal_prefix import CAUSAL_PREFIX
from sequencematch.policy.changes import changed, uncompiled
from sequencematch.policy.fusing import fusions
from sequencematch.policy.modes import compile_layers
from sequencematch.training.losses import OBJECTIVES, Batch, Weights
from sequencematch.training.step import accumulate_gradients

ALPHA, GAMMA = 0.01, 0.998
WEIGHTS = Weights(CHI2_MIXTURE, ALPHA, GAMMA, bc_weight=0.0)
MLE, CONTROL, BC, PAPER = "MLE", "MLE (A/A control)", "BC", "the paper's recipe"
#: MLE without the PEFT casts that our trainer switches off.
NO_CASTS = "MLE without PEFT's input casts"
#: Tokens of the paper's sampling that are timed. Longer generations are extrapolated, though sampling slows down.
PAPER_SAMPLES = 64


def our_step(policy: Policy, work: Workload, update: Callable[[], None], *, is_compiled: bool = False) -> Call:
    """A step as the trainer makes it: SequenceMatch, or behavioural cloning where there are no rollouts."""
    device, found = str(policy.device), [] if is_compiled else fusions(policy.base)
    objective = OBJECTIVES["sequencematch" if work.rollouts else "bc"]

    def forward_backward(part: Batch) -> Tensor:
        with autocast(device):
            loss, _ = objective.loss(policy, part.to(device), WEIGHTS)
        loss.backward()
        return loss.detach()

    def step() -> None:
        parts = work.parts(policy.base.config.hidden_size, device)
        accumulate_gradients(policy, parts, forward_backward, found, is_autocast=device.startswith("cuda"))
        update()

    return step


def paper_step(policy: Policy, workload: Workload, context: int, update: Callable[[], None]) -> Call:
    """The same loss computed by the paper's recipe."""
    device = str(policy.device)

    def step() -> None:
        with autocast(device):
            loss = paper_recipe.loss(policy, workload.data, workload.rollouts, context, alpha=ALPHA, gamma=GAMMA)
        loss.backward()
        update()

    return step


def without_casts(policy: Policy, call: Call) -> Call:
    """The call without PEFT's casts of adapters' inputs."""

    def run() -> object:
        with changed(without_input_casts(policy)):
            return call()

    return run


def variants_of(session: Session, policy: Policy, workloads: dict[str, Workload]) -> dict[str, Call]:
    """All timed steps by name: ours, named after their workloads, and the peers'."""
    scale, device = session.scale, session.device
    update = updater(policy, device)
    ours: dict[str, Call] = {}
    peers: dict[str, Call] = {}
    for name, workload in workloads.items():
        ours[name] = our_step(policy, workload, update)
        peers[f"{MLE}, {name}"] = mle_step(policy.model, workload.clean, device, update)
    equal = workloads["equal"]
    peers[CONTROL] = peers[f"{MLE}, equal"]
    del peers[f"{MLE}, short"]  # the same data
    if equal.clean.shape == workloads["shared"].clean.shape:
        peers.pop(f"{MLE}, shared")
    if scale.same_rows:
        noised = text(policy.space, scale.batch, scale.context, None, noise=NOISE)
        ours[BC] = our_step(policy, noised, update)
        for name, workload in ((BC, noised), ("equal", equal)):
            rows = [part.encoding for part in workload.parts(scale.step.hidden, device)]
            peers[f"same rows, {name}"] = same_rows_step(policy.model, rows, device, update)
    if scale.is_lora:
        peers[NO_CASTS] = without_casts(policy, peers[CONTROL])
    peers[PAPER] = paper_step(policy, equal, scale.context, update)
    return {
        **{name: with_attention(policy, "sdpa", call) for name, call in peers.items()},
        **{name: with_attention(policy, CAUSAL_PREFIX, call) for name, call in ours.items()},
    }


def step(session: Session) -> Iterator[Measurement]:
    """Seconds and peak memory of steps, alone and with sampling spread over the steps that use it."""
    scale = session.scale
    policy = session.step_policy()
    policy.train()
    workloads = of_step(scale)
    variants = variants_of(session, policy, workloads)
    weighed = (f"{MLE}, equal", "equal", PAPER, *([NO_CASTS] if scale.is_lora else []))
    memory = {name: _memory(variants[name], session) for name in weighed}
    seconds = session.seconds("training step", variants)
    detail = {
        "model": scale.step.name + (", LoRA r 64, gradient checkpointing" if scale.is_lora else ""),
        "ms": {name: 1e3 * statistics.median(times) for name, times in seconds.items()},
        "context": scale.context,
        "batch": scale.batch,
    }
    mle = {name: f"{MLE}, {name}" if f"{MLE}, {name}" in seconds else f"{MLE}, equal" for name in workloads}
    yield measured(
        "step", "A/A control: MLE / MLE", paired(seconds, CONTROL, mle["equal"]), target="control", detail=detail
    )
    if scale.same_rows:
        for name, label in ((BC, f"BC at noise {NOISE}"), ("equal", "SequenceMatch")):
            ratios = paired(seconds, name, f"same rows, {name}")
            yield measured(
                "step", f"{label} / plain HF on the same rows, nodes and mask", ratios, target=f"same rows, {name}"
            )
    labels = {
        "equal": "rollouts as long as the data",
        "short": f"rollouts of {scale.rollout} nodes",
        "shared": f"shared prompts, {scale.prompt} of {scale.prompt + scale.completion} tokens",
    }
    for name, label in labels.items():
        laid = workloads[name].encode(scale.step.hidden).tokens.numel()
        yield measured(
            "step",
            f"SequenceMatch / MLE, step alone, {label}",
            paired(seconds, name, mle[name]),
            target=f"step, {name}",
            detail={"nodes": laid, "nodes of MLE": workloads[name].clean.numel()},
        )
    if NO_CASTS in seconds:
        yield measured("step", f"{NO_CASTS} / MLE", paired(seconds, NO_CASTS, mle["equal"]))
    yield measured("step", "the paper's recipe / ours, step alone", paired(seconds, PAPER, "equal"))

    held, beyond = {n: m[0] for n, m in memory.items()}, {n: m[1] for n, m in memory.items()}
    yield Measurement(
        "step", "peak memory, ours / MLE", held["equal"] / held[mle["equal"]], target="memory", detail=held
    )
    ratio = beyond["equal"] / beyond[mle["equal"]]
    yield Measurement("step", "peak memory beyond weights and optimizer, ours / MLE", ratio, detail=beyond)

    amortised: dict[str, list[float]] = {}
    sizes = {"equal": scale.context, "short": scale.rollout}
    for name, label in labels.items():
        prompt = scale.prompt if name == "shared" else scale.generation_prompt
        new_tokens = scale.completion if name == "shared" else sizes[name] - prompt
        generated = session.generation(prompt, new_tokens)
        share = len(workloads[name].data) / (scale.generation_batch * scale.reuse)
        amortised[name] = [s + generated.seconds * share for s in seconds[name]]
        ratios = [s / m for s, m in zip(amortised[name], seconds[mle[name]], strict=True)]
        yield measured(
            "step",
            f"SequenceMatch / MLE, sampling amortised, {label}",
            ratios,
            target=f"amortised, {name}",
            detail=_described(generated, share),
        )
    if NO_CASTS in seconds:
        ratios = [s / m for s, m in zip(amortised["equal"], seconds[NO_CASTS], strict=True)]
        yield measured("step", f"SequenceMatch / {NO_CASTS}, sampling amortised, {labels['equal']}", ratios)
    generated = _paper_generation(session, policy)
    share = scale.batch / (scale.generation_batch * scale.reuse)
    ratios = [(p + generated.seconds * share) / o for p, o in zip(seconds[PAPER], amortised["equal"], strict=True)]
    yield measured(
        "step",
        "the paper's recipe / ours, sampling amortised",
        ratios,
        target="paper",
        detail=_described(generated, share),
    )
    if session.device.startswith("cuda"):
        yield from _compiled(session, policy, workloads["equal"])


def _compiled(session: Session, policy: Policy, work: Workload) -> Iterator[Measurement]:
    """Our step with `compile_layers` over plain Hugging Face, and over Hugging Face compiled the same way."""
    update = updater(policy, session.device)
    mle = with_attention(policy, "sdpa", mle_step(policy.model, work.clean, session.device, update))
    ours = with_attention(policy, CAUSAL_PREFIX, our_step(policy, work, update, is_compiled=True))

    def plain() -> None:
        with changed(uncompiled(policy.modules())):
            mle()

    compile_layers(policy)
    policy.train()
    seconds = session.seconds("compiled", {MLE: plain, "MLE, compiled": mle, "compiled": ours})
    detail = {"ms": {name: 1e3 * statistics.median(times) for name, times in seconds.items()}}
    of = "rollouts as long as the data"
    yield measured(
        "step", f"SequenceMatch compiled / MLE, step alone, {of}", paired(seconds, "compiled", MLE), detail=detail
    )
    ratios = paired(seconds, "compiled", "MLE, compiled")
    yield measured("step", f"SequenceMatch compiled / MLE compiled, step alone, {of}", ratios)
    for layer in policy.modules():
        layer._compiled_call_impl = None


def _memory(call: Call, session: Session) -> tuple[int, int]:
    """Peak bytes of a step, with weights and optimizer on a GPU, and without them."""
    call()
    before = torch.cuda.memory_allocated() if session.device.startswith("cuda") else 0
    beyond = peak_bytes(call, session.device)
    return before + beyond, beyond


def _described(generated: Generated, share: float) -> dict[str, float]:
    return {
        "generation_s": generated.seconds,
        "actions": generated.actions,
        "generations_timed": generated.times,
        "share_of_a_generation_per_step": share,
    }


def _paper_generation(session: Session, policy: Policy) -> Generated:
    """The paper's sampling, extrapolated to the length of our generation."""
    scale = session.scale
    new_tokens = scale.context - scale.generation_prompt
    timed = min(PAPER_SAMPLES, new_tokens)
    prompts = random_prompts(policy, scale.generation_batch, scale.generation_prompt)
    policy.eval()
    sample = with_attention(policy, "sdpa", lambda: paper_recipe.sample(policy, prompts, timed))
    with autocast(session.device):
        sample()  # warm up: cuDNN plans a kernel for every length
        seconds = min(seconds_of(sample, session.device) for _ in range(scale.generations))
    return Generated(seconds * new_tokens / timed, timed * len(prompts), scale.generations)
