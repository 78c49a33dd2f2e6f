"""The model trajectories of Algorithm 1: made when they are due, kept in the buffer B, drawn for every step."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Examples, ExampleStream
from sequencematch.data.seeds import hash_seed
from sequencematch.metrics.own_errors import count_tokens
from sequencematch.policy import Policy, Sampling
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.replay import Experience, ReplayBuffer
from sequencematch.training.rollouts import (
    Request,
    RolloutSource,
    as_stored,
    correction,
    is_right,
    prompt_of,
    right_action,
)
from sequencematch.training.signals import Signal, describe

#: Called with new rollouts and the optimisation step that made them.
Show = Callable[[list[Trajectory], int], None]


class OnPolicy:
    """The rollouts of a run: their source, their replay buffer, and the examples their prompts come from   (Alg. 1; App. E).

    Prompts, random numbers and draws depend only on the seed and on counters that are saved with the buffer. Every process makes
    a share of the rollouts and then receives the shares of the others, so that all hold the same buffer.
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
        self.forget()

    def forget(self) -> None:
        """Empty the buffer."""
        self.buffer = ReplayBuffer(self.args.replay_size, self.args.replay_reuse)

    def start(self, policy: Policy, checkpoint: Path | None) -> None:
        """Start the source, and load a checkpoint's buffer if its file is given."""
        self.forget()
        if checkpoint is not None:
            self.buffer.load(checkpoint, policy.space)
        sampling = Sampling(
            max_new_tokens=self.args.max_completion_length,
            temperature=self.args.temperature,
            protect_prompt=self.args.protect_prompt,
            self_loops=True,  # in the paper's dynamics they count in the occupancy
            seed=hash_seed("rollouts", self.args.seed),
        )
        self.source.start(policy, sampling)

    def draw(self, count: int, step: int) -> tuple[list[Experience], dict[str, Signal]]:
        """Draw `count` rollouts for all processes together, the same in each, and return them with signals to log."""
        began, signals = time.perf_counter(), dict[str, Signal]()
        made: list[Experience] = []
        right_tokens = Counter[str]()
        while self.buffer.is_due(count):
            batch, of_batch = self._make(self.buffer.made, self.args.generation_batch_size, step)
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

    def _make(self, first: int, count: int, step: int) -> tuple[list[Experience], Counter[str]]:
        """Make the rollouts numbered `first` to `first + count - 1`.

        Also returns how many right tokens this process's share of them wrote, and how many of these it deleted.
        """
        args = self.args
        examples = self.examples.prompts(first, count, args.seed)
        longest = min(args.max_prompt_length, args.context - 1)
        prompts = [prompt_of(e, first + i, args.seed, longest) for i, e in enumerate(examples)]
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        begin, end = (count * part // processes for part in (rank, rank + 1))
        self.source.sync(step)
        with self.accelerator.autocast():
            made = self.source.collect(Request(prompts[begin:end], first + begin))
        right_tokens = Counter[str]()
        for experience, example in zip(made, examples[begin:end], strict=True):
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
            for e, example in zip(made, examples[begin:end], strict=True)
        ]
        if processes == 1:
            return made, right_tokens
        shares: list[list[Experience]] = [[] for _ in range(processes)]
        torch.distributed.all_gather_object(shares, made)
        return [experience for share in shares for experience in share], right_tokens
