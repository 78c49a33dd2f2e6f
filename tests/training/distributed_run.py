"""Short runs with eight examples a step, to be compared: in this process, or launched as a module in several.

accelerate launch --multi_gpu --num_processes 2 -m tests.training.distributed_run FOLDER
"""

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from sequencematch.core.integral_metrics import INTEGRAL_METRICS
from sequencematch.policy import Policy, storage
from sequencematch.training import SequenceMatchTrainer, StoppedEarlyError
from tests.remembered_probe import remember_probes
from tests.training import tiny_run

#: Of many lengths, some with equal prompts. Sixteen, so that epochs end with a step.
WORDS: tuple[str, ...] = (
    *("a", "sunflower", "stream", "moon", "cat", "sun", "river", "grass"),
    *("straw", "mountain", "cloud", "be", "apple", "streetcar", "dog", "house"),
)
STEPS = 3
#: How models are spread over processes: replicated, or sharded by FSDP2.
HOW = ("ddp", "fsdp")


@dataclass(frozen=True)
class Case:
    """A way to train: settings of the trainer, and of the model."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    tied: bool = False


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "sequencematch": Case(),
        "sequencematch, packed": Case({"packing": True}),
        "sequencematch, float64": Case(exact=True),
        "bc": Case({"objective": "bc"}),
        "bc, packed": Case({"objective": "bc", "packing": True}),
        "mle": Case({"objective": "mle", "noise_rate": None}),
        "mle, packed": Case({"objective": "mle", "noise_rate": None, "packing": True}),
        "one rollout at a time": Case({"generation_batch_size": 1, "bc_steps": 1, "bc_anneal_steps": 2}),
        "noise of the model": Case({"objective": "bc", "noise_source": "model"}),
        "gradients clipped": Case({"objective": "bc", "max_grad_norm": 1.0}),
        "corrections": Case({"objective": "bc", "correction_rate": 0.7}),
        "offset head apart": Case({"offset_lr_multiplier": 5.0, "max_grad_norm": 1.0}),
        "weights tied, saved": Case(
            {"save_strategy": "steps", "save_steps": STEPS, "save_only_model": True}, tied=True
        ),
    }
)


#: The cases that are run in every layout; for the others one is enough.
MAIN = ("sequencematch", "sequencematch, packed", "bc", "bc, packed", "mle", "mle, packed")
#: What two processes run: a case, and a layout, which is (batch of a process, batches accumulated). Packed rows are rows to every
#: objective; only what touches weights and gradients differs where they are sharded.
REPLICATED = tuple(case for case in CASES if case not in ("bc, packed", "mle, packed"))
SHARDED = tuple(
    case for case in REPLICATED if case not in ("mle", "sequencematch, float64", "one rollout at a time", "corrections")
)
RUNS = {how: tuple((case, (2, 2)) for case in cases) for how, cases in zip(HOW, (REPLICATED, SHARDED), strict=True)}


@dataclass(frozen=True)
class Result:
    """What a run logged at each step, the weights it ended with, the rollouts it made, and how its model was spread."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    rollouts: list[tuple[tuple[int, ...], tuple[int, ...]]]
    wrapper: str
    processes: int
    is_sharded: bool


class WithoutFactor(SequenceMatchTrainer):
    """Forgets that gradients are averaged over processes."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options) / self.accelerator.num_processes


def rows(words: Sequence[str]) -> list[dict[str, str]]:
    """The first third of a word is the prompt."""
    cuts = [(len(word) + 2) // 3 for word in words]
    return [{"prompt": word[:cut], "completion": word[cut:]} for word, cut in zip(words, cuts, strict=True)]


def policy(case: Case) -> Policy:
    """A fresh one that often deletes and often ends, so that rollouts are of many lengths; its offset isn't zero."""
    made = tiny_run.policy(exact=case.exact, initializer_range=0.5, tie_word_embeddings=case.tied)
    with torch.no_grad():
        made.backspace.row.copy_(2 * made.unembedding().weight[8])
        made.unembedding().weight[made.space.eos] *= 1.5
        torch.nn.init.normal_(made.backspace.offset_out.weight, std=0.5)
    return made


