"""The model trajectories of Algorithm 1: made when they are due, kept in the buffer B, drawn for every step."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Examples, ExampleStream
from sequencematch.data.seeds import hash_seed
from sequencematch.policy import Policy, Sampling
from sequencematch.training.config import SequenceMatchConfig
from sequencematch.training.replay import Experience, ReplayBuffer
from sequencematch.training.rollouts import Request, RolloutSource, as_stored, prompt_of
from sequencematch.training.signals import Signal, describe

#: Told of new rollouts, with the optimisation step they were made at.
Show = Callable[[list[Trajectory], int], None]


class OnPolicy:
    """Rollouts for a run: a source, a buffer, and the prompts they start from   (Alg. 1; App. E).

    What is made and drawn depends on the seed and on counters alone, which are saved with the buffer. Every process makes
    its share, then all hold the whole buffer.
    """

    def __init__(
        self,
        args: SequenceMatchConfig,
        examples: Examples | ExampleStream,
        source: RolloutSource,
        accelerator: Accelerator,
        *,
        scores_prompt: bool,
        show: Show,
    ) -> None:
        """Nothing made yet."""
        self.args, self.examples, self.source, self.accelerator = args, examples, source, accelerator
        self.scores_prompt, self.show = scores_prompt, show
        self.forget()

    def forget(self) -> None:
        """Start with an empty buffer."""
        self.buffer = ReplayBuffer(self.args.replay_size, self.args.replay_reuse)

    def start(self, policy: Policy, checkpoint: Path | None) -> None:
        """Get the source ready; go on with a checkpoint's buffer, if there is one."""
        self.forget()
        if checkpoint is not None:
            self.buffer.load(checkpoint, policy.space)
        sampling = Sampling(
            max_new_tokens=self.args.max_completion_length,
            temperature=self.args.temperature,
            protect_prompt=self.args.protect_prompt,
            seed=hash_seed("rollouts", self.args.seed),
        )
        self.source.start(policy, sampling)

    def draw(self, count: int, step: int) -> tuple[list[Trajectory], dict[str, Signal]]:
        """`count` rollouts for all processes together, the same in each, and what there is to say of them."""
        began, signals = time.perf_counter(), dict[str, Signal]()
        made: list[Experience] = []
        while self.buffer.is_due(count):
            batch = self._make(self.buffer.made, self.args.generation_batch_size, step)
            self.buffer.add(batch)
            made += batch
        if made:
            trajectories = [experience.trajectory for experience in made]
            signals |= describe("completions", trajectories)
            if self.args.log_completions and self.accelerator.is_main_process:
                self.show(trajectories[: self.args.num_completions_to_print], step)
        drawn = self.buffer.draw(count, self.args.seed)
        signals |= {
            "rollouts/seconds": Signal.setting(time.perf_counter() - began),
            "replay/age": Signal.setting(self.buffer.age(step)),
            "replay/reuse": Signal.setting(self.buffer.drawn / self.buffer.made),
            "replay/size": Signal.setting(len(self.buffer)),
        }
        return [experience.trajectory for experience in drawn], signals

    def _make(self, first: int, count: int, step: int) -> list[Experience]:
        """Rollouts `first` to `first + count`."""
        args = self.args
        examples = self.examples.prompts(first, count, args.seed)
        longest = min(args.max_prompt_length, args.max_length - 1)
        prompts = [prompt_of(e, first + i, args.seed, longest) for i, e in enumerate(examples)]
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        begin, end = (count * part // processes for part in (rank, rank + 1))
        self.source.sync(step)
        with self.accelerator.autocast():
            made = self.source.collect(Request(prompts[begin:end], first + begin))
        made = [Experience(as_stored(e.trajectory, args.max_length, self.scores_prompt), e.version) for e in made]
        if processes == 1:
            return made
        shares: list[list[Experience]] = [[] for _ in range(processes)]
        torch.distributed.all_gather_object(shares, made)
        return [experience for share in shares for experience in share]
