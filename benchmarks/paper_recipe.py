"""The paper's recipe as printed: SequenceMatch with Algorithm A instead of alive intervals.

Algorithm A's loop and L×L mask; batches padded to the context; one forward pass for the data and one for the rollouts; all
logits in memory; sampling with one forward pass per action, deletions included.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from sequencematch.core.encoding import Encoding
from sequencematch.core.mdp import Trajectory
from sequencematch.core.objectives import Scores, sequencematch_loss
from sequencematch.policy import Policy
from tests.oracles.algorithm_a import printed_algorithm_a


def scores(policy: Policy, trajectories: Sequence[Trajectory], context: int) -> Scores:
    """ℓ and V of every decision, from all logits of all positions up to the context."""
    space, count = policy.space, len(trajectories)
    # Algorithm A spends a position on every deletion, so a trajectory can be longer than the context.
    width = max(context, *(len(t.initial) + len(t) for t in trajectories))
    tokens = torch.full((count, width), space.eos)
    positions = torch.zeros((count, width), dtype=torch.long)
    attend = torch.eye(width, dtype=torch.bool).repeat(count, 1, 1)
    for row, trajectory in enumerate(trajectories):
        x, m, p = printed_algorithm_a([*trajectory.initial, *trajectory.executed], space.bkspc)
        tokens[row, : len(x)] = torch.tensor(x)
        positions[row, : len(x)] = torch.tensor(p) - 1  # printed one too large
        attend[row, : len(x), : len(x)] = torch.from_numpy(m)
    device = policy.device
    tokens, positions, attend = tokens.to(device), positions.to(device), attend[:, None].to(device)
    hidden = policy.hidden_states(tokens, attend, positions, use_cache=False).last_hidden_state
    logits = policy.action_logits(hidden) + policy.backspace.offset(hidden, positions)[..., None]

    steps = max(map(len, trajectories))
    first = torch.tensor([len(t.initial) - 1 for t in trajectories], device=device)
    length = torch.tensor([len(t) for t in trajectories], device=device)
    state = first[:, None] + torch.minimum(torch.arange(steps + 1, device=device), length[:, None])
    chosen, policy_chosen = torch.zeros(count, steps, dtype=torch.long), torch.zeros(count, steps, dtype=torch.bool)
    for row, trajectory in enumerate(trajectories):
        chosen[row, : len(trajectory)] = torch.tensor(trajectory.chosen)
        policy_chosen[row, : len(trajectory)] = torch.tensor(trajectory.policy_chosen)
    rows = torch.arange(count, device=device)[:, None]
    visit = rows * width + state
    encoding = Encoding(tokens, positions, positions, chosen.to(device), visit, policy_chosen.to(device), length)
    return Scores.from_logits(logits[rows, state], encoding)


def loss(
    policy: Policy,
    data: Sequence[Trajectory],
    rollouts: Sequence[Trajectory],
    context: int,
    *,
    alpha: float,
    gamma: float,
) -> Tensor:
    """Eq. 4, the data and the rollouts scored one after the other."""
    data_scores = scores(policy, data, context)
    return sequencematch_loss(data_scores, scores(policy, rollouts, context), alpha=alpha, gamma=gamma).loss


#: Logits of every row → an action for each.
Choose = Callable[[Tensor], Tensor]


def draw(logits: Tensor) -> Tensor:
    """Sample at temperature 1 from torch's global generator."""
    return torch.multinomial(logits.softmax(-1), 1).squeeze(1)


@torch.no_grad()
def sample(
    policy: Policy, prompts: Sequence[Sequence[int]], max_actions: int, choose: Choose = draw
) -> list[Trajectory]:
    """Sample from prompts of equal length, over a cache that grows by a column per action.

    A deletion masks the deleted token and the token before it, and runs the model on a copy of the latter.
    """
    space, device, rows = policy.space, policy.device, range(len(prompts))
    cache, length = DynamicCache(config=policy.base.config), len(prompts[0])
    tokens = [list(prompt) for prompt in prompts]  # by column
    columns = [list(range(length)) for _ in rows]  # of the stack
    actions: list[list[int]] = [[] for _ in rows]
    attend = torch.ones(len(prompts), length, length, dtype=torch.bool).tril()
    inputs, positions = torch.tensor(prompts), torch.arange(length).repeat(len(prompts), 1)
    ended = [False for _ in rows]
    for _ in range(max_actions):
        mask = attend[:, None].to(device)
        output = policy.hidden_states(
            inputs.to(device), mask, positions.to(device), past_key_values=cache, use_cache=True
        )
        chosen = choose(policy.action_logits(output.last_hidden_state[:, -1])).tolist()
        attend = torch.nn.functional.pad(attend[:, -1:], (0, 1), value=True)
        for row in rows:
            if ended[row]:
                tokens[row].append(space.eos)  # an ended row still computes
                continue
            actions[row].append(chosen[row])
            ended[row] = chosen[row] == space.eos
            stack = columns[row]
            if chosen[row] != space.bkspc:
                tokens[row].append(chosen[row])
            else:
                if len(stack) > 1:
                    attend[row, 0, stack.pop()] = False
                attend[row, 0, stack[-1]] = False
                tokens[row].append(tokens[row][stack.pop()])
            stack.append(attend.shape[-1] - 1)
        inputs = torch.tensor([row[-1:] for row in tokens])
        positions = torch.tensor([[len(stack) - 1] for stack in columns])
        if all(ended):
            break
    return [Trajectory.rollout(space, prompt, row) for prompt, row in zip(prompts, actions, strict=True)]
