"""The model trajectories of Algorithm 1: made when they are due or before, kept in the buffer B, drawn for every step."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Example, Examples, ExampleStream
from sequencematch.data.seeds import hash_seed
from sequencematch.metrics.own_errors import count_tokens
from sequencematch.policy import Policy, Sampling
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.replay import Experience, ReplayBuffer, decoded, encoded
from sequencematch.training.rollout_settings import chosen
from sequencematch.training.rollouts import (
    Request,
    RolloutSource,
    as_stored,
    correction,
    is_right,
    prompt_of,
    right_action,
)
from sequencematch.training.rollouts.ahead import Outlook
from sequencematch.training.rollouts.source import AsynchronousSource
from sequencematch.training.signals import Signal, describe

#: Files of a checkpoint: the buffer, and the rollouts that were submitted and not yet due.
REPLAY, AHEAD = "replay.safetensors", "rollouts_ahead.safetensors"

#: Called with new rollouts and the optimisation step that made them.
Show = Callable[[list[Trajectory], int], None]


class OnPolicy:
    """The rollouts of a run: their source, their replay buffer, and the examples their prompts come from   (Alg. 1; App. E).

    Prompts, random numbers and draws depend only on the seed and on counters that are saved with the buffer. Every process makes
    a share of the rollouts and then receives the shares of the others, so that all hold the same buffer.

    An asynchronous source gets batches before they are due. When it gets which batch, and so with which weights it makes them,
    depends only on counters, too: a run is the same twice, however long workers take.
    """

    def __init__(
        self,
        args: SequenceMatchConfig,
        examples: Examples | ExampleStream,
        source: RolloutSource,
        accelerator: Accelerator,
        *,
        scores_prompt: bool,
        has_answers: bool,
        show: Show,
    ) -> None:
        """Start with an empty buffer. `show` is called with new rollouts if they are logged.

        `has_answers` says whether the examples' completions are known.
        """
        self.args, self.examples, self.source, self.accelerator = args, examples, source, accelerator
        self.scores_prompt, self.has_answers, self.show = scores_prompt, has_answers, show
        self.workers = source if isinstance(source, AsynchronousSource) else None
        self.ahead: dict[int, int] = {}  # number of the first rollout → version of the weights
        self.forget()

    def forget(self) -> None:
        """Empty the buffer, and drop what was submitted."""
        self.buffer = ReplayBuffer(self.args.replay_size, self.args.replay_reuse)
        if self.workers is not None:
            for first in self.ahead:
                self.workers.drop(first)
        self.ahead.clear()
        self.read: dict[int, tuple[Request, list[Example]]] = {}  # the same number → what was read to submit it

    def start(self, policy: Policy, checkpoint: Path | None) -> None:
        """Start the source, and load what `save` wrote into a checkpoint, if one is given."""
        self.forget()
        sampling = Sampling(
            max_new_tokens=self.args.max_completion_length,
            temperature=self.args.temperature,
            protect_prompt=self.args.protect_prompt,
            self_loops=True,  # in the paper's dynamics they count in the occupancy
            seed=hash_seed("rollouts", self.args.seed),
        )
        self.source.start(policy, sampling)
        if checkpoint is not None:
            self.buffer.load(checkpoint / REPLAY, policy.space)
        if checkpoint is not None and self.workers is not None and (checkpoint / AHEAD).is_file():
            tensors = load_file(checkpoint / AHEAD)
            saved = iter(decoded(tensors, policy.space))
            for first, version, count in tensors["batches"].tolist():
                self.ahead[first] = version
                self.workers.restore(first, [next(saved) for _ in range(count)])

    def save(self, checkpoint: Path) -> None:
        """Write the buffer, and what was submitted ahead; waits for it. Called in the first process alone."""
        self.buffer.save(checkpoint / REPLAY)
        if self.workers is not None and self.ahead:
            batches = {first: self.workers.wait_for(first) for first in self.ahead}
            numbers = [[first, self.ahead[first], len(made)] for first, made in batches.items()]
            flat = encoded([rollout for made in batches.values() for rollout in made])
            save_file({"batches": torch.tensor(numbers), **flat}, checkpoint / AHEAD)

    def look_ahead(self, step: int, last_step: int) -> None:
        """Submit batches that will be due soon; called at the beginning of every step. Inline rollouts are not made ahead."""
        if self.workers is None:
            return
        self.source.sync(step)
        self.workers.tend()
        outlook = self._outlook(step, last_step)
        oldest = self._max_staleness(outlook)
        for first, due in outlook.upcoming(min(outlook.lasts, oldest)):
            if first not in self.ahead or self.ahead[first] < due - oldest:  # new, or due later than it seemed
                self._submit(first, due - oldest)

    def signals_of_workers(self) -> dict[str, Signal]:
        """Numbers to log about workers since the last step, if there are workers."""
        return {} if self.workers is None else dict(self.workers.signals())

    def _outlook(self, step: int, last_step: int) -> Outlook:
        args = self.args
        per_step = args.train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        first_step = 0
        if args.correction_rate:
            per_step = max(1, round(args.correction_rate * per_step))
        else:
            assert args.bc_steps is not None
            first_step = args.bc_steps if args.bc_weight(args.bc_steps) < 1 else args.bc_steps + 1
        made, batch = self.buffer.made, args.generation_batch_size
        return Outlook(step, first_step, last_step, made, self.buffer.drawn, per_step, batch, args.replay_reuse)

    def _max_staleness(self, outlook: Outlook) -> int:
        return chosen(self.args, "max_staleness", 2 * outlook.lasts)

    def _submit(self, first: int, oldest: int) -> None:
        """Submit the batch that begins with this number, instead of an earlier one of that number if there is one."""
        assert self.workers is not None
        if first not in self.read:
            self.read[first] = self._request(first)
        request, _ = self.read[first]
        with self.accelerator.autocast():
            self.ahead[first] = self.workers.submit(request, oldest)

    def draw(self, count: int, step: int) -> tuple[list[Experience], dict[str, Signal]]:
        """Draw `count` rollouts for all processes together, the same in each, and return them with signals to log."""
        began, signals = time.perf_counter(), dict[str, Signal]()
        made: list[Experience] = []
        right_tokens = Counter[str]()
        while self.buffer.is_due(count):
            batch, of_batch = self._make(self.buffer.made, step)
            self.buffer.add(batch)
            made += batch
            right_tokens += of_batch
        if made:
            trajectories = [experience.trajectory for experience in made]
            signals |= describe("completions", trajectories)
            known = [float(experience.right) for experience in made if experience.right is not None]
            signals["rollouts/right"] = Signal.mean(torch.tensor(known))
            signals["rollouts/right_deleted"] = Signal.share(right_tokens["deleted"], right_tokens["written"])
            if self.args.log_completions and self.accelerator.is_main_process:
                self.show(trajectories[: self.args.num_completions_to_print], step)
        drawn = self.buffer.draw(count, self.args.seed)
        signals |= {
            "rollouts/seconds": Signal.setting(time.perf_counter() - began),
            "replay/age": Signal.setting(self.buffer.age(step)),
            "replay/reuse": Signal.setting(self.buffer.drawn / self.buffer.made),
            "replay/size": Signal.setting(len(self.buffer)),
        }
        return drawn, signals

    def corrections(self, count: int, step: int) -> tuple[list[Trajectory], dict[str, Signal]]:
        """Draw `count` rollouts, and return the right action at the end of each wrong one as data, with signals to log."""
        drawn, signals = self.draw(count, step)
        found = (correction(experience, self.args.context) for experience in drawn)
        return [part for part in found if part is not None], signals

    def _request(self, first: int) -> tuple[Request, list[Example]]:
        """This process's share of the batch that begins with rollout `first`, and its examples. Workers get the whole batch."""
        args, count = self.args, self.args.generation_batch_size
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        begin, end = (count * part // processes for part in (rank, rank + 1))
        if self.workers is not None:
            begin, end = (0, count) if rank == 0 else (count, count)
        examples = self.examples.prompts(first, count, args.seed)[begin:end]
        longest = min(args.max_prompt_length, args.context - 1)
        prompts = [prompt_of(e, number, args.seed, longest) for number, e in enumerate(examples, first + begin)]
        return Request(prompts, first + begin), examples

    def _make(self, first: int, step: int) -> tuple[list[Experience], Counter[str]]:
        """Make the batch of rollouts that begins with number `first`, or collect it from workers.

        Also returns how many right tokens this process's share of them wrote, and how many of these it deleted.
        """
        args = self.args
        request, examples = self.read.pop(first) if first in self.read else self._request(first)
        self.source.sync(step)
        if self.workers is not None:
            oldest = step - self._max_staleness(self._outlook(step, step))
            if first not in self.ahead or self.ahead[first] < oldest:
                self._submit(first, oldest)
            del self.ahead[first]
        with self.accelerator.autocast():
            made = self.source.collect(request)
        right_tokens = Counter[str]()
        for experience, example in zip(made, examples, strict=True):
            if self.has_answers and not example.is_text:
                written, deleted = count_tokens(experience.trajectory, example.prompt + example.completion)
                right_tokens += Counter(written=written["right"], deleted=deleted["right"])
        made = [
            Experience(
                as_stored(e.trajectory, args.context, self.scores_prompt),
                e.version,
                is_right(e.trajectory, example) if self.has_answers else None,
                right_action(e.trajectory, example) if self.has_answers else None,
            )
            for e, example in zip(made, examples, strict=True)
        ]
        if self.accelerator.num_processes == 1:
            return made, right_tokens
        shares: list[list[Experience]] = [[] for _ in range(self.accelerator.num_processes)]
        torch.distributed.all_gather_object(shares, made)
        return [experience for share in shares for experience in share], right_tokens
