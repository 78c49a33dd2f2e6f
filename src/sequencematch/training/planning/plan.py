"""GPUs shared out between training and rollouts, so that the trainer doesn't wait, and what a step then takes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from sequencematch.training.planning.costs import (
    HALF,
    Workload,
    exchange_seconds,
    generation_seconds,
    rollout_bytes,
    shards,
    state_bytes,
    step_bytes,
    step_flops,
    step_seconds,
    sync_bytes,
)
from sequencematch.training.planning.hardware import Hardware


@dataclass(frozen=True)
class Layout:
    """GPUs that train and GPUs that only roll out, none of them where every GPU does both in turn.

    Seconds are those of a step; `waiting_s` is the part in which the trainer waits for rollouts or makes them. `tokens_per_s`
    counts tokens of data.
    """

    train_gpus: int
    rollout_gpus: int
    step_s: float
    waiting_s: float
    tokens_per_s: float
    train_bytes: float
    rollout_bytes: float
    fits: bool
    spread: str


@dataclass(frozen=True)
class Plan:
    """What a run takes on a number of GPUs: in turn on all of them (`inline`), or shared out (`apart`, None for one GPU).

    `rollout_gpus_per_train_gpu` is the ratio at which neither side waits. `behind_steps` is how many steps old a rollout is when
    it is made, where rollouts are made apart, and `age_steps` the mean age of a rollout in the buffer on top of that.
    """

    work: Workload
    hardware: Hardware
    gpus: int
    flops_per_step: float
    train_s: float
    exchange_s: float
    mle_s: float
    generation_s: float
    rollout_gpus_per_train_gpu: float
    behind_steps: float
    age_steps: float
    sync_bytes: float
    sync_s: float
    inline: Layout
    apart: Layout | None

    @property
    def best(self) -> Layout:
        """The layout with more tokens a second."""
        layouts = [self.inline, *([] if self.apart is None else [self.apart])]
        return max(layouts, key=lambda layout: (layout.fits, layout.tokens_per_s))

    def as_json(self) -> dict[str, Any]:
        """All numbers, with where the hardware's were measured."""
        # A mapping proxy can't be copied by `asdict`.
        whole = asdict(replace(self, hardware=replace(self.hardware, sources={})))
        whole["hardware"]["sources"] = dict(self.hardware.sources)
        return whole

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """The readable table: what, one layout, the other."""
        inline, apart = self.inline, self.apart
        both = [inline] if apart is None else [inline, apart]

        def row(name: str, texts: list[str]) -> tuple[str, str, str]:
            return name, texts[0], texts[1] if len(texts) > 1 else ""

        yield row("GPUs that train", [str(each.train_gpus) for each in both])
        yield row("GPUs that only roll out", [str(each.rollout_gpus) for each in both])
        yield row("training spread by", [each.spread for each in both])
        yield row("seconds of a step", [f"{each.step_s:.2f}" for each in both])
        yield row("of these, rollouts", [f"{each.waiting_s:.2f}" for each in both])
        yield row("step over one of MLE", [f"{each.step_s / self.mle_s:.2f}" for each in both])
        yield row("tokens of data a second", [f"{each.tokens_per_s:,.0f}" for each in both])
        yield row("memory of training, GB", [f"{each.train_bytes / 1e9:.1f}" for each in both])
        yield row("memory of rollouts, GB", [f"{each.rollout_bytes / 1e9:.1f}" for each in both])
        yield row(f"fits {self.hardware.memory_bytes / 1e9:.0f} GB", ["yes" if each.fits else "no" for each in both])

    def notes(self) -> Iterator[str]:
        """What the table has no room for, a sentence each."""
        yield (
            f"{self.rollout_gpus_per_train_gpu:.3g} rollout GPUs per training GPU keep pace; a generation of "
            f"{self.work.generation_batch} rollouts takes {self.generation_s:.1f} s."
        )
        if self.apart is not None:
            whole = self.gpus * self.work.generation_batch
            yield f"In turn, set `generation_batch_size` to {whole}, which is over all GPUs, and `replay_size` to no less."
            yield f"Apart, a rollout is {self.behind_steps:.1f} steps old when it reaches the buffer."
        yield f"The buffer's rollouts are on average {self.age_steps:.0f} steps older than that when they are drawn."
        if not self.best.fits:
            yield "Every GPU that makes rollouts holds the whole model: weights are sharded in training only."
        yield f"Publishing weights: {self.sync_bytes / 1e9:.3g} GB, {self.sync_s:.2g} s."


def plan(work: Workload, gpus: int, hardware: Hardware, replay_size: int = 1000) -> Plan:
    """Share out GPUs: as many as can train while the others make the rollouts that they use up."""
    if gpus < 1:
        raise ValueError(f"`gpus` must be at least 1. Got {gpus}.")
    generation = generation_seconds(work, hardware)
    per_second = work.generation_batch / generation
    trained = step_seconds(work, gpus, hardware)
    used = work.batch_size / work.reuse
    apart = _apart(work, gpus, hardware, per_second) if gpus > 1 else None
    layout = _inline(work, gpus, hardware, used / per_second) if apart is None else apart
    size = sync_bytes(work)
    # The whole buffer is drawn from: its rollouts are between 0 and the steps of a buffer old.
    made = max(layout.train_gpus * used, 1e-9)
    return Plan(
        work=work,
        hardware=hardware,
        gpus=gpus,
        flops_per_step=step_flops(work),
        train_s=trained,
        exchange_s=exchange_seconds(work, gpus, hardware),
        mle_s=step_seconds(replace(work, rollouts=False), gpus, hardware),
        generation_s=generation,
        rollout_gpus_per_train_gpu=used / trained / per_second,
        behind_steps=generation / layout.step_s,
        age_steps=replay_size / made / 2,
        sync_bytes=size,
        sync_s=size / hardware.network_bandwidth,
        inline=_inline(work, gpus, hardware, used / per_second),
        apart=apart,
    )


def _inline(work: Workload, gpus: int, hardware: Hardware, waiting: float) -> Layout:
    """Every GPU trains, and makes its own rollouts between two steps, with the weights gathered."""
    step = step_seconds(work, gpus, hardware) + waiting
    parts = shards(work, gpus, hardware)
    of_weights = HALF * work.shape.weights if work.rank is not None else 0
    rollouts = state_bytes(work, parts) + rollout_bytes(work) - of_weights / parts
    return _layout(work, gpus, 0, step, waiting, step_bytes(work, parts, hardware), rollouts, hardware)


def _apart(work: Workload, gpus: int, hardware: Hardware, per_second: float) -> Layout:
    """As many GPUs train as the others can keep busy, at least one."""
    for train in range(gpus - 1, 0, -1):
        alone = step_seconds(work, train, hardware)
        needed = train * work.batch_size / work.reuse / ((gpus - train) * per_second)
        if needed <= alone or train == 1:
            break
    step = max(alone, needed)
    memory = step_bytes(work, shards(work, train, hardware), hardware), rollout_bytes(work)
    return _layout(work, train, gpus - train, step, step - alone, *memory, hardware)


def _layout(
    work: Workload,
    train: int,
    rollout: int,
    step: float,
    waiting: float,
    train_bytes: float,
    rollouts: float,
    hardware: Hardware,
) -> Layout:
    tokens = train * work.batch_size * work.context / step
    fits = max(train_bytes, rollouts) <= hardware.memory_bytes
    spread = "one GPU" if train == 1 else "FSDP2" if shards(work, train, hardware) > 1 else "DDP"
    return Layout(train, rollout, step, waiting, tokens, train_bytes, rollouts, fits, spread)
