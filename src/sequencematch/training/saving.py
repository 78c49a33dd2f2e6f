"""What a run writes: its policy, and checkpoints from which it resumes exactly."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import set_seed
from transformers.trainer import OPTIMIZER_NAME as OPTIMIZER
from transformers.trainer import SCHEDULER_NAME as SCHEDULER
from transformers.trainer_callback import ExportableState

from sequencematch.data.examples import ExampleStream
from sequencematch.data.locks import locked
from sequencematch.data.seeds import hash_seed
from sequencematch.policy import storage
from sequencematch.policy.card import Deletion
from sequencematch.policy.finite import named, non_finite
from sequencematch.policy.sharding import gathered, is_sharded, shard_of
from sequencematch.training import checkpoints
from sequencematch.training.callbacks import NonFiniteError
from sequencematch.training.card import SAMPLES, model_card, trained_deletion
from sequencematch.training.collator import Collator
from sequencematch.training.inputs import name_of
from sequencematch.training.on_policy import OnPolicy
from sequencematch.training.optimizer import SeparateOffsetHead

logger = logging.getLogger(__name__)

T = TypeVar("T")
SIGNALS = "signals.json"


class Checkpointed(SeparateOffsetHead):
    """A trainer whose policy is saved in our format, and whose checkpoints are complete or absent."""

    on_policy: OnPolicy
    collate: Collator
    identity: dict[str, Any]
    #: For the model card; looked for when the policy is saved, not at checkpoints.
    deletion: Deletion | None = None

    def _summed(self, moments: Tensor) -> Tensor:
        return self.accelerator.reduce(moments, "sum")

    def _highest(self, number: int) -> int:
        """The highest of a number over all processes."""
        if self.accelerator.num_processes == 1:
            return number
        return int(self.accelerator.gather(torch.tensor([number], device=self.args.device)).max())

    def _on_first(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process, in every process; its `ValueError` is raised in all."""
        outcome: list[Any] = [None, None]
        if self.is_world_process_zero():
            try:
                outcome[0] = work()
            except ValueError as error:
                outcome[1] = str(error)
        result, problem = broadcast_object_list(outcome)
        if problem is not None:
            raise ValueError(problem)
        return result

    @contextmanager
    def _begun(self, resume: str | bool | None) -> Iterator[Path | None]:
        """Hold the lock of the run's folder, in the first process, and give the checkpoint to resume from."""
        folder = Path(str(self.args.output_dir))
        with ExitStack() as stack:

            def begin() -> Path | None:
                stack.enter_context(locked(folder, "output_dir", checkpoints.LOCK))
                found = checkpoints.begin(folder, self.identity, resume)
                if found is not None and self.is_deepspeed_enabled:
                    checkpoints.refuse_other_processes(found, self.args.world_size)
                return found

            yield self._on_first(begin)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the policy, its tokenizer and a model card; called in every process, written by one."""
        if not _internal_call:
            self._refuse_non_finite("Nothing was written.")
        folder, weights = Path(output_dir or self.args.output_dir), storage.gathered_weights(self.model)
        if not self.args.should_save:
            return
        storage.save_beside(self.model.model, self.processing_class, self.model.backspace, folder, weights)
        if not _internal_call and weights is None and self.args.objective_value.deletes:
            self.deletion = self._find_deletion()
        card = model_card(self.args, name_of(self.model), self.state.global_step, self.deletion)
        (folder / "README.md").write_text(card, "utf-8")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _find_deletion(self) -> Deletion | None:
        """A deletion after prompts of the training data; None for a stream, which would have to be read again."""
        if isinstance(self.on_policy.examples, ExampleStream):
            return None
        examples = self.on_policy.examples.prompts(0, SAMPLES, self.args.seed)
        longest = min(self.args.max_prompt_length, self.args.context - 1)
        return trained_deletion(self.model, examples, self.collate, longest)

    def _refuse_non_finite(self, consequence: str) -> None:
        """Stop every process if weights or the optimizer's state hold NaN or infinity in one of them."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        state = self.optimizer.state.items() if self.optimizer is not None else ()
        parts = {
            "Weights are": self.model.named_parameters(),
            "The optimizer's state is": (
                (f"{kind} of {names.get(id(parameter), 'a parameter')}", value)
                for parameter, values in state
                for kind, value in values.items()
                if isinstance(value, Tensor)
            ),
        }
        for what, tensors in parts.items():
            wrong = non_finite(tensors)
            if self._summed(torch.tensor([len(wrong)], device=self.args.device)):
                which = named(wrong) or "in another process"
                place, step = str(self.args.output_dir), self.state.global_step
                raise NonFiniteError(f"{what} not finite ({which})", step, consequence, place)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """As in transformers, but shards stay where FSDP2 has put them."""
        if not is_sharded(model):
            super()._move_model_to_device(model, device)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in transformers, but the state of sharded weights is gathered: the file doesn't depend on the number of processes."""
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {place: gathered(values) for place, values in optimizer["state"].items()}
        if self.args.should_save:
            torch.save(optimizer, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As in transformers; every process takes its shards from a file that is mapped into memory and not read whole."""
        if checkpoint is None or not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
        owners = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for place, values in state["state"].items():
            owner = owners[place]
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == owner.shape:
                    values[name] = shard_of(value, owner)
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As in transformers; on another number of processes every process begins anew, from the seed, the step and its rank."""
        saved = 0 if checkpoint is None else checkpoints.processes_of(Path(checkpoint))
        if saved in (0, self.args.world_size):
            super()._load_rng_state(checkpoint)
            return
        if self.is_world_process_zero():
            text = "Resumed on %d processes instead of %d: dropout draws other numbers from here on."
            logger.warning(text, self.args.world_size, saved)
        set_seed(hash_seed("resumed", self.args.seed, self.state.global_step, self.args.process_index) % 2**32)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Ours is written by `save_model`; transformers' would replace it before a push."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the state of transformers, the buffer and the signals, in a folder that is renamed when complete."""
        del model
        self._refuse_non_finite("No checkpoint was written.")
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        unfinished = checkpoints.partial(folder)
        if self.args.should_save:
            checkpoints.discard_partial(run)
            unfinished.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.store_flos()
        self.save_model(str(unfinished), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(unfinished))
            self._save_scaler(str(unfinished))
            self._save_rng_state(str(unfinished))
        best = run / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step and (best == folder or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        for part in [*self.callback_handler.callbacks, self.control]:
            if isinstance(part, ExportableState):
                self.state.stateful_callbacks[type(part).__name__] = part.state()
        signals = self.signals.state_dict(self._summed)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self.on_policy.save(unfinished)
            (unfinished / SIGNALS).write_text(json.dumps(signals) + "\n")
            self.state.save_to_json(str(unfinished / "trainer_state.json"))
            checkpoints.finish(folder, storage.fingerprints_of(unfinished))
            kept = self.state.best_model_checkpoint
            checkpoints.rotate(folder, self.args.save_total_limit, None if kept is None else Path(kept))
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        del model
        storage.restore(self.model.model, self.model.backspace, Path(resume_from_checkpoint))
        if wrong := non_finite(self.model.named_parameters()):
            raise ValueError(
                f"{resume_from_checkpoint} must hold finite weights to be resumed. Got NaN or infinity in {named(wrong)}. Name "
                f"an earlier checkpoint in `resume_from_checkpoint`."
            )

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        self._on_first(lambda: checkpoints.check(Path(best)))
        self._load_from_checkpoint(best)