def shard(made: Policy) -> None:
    """FSDP2: every layer by itself, and with the policy what is left."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in made.base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)


def run(
    folder: Path,
    case: str,
    layout: tuple[int, int],
    *,
    sharded: bool = False,
    trainer_class: type[SequenceMatchTrainer] = SequenceMatchTrainer,
    words: Sequence[str] = WORDS,
    **changes: Any,
) -> Result:
    """A few steps of plain gradient descent, whose updates are as exact as gradients are; then save.

    Rollouts take part from the first step on, and are made three at a time.
    """
    made = policy(CASES[case])
    if sharded:
        shard(made)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": layout[0],
        "gradient_accumulation_steps": layout[1],
        "optim": "sgd",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "noise_rate": 0.3,
        "generation_batch_size": 3,
        "replay_reuse": 2.0,
        "alpha": 0.1,
        "gamma": 0.9,
        **CASES[case].settings,
        **changes,
    }
    trainer = trainer_class(model=made, args=tiny_run.config(folder, **settings), train_dataset=rows(words))
    trainer.train()
    trainer.save_model()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return Result(
        losses=[step["loss"] for step in steps],
        grad_norms=[float(step["grad_norm"]) for step in steps],
        weights=storage.gathered_weights(made) or made.state_dict(),
        rollouts=[(r.trajectory.initial, r.trajectory.chosen) for r in trainer.on_policy.buffer.rollouts],
        wrapper=type(trainer.model_wrapped).__name__,
        processes=trainer.accelerator.num_processes,
        is_sharded=all(isinstance(parameter, DTensor) for parameter in made.parameters()),
    )


def run_name(case: str, layout: tuple[int, int]) -> str:
    return "{}, {}x{}".format(case, *layout)


def refusal_to_roll_out() -> str:
    """What a sharded policy says when it is rolled out as it is."""
    made = policy(CASES["sequencematch"])
    shard(made)
    try:
        made.generate([[4, 5]], max_new_tokens=2, seed=0)
    except RuntimeError as error:
        return str(error)
    return ""


class AskInOne(TrainerCallback):
    """SIGTERM reaches the second process alone, in its second step."""

    def __init__(self, trainer: SequenceMatchTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if args.process_index == 1 and state.global_step == 1:
            self.trainer.stop.ask()


def endings(folder: Path) -> list[list[str]]:
    """What every process says of a run that is stopped in one of them, and of one that only the first knows can't be resumed."""
    rows_of_words, said = rows(WORDS), []
    for resume in (None, True):
        made = policy(CASES["bc"])
        args = tiny_run.config(folder / str(resume), max_steps=STEPS, objective="bc", per_device_train_batch_size=4)
        trainer = SequenceMatchTrainer(model=made, args=args, train_dataset=rows_of_words)
        trainer.add_callback(AskInOne(trainer))
        try:
            trainer.train(resume_from_checkpoint=resume)
        except (StoppedEarlyError, ValueError) as error:
            said.append(str(error))
    everywhere: list[list[str]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everywhere, said)
    return everywhere


def run_all(how: str, folder: Path) -> dict[str, Any]:
    """All cases one after another, and what a sharded policy refuses."""
    sharded = how == "fsdp"
    results: dict[str, Result] = {}
    for case, layout in RUNS[how]:
        name = run_name(case, layout)
        results[name] = run(folder / name, case, layout, sharded=sharded)
    for metric in INTEGRAL_METRICS:
        results[metric] = run(
            folder / metric, "sequencematch", (2, 2), sharded=sharded, divergence=metric, alpha=0.5, noise_rate=0.0
        )
    results["without the factor"] = run(
        folder / "factor", "bc", (4, 1), sharded=sharded, trainer_class=WithoutFactor, max_steps=1
    )
    refusal = refusal_to_roll_out() if sharded else ""
    said = [] if sharded else endings(folder / "endings")
    return {"results": {name: asdict(result) for name, result in results.items()}, "refusal": refusal, "said": said}


def main(folder: Path) -> None:
    """Every case, spread in every way, in each process that was launched; the first writes the results down."""
    gc.freeze()  # every run collects garbage: not among what was imported
    remember_probes()
    found = {how: run_all(how, folder / how) for how in HOW}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
