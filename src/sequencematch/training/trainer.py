"""Algorithm 1: `SequenceMatchTrainer`, a `transformers.Trainer` with the surface of TRL's."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from sequencematch.core import Trajectory, model_noise
from sequencematch.data.examples import Example, Examples, ExampleStream, empty_pass
from sequencematch.data.seeds import hash_seed
from sequencematch.policy import Policy
from sequencematch.policy.finite import named, non_finite
from sequencematch.policy.fusing import Fusion, fusions
from sequencematch.policy.modes import compile_layers
from sequencematch.policy.sharding import is_sharded
from sequencematch.policy.threads import limit_threads
from sequencematch.training.callbacks import NonFiniteError, ProgressLines, RolloutWarnings, StopAtNonFiniteGradients
from sequencematch.training.collator import Collator
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.inputs import as_policy, check_context, prepare, remedy
from sequencematch.training.losses import Batch, Weights
from sequencematch.training.on_policy import OnPolicy
from sequencematch.training.replay import Experience
from sequencematch.training.rollouts import RolloutSource
from sequencematch.training.rollouts.making import rollout_source
from sequencematch.training.saving import SIGNALS, Checkpointed
from sequencematch.training.signals import Signal, Signals, describe
from sequencematch.training.spread import check_spread, unsynced
from sequencematch.training.step import (
    Draw,
    accumulate_gradients,
    encode_batch,
    encode_parts,
    node_budget,
    num_passes,
    point_draw,
)
from sequencematch.training.stopping import StopEarly
from sequencematch.training.trackers import log_table, table_of


class SequenceMatchTrainer(Checkpointed):
    """Fine-tune a causal language model with `<bkspc>`, or with one of the paper's baselines   (Alg. 1).

    Datasets have the formats of TRL; see `data.examples.Reader`. `rollouts` says where the policy's own trajectories come from:
    by default it makes them itself between two steps. They start from the prompts of `rollout_dataset`, if it is given, whose
    rows need no completion, and else from those of `train_dataset`. Only the on-policy term E is taken from them, and D is that of
    the data (see `core.sequencematch_loss`), unless `model_value_from` is "rollouts".
    """

    args: SequenceMatchConfig
    model: Policy

    def __init__(
        self,
        model: Any,
        args: SequenceMatchConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: Any = None,
        rollouts: RolloutSource | None = None,
        rollout_dataset: Any = None,
    ) -> None:
        """As TRL's trainers: `model` is a name, a folder, a Hugging Face or PEFT model, or a `Policy`."""
        args = SequenceMatchConfig() if args is None else args
        custom = optimizers != (None, None)
        inputs = prepare(
            model, args, train_dataset, eval_dataset, processing_class, rollout_dataset, has_optimizer=custom
        )
        args, tokenizer, read, self.identity = inputs.args, inputs.tokenizer, inputs.read, inputs.identity
        self.has_own_prompts = rollout_dataset is not None
        set_seed(args.seed)  # a new adapter and the offset head are drawn at random
        policy = as_policy(model, tokenizer, peft_config, args)
        check_context(args, policy.max_positions)
        # Models without an attention backend may have a causal mask of fixed size, too small for packed rows: no packing.
        packs = args.packing and policy.base._supports_attention_backend
        self.hidden_size = policy.backspace.row.shape[0] if packs else None
        if args.compile_layers:
            compile_layers(policy)
        policy.backspace.requires_grad_(args.objective_value.deletes)  # a baseline's loss depends on none of it
        self.collate = Collator(
            policy.space,
            read,
            seed=args.seed,
            noise_rate=args.noise_rate or 0.0,
            noise_burst=args.noise_burst,
            noise_excludes_right=args.noise_excludes_right,
            noise_is_the_models=args.noise_source == "model" and bool(args.noise_rate),
        )
        self.eval_sums = torch.zeros(2)
        self.signals, self.logged_at = Signals(), time.perf_counter()
        self.progress = ProgressLines(bar=not args.disable_tqdm, chosen=inputs.chosen)
        super().__init__(
            model=policy,
            args=args,
            data_collator=self.collate,
            train_dataset=inputs.examples,
            eval_dataset=inputs.held_out,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_spread(self.accelerator, args)
        self.is_distributed_loading_by_transformers = is_sharded(policy)  # if so, it wraps nothing again
        self.model_accepts_loss_kwargs = True  # the loss is divided by the items of the whole step already
        self.on_policy = OnPolicy(
            args,
            inputs.prompts,
            rollout_source(args, rollouts, is_main=self.accelerator.is_main_process),
            self.accelerator,
            scores_prompt=read.scores_prompt,
            has_answers=not self.has_own_prompts,
            show=self._show,
        )
        for default in (ProgressCallback, PrinterCallback):
            self.remove_callback(default)
        self.stop = StopEarly(args.stop_after_minutes, self._highest)
        for own in (self.progress, RolloutWarnings(remedy(policy)), StopAtNonFiniteGradients(), self.stop):
            self.add_callback(own)

    def _show(self, trajectories: list[Trajectory], step: int) -> None:
        """Rollouts on the terminal, and as a table in the trackers."""
        self.progress.show(self.model, trajectories, step)
        log_table(self.callback_handler.callbacks, table_of(self.model, trajectories, step), step)

    def get_train_dataloader(self) -> Any:
        """As in transformers, but with its own generator: draws from torch's global one would change the model's dropout."""
        loader = super().get_train_dataloader()
        getattr(loader, "base_dataloader", loader).generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, list[Batch]]], int]:
        """The batches of one optimisation step with their rollouts, and N over all of them in all processes   (Alg. 1)."""
        drawn = [next(epoch_iterator, None) for _ in range(num_batches)]
        if None in drawn and isinstance(self.train_dataset, ExampleStream):
            drawn = []  # transformers skips the incomplete last step of a stream, but would keep its gradients
            self.control.should_epoch_stop = True  # and would ask for `max_steps` more
        found = [self._data(batch) for batch in drawn if batch is not None]
        data = [batch[: self._share(batch)] if batch is found[-1] else batch for batch in found]
        counts = torch.tensor([sum(map(len, data)), sum(len(t) for batch in data for t in batch)], device=device)
        everywhere = self.accelerator.gather(counts[None]).tolist()
        num_data, num_items = map(sum, zip(*everywhere, strict=True))
        if not data:
            return [], num_items
        described = describe("data", [t for batch in data for t in batch] or found[-1])
        self.signals.add(described if any(data) else {name: signal.empty() for name, signal in described.items()})
        model: list[Experience] = []
        self.on_policy.look_ahead(self.state.global_step, self.state.max_steps - 1)
        if self.args.needs_rollouts and self.args.bc_weight(self.state.global_step) < 1:
            # As many rollouts as data trajectories; every process takes its own part of the step's.
            model, signals = self.on_policy.draw(num_data, self.state.global_step)
            self.signals.add(signals)
        drawn_rollouts = model
        model = model[sum(count for count, _ in everywhere[: self.accelerator.process_index]) :]
        if self.args.correction_rate:
            wanted = max(1, round(self.args.correction_rate * num_data))
            corrections, signals = self.on_policy.corrections(wanted, self.state.global_step)
            self.signals.add(signals)
            num_items += len(corrections)
            own_corrections = corrections[self.accelerator.process_index :: self.accelerator.num_processes]
            for place, batch in enumerate(data):
                batch += own_corrections[place :: len(data)]
        self.signals.add(self.on_policy.signals_of_workers())
        batches, draw = [], self._point_draw()
        for batch, spare in zip(data, found, strict=True):
            own, model = model[: len(batch)], model[len(batch) :]
            if batch:
                parts = self._parts(batch, own, num_items, draw)
            else:  # nothing to learn from, but every process makes the same passes and logs the same names
                parts = self._parts(spare[:1], drawn_rollouts[:1], num_items, draw)
                parts = [replace(part, counts=False) for part in parts]
            batches.append({"parts": parts})
        self.signals.steps += 1
        return batches, num_items

    def _share(self, batch: Sequence[Trajectory]) -> int:
        """How many of a batch's examples belong to it.

        Where an epoch's or a data set's last rows are too few for all processes, accelerate fills batches up with its first.
        """
        state, processes = self.accelerator.gradient_state, self.accelerator.num_processes
        if processes == 1 or not state.end_of_dataloader or self.args.dataloader_drop_last:
            return len(batch)
        dataset = state.active_dataloader.dataset
        last = len(dataset) % (processes * len(batch)) if isinstance(dataset, Examples) else 0
        return min(max(last - self.accelerator.process_index * len(batch), 0), len(batch)) if last else len(batch)

    def _point_draw(self) -> Draw | None:
        """How this process draws the points of an integral metric in this step; None if the loss has no such penalty."""
        metric, step = self.args.integral_metric, self.state.global_step
        if metric is None or self.args.bc_weight(step) == 1:
            return None
        seed = hash_seed("transitions", self.args.seed, step, self.accelerator.process_index)
        return point_draw(metric, self.args.gamma, seed)

    def _parts(self, data: list[Trajectory], model: list[Experience], num_items: int, draw: Draw | None) -> list[Batch]:
        """A batch, encoded and split so that each forward pass fits the data's node budget.

        All processes make the same number of passes, since each pass gathers sharded weights.
        """
        budget = node_budget(self.args.per_device_train_batch_size * self.args.context, self.args.device)
        rollouts = [experience.trajectory for experience in model]
        right = [None if e.trajectory.truncated else e.right for e in model]  # V(s_T) of a cut one is no judgement
        count = num_passes(data, rollouts, budget)
        if self.accelerator.num_processes > 1:
            fits = torch.tensor([[count, len(data)]], device=self.args.device)
            wanted, possible = self.accelerator.gather(fits).T
            count = int(torch.minimum(wanted.max(), possible.min()))
        return encode_parts(data, rollouts, count, num_items, self.hidden_size, right, draw)

    @cached_property
    def fusions(self) -> list[Fusion]:
        """The fused kernels of a step: none for compiled layers, which are fused already, and for sharded weights."""
        whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        is_whole = self.accelerator.distributed_type in whole and not is_sharded(self.model)
        is_compiled = self.args.compile_layers or self.args.torch_compile
        return fusions(self.model.base) if is_whole and not is_compiled else []

    def training_step(self, model: Any, inputs: dict[str, list[Batch]], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward over the parts of a batch; gradients are exchanged with the last."""
        parts, run = inputs["parts"], super().training_step

        def forward_backward(part: Batch) -> Tensor:
            with nullcontext() if part is parts[-1] else unsynced(self.accelerator, model):
                return run(model, {"batch": part}, num_items_in_batch)

        is_autocast = self.accelerator.mixed_precision in ("bf16", "fp16")
        return accumulate_gradients(self.model, parts, forward_backward, self.fusions, is_autocast=is_autocast)

    def compute_loss(
        self, model: Any, inputs: dict[str, Batch], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This batch's share of the step's loss, times the number of processes, over which gradients are averaged."""
        del num_items_in_batch  # the batch has it
        args, step = self.args, self.state.global_step
        batch = inputs["batch"]
        loss, signals = args.objective_value.loss(model, batch.to(args.device), self._weights())
        if not bool(loss.isfinite()):
            terms = {name: float(signal.moments[0]) for name, signal in signals.items() if signal.kind == "total"}
            wrong = non_finite(self.model.named_parameters())
            why = f"Weights are not finite ({named(wrong)})." if wrong else "The weights were not updated."
            raise NonFiniteError(f"The loss is {loss.item()}, of {terms},", step + 1, why, str(args.output_dir))
        signals["loss"] = Signal.total(loss)
        self.signals.add(signals if batch.counts else {name: signal.empty() for name, signal in signals.items()})
        loss = loss * (self.accelerator.num_processes if batch.counts else 0)
        return (loss, None) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss on held-out data without rollouts: that of behavioural cloning, or of the baseline."""
        del prediction_loss_only, ignore_keys
        found = self._data(inputs)
        share = self._share(found)
        data = found[: max(share, 1)]
        batch = Batch(encode_batch(data, self.hidden_size), len(data), sum(map(len, data))).to(self.args.device)
        weights = replace(self._weights(), bc_weight=1.0)
        with torch.no_grad():
            loss, _ = self.args.objective_value.loss(model, batch, weights)
        loss_and_one = torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)])
        self.eval_sums = self.eval_sums.to(loss.device) + (batch.num_items if share else 0) * loss_and_one
        return loss.detach(), None, None

    def evaluation_loop(self, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """As in transformers, but the loss is over all decisions of the set, however they were batched."""
        self.eval_sums = torch.zeros(2)
        output = super().evaluation_loop(*arguments, metric_key_prefix=metric_key_prefix, **options)
        total, num_items = self._summed(self.eval_sums.to(self.args.device)).tolist()
        if not num_items:
            raise ValueError(
                f"`eval_dataset` must give at least one batch each time it is read: its loss is a mean over decisions. Got none "
                f"at step {self.state.global_step} for {metric_key_prefix}_loss. Let the `__iter__` of a stream start anew each "
                f"time; with `dataloader_drop_last`, give as many rows as the global batch size."
            )
        output.metrics[f"{metric_key_prefix}_loss"] = total / num_items
        return output

    def _weights(self) -> Weights:
        args = self.args
        bc_weight = args.bc_weight(self.state.global_step)
        return Weights(
            args.divergence_value,
            args.alpha,
            args.gamma,
            bc_weight,
            args.unlikelihood_weight,
            model_value_from_data=args.needs_rollouts and args.model_value_from == "data",
        )

    def _data(self, batch: dict[str, Any]) -> list[Trajectory]:
        """A batch's trajectories as collated; noise from the model is added here, since the collator has no model."""
        examples: list[Example] = batch["examples"]
        if not self.collate.noise_is_the_models:
            return list(batch["trajectories"])
        clean = [self.collate.clean(example) for example in examples]
        encoding = encode_batch(clean, None).to(self.model.device)
        with torch.no_grad(), self.accelerator.autocast(), self.model.for_scoring():
            visited = self.model.encoded_hidden_states(encoding, encoding.visit)
            logits = [self.model.action_logits(v[: len(t)]) for v, t in zip(visited, clean, strict=True)]
        noise = [model_noise(self.model.space, each, exclude_right=self.args.noise_excludes_right) for each in logits]
        return [self.collate.trajectory(e, source) for e, source in zip(examples, noise, strict=True)]

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train; `resume_from_checkpoint=True` resumes exactly from the latest complete checkpoint."""
        resume = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        with self._begun(resume) as found:
            return self._train(found, **options)

    def _train(self, found: Path | None, **options: Any) -> Any:
        self.signals, self.logged_at = Signals(), time.perf_counter()
        if found is not None:
            share = float(self.is_world_process_zero())
            self.signals.load_state_dict(json.loads((found / SIGNALS).read_text()), self.args.device, share)
        self.on_policy.start(self.model, found)
        try:
            with limit_threads(self.model):
                return super().train(resume_from_checkpoint=None if found is None else str(found), **options)
        finally:
            self.on_policy.source.stop()
            self.progress.bar.close()

    def _init_training_state(self, *arguments: Any) -> tuple[int, int]:
        """Epochs and batches already done. A stream has no known length: its place is computed from the checkpoint."""
        checkpoint = arguments[3]
        if checkpoint is None:  # also where `auto_find_batch_size` starts over
            self.signals = Signals()
            self.on_policy.forget()
        done = super()._init_training_state(*arguments)
        if checkpoint is None or not isinstance(self.train_dataset, ExampleStream):
            return done
        saved = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
        epoch = int(saved["epoch"])
        # Without a length, transformers counts an epoch as `max_steps` steps.
        batches = (saved["epoch"] - epoch) * saved["max_steps"] * self.args.gradient_accumulation_steps
        return epoch, round(batches)

    def _run_epoch(self, *arguments: Any, epoch: int, **options: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed when it was over: it would make one step more
            self.control.should_training_stop = True
            return
        self.train_dataset.begin_epoch(epoch)
        before = self.state.global_step
        super()._run_epoch(*arguments, epoch=epoch, **options)
        if self.control.should_training_stop and self.state.global_step == before:  # transformers has read no batch
            raise ValueError(empty_pass(epoch))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with the signals of the steps since the last time; docs/logging.md explains each."""
        if "loss" in logs:
            steps, now = self.signals.steps, time.perf_counter()
            logs |= self.signals.flush(self._summed)
            logs["step_seconds"], self.logged_at = (now - self.logged_at) / max(steps, 1), now
        super().log(logs, start_time)
