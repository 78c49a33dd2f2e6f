"""What a run writes: its policy, and checkpoints from which it resumes exactly."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.trainer_callback import ExportableState

from sequencematch.policy import storage
from sequencematch.training import checkpoints
from sequencematch.training.card import model_card
from sequencematch.training.inputs import name_of
from sequencematch.training.on_policy import OnPolicy
from sequencematch.training.optimizer import SeparateOffsetHead

REPLAY, SIGNALS = "replay.safetensors", "signals.json"


class Checkpointed(SeparateOffsetHead):
    """A trainer whose policy is saved in our format, and whose checkpoints are complete or absent."""

    on_policy: OnPolicy

    def _summed(self, moments: Tensor) -> Tensor:
        return self.accelerator.reduce(moments, "sum")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the policy, its tokenizer and a model card; called in every process, written by one."""
        folder, weights = Path(output_dir or self.args.output_dir), storage.gathered_weights(self.model)
        if not self.args.should_save:
            return
        storage.save_beside(self.model.model, self.processing_class, self.model.backspace, folder, weights)
        card = model_card(self.args, name_of(self.model), self.state.global_step)
        (folder / "README.md").write_text(card)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Ours is written by `save_model`; transformers' would replace it before a push."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the state of transformers, the buffer and the signals, in a folder that is renamed when complete."""
        del model
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
            self.on_policy.buffer.save(unfinished / REPLAY)
            (unfinished / SIGNALS).write_text(json.dumps(signals) + "\n")
            self.state.save_to_json(str(unfinished / "trainer_state.json"))
            checkpoints.finish(folder)
            kept = self.state.best_model_checkpoint
            checkpoints.rotate(folder, self.args.save_total_limit, None if kept is None else Path(kept))
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        del model
        storage.restore(self.model.model, self.model.backspace, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)
