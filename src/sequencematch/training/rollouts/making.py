"""The source of rollouts that the settings ask for."""

from typing import Any

from sequencematch.training.rollout_settings import chosen
from sequencematch.training.rollouts.asynchronous import AsynchronousRollouts
from sequencematch.training.rollouts.pool import Engine
from sequencematch.training.rollouts.processes import ProcessEngine
from sequencematch.training.rollouts.source import InlineRollouts, RolloutSource


def rollout_source(args: Any, given: RolloutSource | None, *, is_main: bool) -> RolloutSource:
    """The caller's source, the policy itself, or workers, which the first process starts for all; `args` are the run's settings."""
    if args.rollouts == "inline":
        return given or InlineRollouts()
    if given is not None:
        raise ValueError(
            f"`args.rollouts` would be ignored: `rollouts` says where they come from. Got {args.rollouts!r}; leave one of them out."
        )
    workers, threads = chosen(args, "rollout_workers", 1), chosen(args, "rollout_cpus", 1)
    gpus = chosen(args, "rollout_gpus", 1.0 if args.device.type == "cuda" else 0.0) if args.rollouts == "ray" else 0.0
    engine: Engine | None = None
    if is_main and args.rollouts == "ray":
        from sequencematch.training.rollouts.on_ray import RayEngine

        engine = RayEngine(args.ray_address, workers=workers, cpus=threads, gpus=gpus)
    elif is_main:
        engine = ProcessEngine()
    return AsynchronousRollouts(
        engine,
        workers=workers,
        device=args.rollout_device if args.rollouts == "process" else "cuda" if gpus else "cpu",
        threads=threads,
        sync_steps=chosen(args, "rollout_sync_steps", 1),
        limit_s=chosen(args, "rollout_timeout_s", 600.0),
        waits=chosen(args, "rollout_without_workers", "wait") == "wait",
    )
