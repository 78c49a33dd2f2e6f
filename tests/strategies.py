"""Hypothesis strategies for trajectories over a small vocabulary."""

from hypothesis import strategies as st

from sequencematch.core.mdp import ActionSpace, Trajectory

SPACE = ActionSpace(vocab_size=6, eos=5, bos=4)
BK = SPACE.bkspc

tokens = st.integers(0, 3)
prompts = st.lists(tokens, min_size=1, max_size=6).map(tuple)


@st.composite
def rollouts(draw: st.DrawFn, initial: tuple[int, ...] | None = None, max_actions: int = 40) -> Trajectory:
    """Any sequence of tokens and backspaces, cut or ended by `<eos>`, over any floor."""
    initial = draw(prompts) if initial is None else initial
    backspaces = draw(st.sampled_from([0, 1, 4]))
    action = st.one_of(tokens, *[st.just(BK)] * backspaces)
    actions = [*draw(st.lists(action, max_size=max_actions)), draw(st.sampled_from([SPACE.eos, 0, BK]))]
    return Trajectory.rollout(SPACE, initial, actions, floor=draw(st.integers(1, len(initial) + 2)))


@st.composite
def prompt_families(draw: st.DrawFn) -> list[Trajectory]:
    """Several trajectories, many of them from the same few prompts, in any order."""
    few = draw(st.lists(prompts, min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(few).flatmap(rollouts), min_size=1, max_size=8))
