"""The settings that say where rollouts are made, by whom, and how old the weights may be that make them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from sequencematch.data.spelling import check_choice
from sequencematch.extras import require

#: Where rollouts are made: by the policy between two steps, by processes on this machine, or by actors of a Ray cluster.
PLACES = ("inline", "process", "ray")
#: What a run does without a worker: it waits for one, or fails after `rollout_timeout_s`.
WITHOUT_WORKERS = ("wait", "fail")
#: Settings of one place alone.
_ONLY: Mapping[str, str] = MappingProxyType({"rollout_device": "process", "rollout_gpus": "ray", "ray_address": "ray"})


@dataclass
class RolloutSettings:
    """Where rollouts are made. None stands for the default that the help text gives, and belongs to other values of `rollouts`."""

    rollouts: str = field(
        default="inline",
        metadata={
            "help": "Where rollouts are made: inline (by the policy itself, between two steps), process (by processes on this "
            "machine, while training goes on), or ray (by actors of a Ray cluster)."
        },
    )
    rollout_workers: int | None = field(
        default=None, metadata={"help": "Workers that make rollouts, for all training processes together. Default: 1."}
    )
    rollout_cpus: int | None = field(
        default=None, metadata={"help": "CPU threads of a worker, and the CPUs that Ray reserves for it. Default: 1."}
    )
    rollout_gpus: float | None = field(
        default=None,
        metadata={
            "help": "With ray, GPUs of a worker, perhaps a fraction. Default: 1 if training is on a GPU, else 0."
        },
    )
    rollout_device: str | None = field(
        default=None,
        metadata={"help": "With process, the device of the workers, such as cuda:1. Default: the policy's."},
    )
    ray_address: str | None = field(
        default=None,
        metadata={
            "help": "With ray, an existing cluster: auto, or an address. Default: the cluster that the program is connected to, "
            "else one on this machine, stopped when training ends."
        },
    )
    max_staleness: int | None = field(
        default=None,
        metadata={
            "help": "Most optimisation steps between the weights that made a rollout and the step that first draws from it. With "
            "0 training waits for every rollout, as inline. Default: twice the steps that generation_batch_size lasts."
        },
    )
    rollout_sync_steps: int | None = field(
        default=None,
        metadata={"help": "Steps for which workers keep the same weights, if max_staleness allows it. Default: 1."},
    )
    rollout_timeout_s: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that a worker may take for its part of a generation batch; then it is replaced. Default: 600."
        },
    )
    rollout_without_workers: str | None = field(
        default=None,
        metadata={
            "help": "What training does while there is no worker: wait, or fail after rollout_timeout_s. Default: wait."
        },
    )

    def check_rollouts(self, *, are_made: bool) -> None:
        """Refuse settings that can't work or would be ignored; `are_made` says whether the objective makes rollouts."""
        check_choice("rollouts", self.rollouts, PLACES)
        given = {name: value for name in WHERE if name != "rollouts" and (value := getattr(self, name)) is not None}
        if self.rollouts != "inline" and not are_made:
            raise ValueError(
                f"`rollouts` would be ignored: this objective makes none. Got {self.rollouts!r}; leave it out, or use objective "
                f"'sequencematch' with divergence 'chi2_mixture'."
            )
        for name, value in given.items():
            wanted = _ONLY.get(name)
            if self.rollouts == "inline" or wanted not in (None, self.rollouts):
                place = f"rollouts={wanted!r}" if wanted else "rollouts='process' or 'ray'"
                raise ValueError(
                    f"`{name}` would be ignored: it belongs to {place}. Got {value!r} with {self.rollouts!r}."
                )
        for name in ("rollout_workers", "rollout_cpus", "rollout_sync_steps"):
            if not given.get(name, 1) >= 1:
                raise ValueError(f"`{name}` must be at least 1. Got {given[name]}.")
        for name in ("max_staleness", "rollout_gpus"):
            if not given.get(name, 0) >= 0:
                raise ValueError(f"`{name}` must not be negative. Got {given[name]}.")
        if not given.get("rollout_timeout_s", 1) > 0:
            raise ValueError(f"`rollout_timeout_s` must be positive. Got {self.rollout_timeout_s}.")
        if self.rollout_without_workers is not None:
            check_choice("rollout_without_workers", self.rollout_without_workers, WITHOUT_WORKERS)
        every, oldest = self.rollout_sync_steps, self.max_staleness
        if every is not None and oldest is not None and every > oldest + 1:
            raise ValueError(
                f"`rollout_sync_steps` must be at most `max_staleness` + 1, or it would be ignored: older weights are not used. "
                f"Got {every} and {oldest}."
            )
        if self.rollouts == "ray":
            require("ray", "ray", "rollouts='ray'")


#: All these settings. Where rollouts are made may change when a run is resumed, so they identify no run.
WHERE = tuple(f.name for f in fields(RolloutSettings))


def chosen(settings: Any, name: str, default: Any) -> Any:
    """A setting, or the default where it was left open."""
    value = getattr(settings, name)
    return default if value is None else value
