"""The MDP of §3.1 small enough to write out: every state, the dynamics as a table, one free logit per action, exact occupancies.

An occupancy is unnormalised here, ρ(s, a) = Σ_t γᵗ P(s_t = s, a_t = a): then E Σ_t γᵗ x(s_t, a_t) = Σ ρ x, and Σ ρ = 1/(1 − γ).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sequencematch.core.mdp import ActionSpace, State, Trajectory, step
from sequencematch.core.objectives import Scores

#: Trajectories with their probabilities.
Distribution = Sequence[tuple[float, Trajectory]]


@dataclass(frozen=True)
class TabularMDP:
    """Sentences of at most `depth` tokens after `<bos>`; a token pushed at full depth executes `<eos>` instead   (§3.1, §4.2).

    An absorbing state has one action, called `<eos>`: then V = ℓ and r = (1 − γ) V there, as in the tail of Eq. 4.
    """

    space: ActionSpace
    depth: int

    def actions(self, state: State) -> Sequence[int]:
        """The actions open to a state."""
        return (self.space.eos,) if state.absorbing else range(self.space.size)

    def next_state(self, state: State, action: int) -> State:
        """s' = P(s, a), with the cut at full depth."""
        is_cut = len(state.tokens) > self.depth and action != self.space.bkspc
        return step(self.space, state, self.space.eos if is_cut else action)

    @cached_property
    def index(self) -> Mapping[State, int]:
        """The row of each state in the tables below: s₀ = <bos> first, then all that can be reached."""
        assert self.space.bos is not None
        states = [State((self.space.bos,))]
        for state in states:  # grows as it is walked
            reached = dict.fromkeys(self.next_state(state, action) for action in self.actions(state))
            states += [s for s in reached if s not in states]
        return {state: row for row, state in enumerate(states)}

    @cached_property
    def is_open(self) -> Bool[Tensor, "state action"]:
        """True for the actions that a state has."""
        return torch.tensor([[a in self.actions(s) for a in range(self.space.size)] for s in self.index])

    @cached_property
    def is_absorbing(self) -> Bool[Tensor, "state"]:
        """True where `<eos>` was executed."""
        return torch.tensor([s.absorbing for s in self.index])

    @cached_property
    def successor(self) -> Int[Tensor, "state action"]:
        """The row of P(s, a)."""
        return torch.tensor([[self.index[self.next_state(s, a)] for a in range(self.space.size)] for s in self.index])

    def value(self, logits: Float[Tensor, "state action"]) -> Float[Tensor, "state"]:
        """V(s) = log Σ_a exp ℓ(a|s) over the open actions."""
        return logits.masked_fill(~self.is_open, -torch.inf).logsumexp(1)

    def policy(self, logits: Float[Tensor, "state action"]) -> Float[Tensor, "state action"]:
        """p(a|s) = exp(ℓ(a|s) − V(s)), and 0 where a is not open."""
        return logits.masked_fill(~self.is_open, -torch.inf).softmax(1)

    def reward(self, logits: Float[Tensor, "state action"], gamma: float) -> Float[Tensor, "state action"]:
        """r(s, a) = ℓ(a|s) − γ V(P(s, a)), and 0 where a is not open."""
        return (logits - gamma * self.value(logits)[self.successor]).masked_fill(~self.is_open, 0)

    def policy_occupancy(self, logits: Float[Tensor, "state action"], gamma: float) -> Float[Tensor, "state action"]:
        """ρ_θ(s, a) = p(a|s) ρ_θ(s), where ρ_θ(s) = 1[s = s₀] + γ Σ_{s', a'} ρ_θ(s', a') 1[P(s', a') = s]."""
        policy = self.policy(logits)
        identity = torch.eye(len(policy), dtype=policy.dtype)
        transition = torch.zeros_like(identity).scatter_add(1, self.successor, policy)
        return policy * torch.linalg.solve(identity - gamma * transition.T, identity[0])[:, None]

    def data_occupancy(self, data: Distribution, gamma: float) -> Float[Tensor, "state action"]:
        """ρ_data(s, a) = Σ_t γᵗ P(s_t = s, a_t = a) over *chosen* actions, with γᵀ/(1 − γ) for the endless stay in s_T."""
        occupancy = torch.zeros(self.is_open.shape, dtype=torch.float64)
        for probability, trajectory in data:
            *visits, final = (self.index[state] for state in trajectory.states())
            for t, (state, action) in enumerate(zip(visits, trajectory.chosen, strict=True)):
                occupancy[state, action] += probability * gamma**t
            occupancy[final, self.space.eos] += probability * gamma ** len(trajectory) / (1 - gamma)
        return occupancy

    def scores(self, data: Distribution) -> Callable[[Float[Tensor, "state action"]], Scores]:
        """logits ↦ ℓ(a_t|s_t) and V(s_t) along every trajectory, gathered from the table."""
        trajectories = [trajectory for _, trajectory in data]
        rows = [torch.tensor([self.index[state] for state in trajectory.states()]) for trajectory in trajectories]
        state = pad_sequence(rows, batch_first=True)
        action = pad_sequence([torch.tensor(trajectory.chosen) for trajectory in trajectories], batch_first=True)
        length = torch.tensor([len(trajectory) for trajectory in trajectories])
        policy_chosen = torch.zeros(action.shape, dtype=torch.bool)

        def gather(logits: Float[Tensor, "state action"]) -> Scores:
            return Scores(logits[state[:, :-1], action], self.value(logits)[state], length, policy_chosen)

        return gather

    def noised(self, sentence: Sequence[int], rate: float) -> Iterator[tuple[float, Trajectory]]:
        """Every outcome of §4.2's noise on a sentence, as (probability, trajectory).

        Before each action, with probability η = `rate`, one wrong token is pushed and deleted. Not at full depth: there it
        executes `<eos>` instead, which is what was chosen anyway.
        """
        space, tokens = self.space, set(range(self.space.vocab_size)) - self.space.special
        outcomes: list[list[tuple[float, tuple[int, ...], tuple[int, ...]]]] = []
        for position, right in enumerate((*sentence, space.eos)):
            wrong = tokens - {right} if rate > 0 and position < self.depth else ()
            outcomes.append([(1 - rate if wrong else 1.0, (right,), (right,))])
            outcomes[-1] += [(rate / len(wrong), (right, space.bkspc, right), (w, space.bkspc, right)) for w in wrong]
        initial = next(iter(self.index)).tokens
        for steps in itertools.product(*outcomes):
            probabilities, chosen, executed = zip(*steps, strict=True)
            chosen, executed = sum(chosen, ()), sum(executed, ())
            yield math.prod(probabilities), Trajectory(space, initial, chosen, executed, (False,) * len(chosen))
