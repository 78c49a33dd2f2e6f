"""Runs of twenty steps on one, two and three processes, and runs resumed on another number of processes than they began on.

torchrun --nproc-per-node 3 -m tests.training.processes_run FOLDER process makes rollouts in a worker process, then inline; with
`ray` there are only the runs with a worker, which is an actor.
"""

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copytree
from types import MappingProxyType
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.launch import prepare_multi_gpu_env
from peft import LoraConfig
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sequencematch.policy import storage
from sequencematch.training import SequenceMatchConfig, SequenceMatchTrainer
from tests.remembered_probe import remember_probes
from tests.training import tiny_run
from tests.training.distributed_run import WORDS, Case, policy, rows, shard

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Beginnings of the variables by which `accelerate launch` tells its processes to use FSDP.
FSDP = ("ACCELERATE_USE_FSDP", "FSDP_")
#: A step has six rows: three processes take one each, twice. Sixteen rows are not a multiple: where two processes share the last
#: four of an epoch, one has one of them; where three do, only the first has a row in the second half of the step.
GLOBAL_BATCH, STEPS, SAVED = 6, 20, 10
#: What is trained, and how it is spread: by DDP; by `fully_shard` in the caller's hands; by accelerate with its FSDP2 plugin.
KINDS = ("full", "lora")
HOW = ("ddp", "fully_shard", "fsdp plugin")
#: Processes → how runs are spread over them.
SPREAD: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {1: ("alone",), 2: ("ddp", "fully_shard"), 3: ("ddp", "fsdp plugin")}
)
#: Checkpoints resumed: (processes, how, kind) that saved it, and (processes, how) that goes on.
RESUMED = (
    ((2, "ddp", "full"), (3, "ddp")),
    ((2, "fully_shard", "lora"), (3, "fsdp plugin")),
    ((3, "fsdp plugin", "full"), (2, "fully_shard")),
    ((3, "ddp", "lora"), (2, "ddp")),
    ((1, "alone", "full"), (2, "fully_shard")),
    ((2, "fully_shard", "full"), (1, "alone")),
    ((3, "fsdp plugin", "lora"), (1, "alone")),
)
#: Runs whose rollouts are made by a worker of the first process: (processes, how, kind).
WITH_WORKER = ((2, "ddp", "full"), (2, "fully_shard", "lora"), (3, "ddp", "lora"), (3, "fsdp plugin", "full"))


@dataclass(frozen=True)
class Result:
    """The losses of a run's steps and on held-out rows, the weights it ended with, its rollouts, and how it was spread."""

    losses: list[float]
    held_out: list[float]
    weights: dict[str, Tensor]
    rollouts: list[tuple[tuple[int, ...], ...]]
    processes: int
    sharded: bool
    sharded_layers: bool


def name_of(processes: int, how: str, kind: str) -> str:
    """A run's folder."""
    return f"{kind}, {how}, {processes}"


def resumed_name(saved: tuple[int, str, str], onto: tuple[int, str]) -> str:
    """The folder of a run that was resumed."""
    return f"{name_of(*saved)} on {onto[0]} by {onto[1]}"


def worker_name(case: tuple[int, str, str], engine: str) -> str:
    """The folder of a run with a worker."""
    return f"{name_of(*case)} with {engine}"


def arguments(folder: Path, processes: int, **changes: Any) -> SequenceMatchConfig:
    """Adam, whose state must be resumed. Its ε is large, or gradients of nearly 0 would count by their sign alone."""
    accumulated = 2 if processes == 3 else 1
    settings: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // processes // accumulated,
        "gradient_accumulation_steps": accumulated,
        "max_steps": STEPS,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-2,
        "learning_rate": 3e-3,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "noise_rate": 0.3,
        "generation_batch_size": 4,
        "replay_reuse": 2.0,
        "alpha": 0.1,
        "gamma": 0.9,
        "bc_steps": 5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": SAVED,
        "per_device_eval_batch_size": 3,  # of four rows: two processes share out two batches, of three one has none
    }
    return tiny_run.config(folder, **{**settings, **changes})


