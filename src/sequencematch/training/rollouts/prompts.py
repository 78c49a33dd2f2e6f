"""A rollout and the example that its prompt came from: the prompt, whether the rollout ended right, and what was right   (§6.1)."""

import torch

from sequencematch.core.mdp import Trajectory
from sequencematch.data.examples import Example
from sequencematch.data.seeds import hash_seed
from sequencematch.training.replay import Experience


def prompt_of(example: Example, number: int, seed: int, max_prompt_length: int) -> tuple[int, ...]:
    """The prompt of rollout `number`: the example's own, or for plain text a prefix of random length   (§6.1, §6.2)."""
    if not example.is_text:
        return example.prompt
    text = example.prompt + example.completion
    generator = torch.Generator().manual_seed(hash_seed("prefix", seed, number))
    length = int(torch.randint(1, min(max_prompt_length, len(text)) + 1, (), generator=generator))
    return text[:length]


def is_right(trajectory: Trajectory, example: Example) -> bool | None:
    """Whether a rollout ended by itself in the example's prompt and completion; None for plain text, which has no answer."""
    if example.is_text:
        return None
    return not trajectory.truncated and trajectory.final_state.tokens[:-1] == example.prompt + example.completion


def right_action(trajectory: Trajectory, example: Example) -> int | None:
    """The action that was right where a rollout ended wrongly: `<bkspc>`, or the answer's next token if it ended too early.

    None for a rollout that ended right, or was cut, and for plain text.
    """
    if example.is_text or trajectory.truncated:
        return None
    answer, written = example.prompt + example.completion, trajectory.final_state.tokens[:-1]
    if written == answer:
        return None
    return answer[len(written)] if written == answer[: len(written)] else trajectory.space.bkspc


def correction(experience: Experience, max_length: int) -> Trajectory | None:
    """The end of a wrong rollout as a data trajectory of one decision: the right action there.

    None if no such action is known, if the state fills `max_length`, or if the stored rollout was cut before its end.
    """
    action, rollout = experience.right_action, experience.trajectory
    state = rollout.final_state.tokens[:-1]
    if action is None or rollout.truncated or len(state) >= max_length:
        return None
    # Executing <eos> ends the trajectory: nothing but the one decision is scored.
    return Trajectory(rollout.space, state, (action,), (rollout.space.eos,), (False,))


def as_stored(trajectory: Trajectory, max_length: int, scores_prompt: bool) -> Trajectory:
    """A rollout cut to the context; with `scores_prompt`, its prompt counts as decisions, as in the data   (§4.2)."""
    trajectory = trajectory.truncate(max_length)
    return trajectory.score_prompt() if scores_prompt else trajectory