def run(
    folder: Path, how: str, kind: str, processes: int, *, resume: bool = False, fsdp_version: str = "2", **changes: Any
) -> Result:
    """Train for twenty steps, or resume from the checkpoint in the folder."""
    torch.manual_seed(0)
    made = policy(Case())
    if kind == "lora":
        adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        made = with_lora(made, adapter)
    if how == "fully_shard":
        shard(made)
    args = arguments(folder, processes, **changes)
    if how == "fsdp plugin":
        pretend_to_have_gpus(args, fsdp_version)
    trainer = SequenceMatchTrainer(model=made, args=args, train_dataset=rows(WORDS), eval_dataset=rows(WORDS[:4]))
    if how == "fsdp plugin":
        assert trainer.accelerator.is_fsdp2
    trainer.train(resume_from_checkpoint=resume or None)
    result = Result(
        losses=[line["loss"] for line in trainer.state.log_history if "loss" in line],
        held_out=[line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
        weights=storage.gathered_weights(made) or made.state_dict(),
        rollouts=[(r.trajectory.initial, r.trajectory.chosen) for r in trainer.on_policy.buffer.rollouts],
        processes=trainer.accelerator.num_processes,
        sharded=all(isinstance(parameter, DTensor) for parameter in made.parameters()),
        sharded_layers=all(isinstance(layer, FSDPModule) for layer in made.base.model.layers),
    )
    trainer.accelerator.free_memory()
    return result


def with_lora(made: Any, adapter: LoraConfig) -> Any:
    """The policy with an adapter, drawn from the same seed in every process."""
    from sequencematch.policy import Policy
    from sequencematch.policy.adapters import with_adapter

    return Policy(with_adapter(made.model, adapter, made.space.ends), made.tokenizer, made.backspace)


def pretend_to_have_gpus(args: SequenceMatchConfig, fsdp_version: str) -> None:
    """Accelerate shards nothing on a CPU and says nothing of it. Told that there are GPUs, it runs the same code there.

    Its settings are those that `accelerate launch` makes of the example's file.
    """
    assert args.device.type == "cpu"  # accelerate's state is made here
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    asked = ["--config_file", str(EXAMPLES / "accelerate" / "fsdp2.yaml"), "train.py"]
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args(asked))
    own = {name: value for name, value in prepare_multi_gpu_env(launch).items() if name.startswith(FSDP)}
    assert own["FSDP_VERSION"] == "2"
    os.environ |= own | {
        "FSDP_VERSION": fsdp_version,
        "FSDP_SYNC_MODULE_STATES": "false",
    }  # of FSDP 1, and for GPUs alone


def forget_accelerate() -> None:
    """Accelerate's state as before its first use."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith(FSDP)]:
        del os.environ[name]


@contextmanager
def group(processes: int, store: Path) -> Iterator[bool]:
    """A process group of the first of the launched processes; whether this one is in it."""
    rank = int(os.environ["RANK"])
    if rank >= processes:
        yield False
        return
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    yield True
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def refusals(folder: Path) -> list[str]:
    """What three processes say of the run of two that takes other numbers of rows a step, and of FSDP 1."""
    said = []
    for how, per_process, version in (("ddp", 1, "2"), ("ddp", 4, "2"), ("fsdp plugin", 2, "1")):
        try:
            sizes = {"per_device_train_batch_size": per_process, "gradient_accumulation_steps": 1}
            run(folder, how, "full", 3, resume=True, fsdp_version=version, **sizes)
        except ValueError as error:
            said.append(str(error))
        forget_accelerate()
    return said


def resume_all(folder: Path, processes: int) -> dict[str, Result]:
    """Every checkpoint that this number of processes goes on from."""
    found = {}
    for saved, onto in RESUMED:
        if onto[0] == processes:
            forget_accelerate()
            place = folder / resumed_name(saved, onto)
            if int(os.environ.get("RANK", "0")) == 0:
                copytree(folder / name_of(*saved) / "run", place / "run")
                copied = place / "run" / f"checkpoint-{STEPS}"
                copied.rename(place / "finished")
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            found[place.name] = run(place, onto[1], saved[2], processes, resume=True)
    forget_accelerate()
    return found


def train_all(folder: Path, processes: int) -> dict[str, Result]:
    """All runs of one number of processes, with a checkpoint in the middle."""
    found = {}
    for how in SPREAD[processes]:
        for kind in KINDS:
            forget_accelerate()
            name = name_of(processes, how, kind)
            found[name] = run(folder / name, how, kind, processes)
    forget_accelerate()
    return found


def connect_once() -> None:
    """One cluster for all runs, of the first process: starting one takes seconds."""
    if int(os.environ["RANK"]) == 0:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def train_with_worker(folder: Path, processes: int, engine: str) -> dict[str, Result]:
    """Runs of one number of processes that share a worker, whose weights are those of the step."""
    found = {}
    for case in WITH_WORKER:
        if case[0] == processes:
            forget_accelerate()
            name = worker_name(case, engine)
            found[name] = run(folder / name, case[1], case[2], processes, rollouts=engine, max_staleness=0)
    forget_accelerate()
    return found


def launched_command(folder: Path, engine: str) -> list[str]:
    """What starts three processes."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    return [sys.executable, "-m", *launcher, "-m", "tests.training.processes_run", str(folder), engine]


def found_in(folder: Path) -> tuple[dict[str, Result], list[str]]:
    """The results of the launched processes, and what was refused."""
    launched = torch.load(folder / "found.pt", weights_only=True)
    return {name: Result(**values) for name, values in launched["results"].items()}, launched["said"]


def main(folder: Path, engine: str) -> None:
    """Two processes, then three, then two again; the first writes the results down."""
    gc.freeze()
    remember_probes()
    results: dict[str, Result] = {}
    said: list[str] = []
    if engine == "ray":
        connect_once()
    for number, processes in enumerate((2, 3, 2)):
        with group(processes, folder / f"store-{number}") as takes_part:
            if takes_part and number < 2:
                results |= train_with_worker(folder, processes, engine)
            if engine == "ray":
                continue
            if takes_part and number < 2:
                results |= train_all(folder, processes)
            if takes_part and number > 0:
                results |= resume_all(folder, processes)
            if takes_part and number == 1:
                said = refusals(folder / name_of(2, "ddp", "full"))
    if int(os.environ["RANK"]) == 0:
        torch.save({"results": {n: asdict(r) for n, r in results.items()}, "said": said}, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
