"""Algorithm A: alive intervals against a stack machine, in both layouts, padded, packed and with shared prompts."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sequencematch.core.encoding import Encoding, Layout, attend, encode, fitting_row_length
from sequencematch.core.mdp import Trajectory
from tests.oracles.algorithm_a import printed_algorithm_a
from tests.oracles.stack_machine import replay
from tests.strategies import BK, SPACE, prompt_families, rollouts

EOS = SPACE.eos
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def strings(max_length: int) -> Iterator[tuple[int, ...]]:
    """Every string over {a, b, <bkspc>} of at most `max_length` characters."""
    for length in range(max_length + 1):
        yield from itertools.product((1, 2, BK), repeat=length)


@cache
def every_short_rollout(prompt: tuple[int, ...], floor: int) -> list[Trajectory]:
    return [Trajectory.rollout(SPACE, prompt, (*string, EOS), floor) for string in strings(8)]


def check_every_visit_sees_its_state(encoding: Encoding, trajectories: list[Trajectory]) -> None:
    """The nodes a visit attends to are, in order of position, exactly the tokens of the state; labels are the actions."""
    tokens, positions = encoding.tokens.flatten().tolist(), encoding.position_ids.flatten().tolist()
    width = encoding.tokens.shape[1]
    mask = encoding.attend().flatten(0, 1)
    for b, trajectory in enumerate(trajectories):
        steps = len(trajectory)
        oracle = replay(trajectory.initial, trajectory.executed, BK, trajectory.floor, "tree")
        assert encoding.length[b] == steps
        assert encoding.chosen[b, :steps].tolist() == list(trajectory.chosen)
        assert encoding.policy_chosen[b, :steps].tolist() == list(trajectory.policy_chosen)
        for visit, state in zip(encoding.visit[b, : steps + 1].tolist(), oracle.states, strict=True):
            row_start = visit - visit % width
            seen = [row_start + j for j in mask[visit].nonzero().squeeze(1).tolist()]
            assert [tokens[j] for j in seen] == state
            assert [positions[j] for j in seen] == list(range(len(state)))
        assert (encoding.visit[b, steps:] == encoding.visit[b, steps]).all()


def test_a_backspace_costs_no_node_and_returns_to_the_earlier_one() -> None:
    """`12<bkspc>3<eos>` after <bos>. Nodes 4 1 2 3 <eos>; 2 dies when three were pushed; after it, node 1 is on top again."""
    encoding = encode([Trajectory.rollout(SPACE, (4,), (1, 2, BK, 3, EOS))])
    assert encoding.tokens.tolist() == [[4, 1, 2, 3, EOS]]
    assert encoding.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert encoding.deleted_at.tolist() == [[5, 5, 3, 5, 5]]
    assert encoding.visit.tolist() == [[0, 1, 2, 1, 3, 4]]
    assert encoding.chosen.tolist() == [[1, 2, BK, 3, EOS]]


def test_the_papers_layout_copies_the_token_a_backspace_returns_to() -> None:
    """The paper's own words: actions [a, b, <bkspc>] have inputs [a, b, a], the second a hiding the first a and b."""
    encoding = encode([Trajectory.rollout(SPACE, (4,), (1, 2, BK, 3, EOS))], layout="paper")
    assert encoding.tokens.tolist() == [[4, 1, 2, 1, 3, EOS]]
    assert encoding.position_ids.tolist() == [[0, 1, 2, 1, 2, 3]]
    assert encoding.deleted_at.tolist() == [[6, 3, 3, 6, 6, 6]]
    assert encoding.visit.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_data_and_rollout_share_a_prompt_that_the_rollout_then_deletes() -> None:
    """Prompt 0 1; data writes 2 <eos> (nodes 2, 3); the rollout deletes the 1 (node 1 dies at 4), writes 3 <eos> (4, 5)."""
    data = Trajectory.demonstration(SPACE, (0, 1), (2,))
    model = Trajectory.rollout(SPACE, (0, 1), (BK, 3, EOS))
    encoding = encode([model, data], row_length=7, share_prompts=True)
    assert encoding.tokens[0, :6].tolist() == [0, 1, 2, EOS, 3, EOS]
    assert encoding.position_ids[0, :6].tolist() == [0, 1, 2, 3, 1, 2]
    assert encoding.deleted_at.tolist() == [[6, 4, 4, 4, 6, 6, 7]]  # the last node is padding and sees itself alone
    assert encoding.visit.tolist() == [[1, 0, 4, 5], [1, 2, 3, 3]]


@both_layouts
@pytest.mark.parametrize(("prompt", "floor"), [((0,), 1), ((0, 3), 1), ((0, 3), 2), ((0,), 3)])
def test_encoding_equals_a_stack_machine_on_every_short_string(
    layout: Layout, prompt: tuple[int, ...], floor: int
) -> None:
    """3^0 + … + 3^8 = 9,841 strings; from <bos>, into the prompt, at the prompt's end, and under a floor not yet reached."""
    trajectories = every_short_rollout(prompt, floor)
    assert len(trajectories) == 9841
    encoding = encode(trajectories, layout=layout)
    nodes = encoding.tokens.shape[1]
    seen = encoding.attend().flatten(1)
    attended = seen.nonzero()[:, 1].split(seen.sum(1).tolist())  # of each row: i · nodes + j for every j that an i sees
    visits = encoding.visit - nodes * torch.arange(len(trajectories))[:, None]
    found = zip(
        *(part.tolist() for part in (encoding.tokens, encoding.position_ids, visits, encoding.chosen)), strict=True
    )
    for trajectory, row_attended, row in zip(trajectories, attended, found, strict=True):
        tokens, position_ids, visit, chosen = row
        oracle = replay(trajectory.initial, trajectory.executed, BK, floor, layout)
        count, steps = len(oracle.tokens), len(trajectory)
        assert tokens[:count] == oracle.tokens
        assert position_ids[:count] == oracle.position_ids
        expected = oracle.attended + [[j] for j in range(count, nodes)]
        assert row_attended.tolist() == [i * nodes + j for i, js in enumerate(expected) for j in js], (
            trajectory.render()
        )
        assert visit[: steps + 1] == oracle.visit
        assert chosen[:steps] == list(trajectory.chosen)


def test_the_printed_pseudocode_has_the_papers_inputs_and_masks_but_positions_one_too_large() -> None:
    """Algorithm A as printed, loop ended at L − 1, on every string up to length 7 after <bos>."""
    trajectories = [Trajectory.rollout(SPACE, (4,), (*string, EOS)) for string in strings(7)]
    encoding = encode(trajectories, layout="paper")
    masks = encoding.attend()
    for row, trajectory in enumerate(trajectories):
        inputs, mask, positions = printed_algorithm_a([4, *trajectory.executed], BK)
        count = len(inputs)
        assert encoding.tokens[row, :count].tolist() == inputs
        assert torch.equal(masks[row, :count, :count], torch.from_numpy(mask))
        assert (encoding.position_ids[row, :count] + 1).tolist() == positions


@both_layouts
@given(batch=st.lists(rollouts(max_actions=300), min_size=1, max_size=6))
def test_long_ragged_batches_see_their_states(layout: Layout, batch: list[Trajectory]) -> None:
    check_every_visit_sees_its_state(encode(batch, layout=layout), batch)


@both_layouts
@given(batch=prompt_families(), slack=st.integers(0, 60), share=st.booleans())
def test_packed_rows_see_their_states_and_nothing_else(
    layout: Layout, batch: list[Trajectory], slack: int, share: bool
) -> None:
    longest = max(t.num_nodes if layout == "tree" else len(t.initial + t.executed) for t in batch)
    encoding = encode(batch, layout=layout, row_length=longest + slack, share_prompts=share)
    assert encoding.tokens.shape[1] == longest + slack
    check_every_visit_sees_its_state(encoding, batch)


@both_layouts
@given(batch=st.lists(rollouts(max_actions=20), min_size=1, max_size=6))
def test_a_trajectory_is_encoded_alike_alone_and_in_a_batch(layout: Layout, batch: list[Trajectory]) -> None:
    together = encode(batch, layout=layout)
    for row, trajectory in enumerate(batch):
        alone = encode([trajectory], layout=layout)
        count = alone.tokens.shape[1]
        for name in ("tokens", "position_ids", "deleted_at"):
            assert torch.equal(getattr(together, name)[row, :count], getattr(alone, name)[0])


@both_layouts
@given(prompts_deleted=st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_shared_prompt_is_laid_once_per_group_and_copied_for_each_further_one_that_deletes_it(
    layout: Layout, prompts_deleted: list[bool]
) -> None:
    batch = [Trajectory.rollout(SPACE, (0, 1, 2), (BK, 3, EOS) if deletes else (3, EOS)) for deletes in prompts_deleted]
    encoding = encode(batch, layout=layout, row_length=60, share_prompts=True)
    is_padding = encoding.deleted_at == torch.arange(60) + 1
    is_padding &= encoding.position_ids == 0
    copies = max(1, sum(prompts_deleted))
    bodies = sum(2 if not deletes or layout == "tree" else 3 for deletes in prompts_deleted)
    assert int((~is_padding).sum()) == 3 * copies + bodies
    check_every_visit_sees_its_state(encoding, batch)


def test_packing_fills_rows_largest_first() -> None:
    """Nodes 6, 2, 4, 4 into rows of 8: 6 + 2 and 4 + 4."""
    batch = [Trajectory.demonstration(SPACE, (0,), (1,) * (nodes - 2)) for nodes in (6, 2, 4, 4)]
    encoding = encode(batch, row_length=8)
    assert (encoding.visit[:, 0]).tolist() == [0, 6, 8, 12]
    assert encoding.tokens.shape == (2, 8)


def test_a_group_may_fill_its_row_to_the_last_node() -> None:
    """Prompt 0 1 and two bodies of two nodes: six in all share one row of six, and need two of five."""
    batch = [Trajectory.demonstration(SPACE, (0, 1), (token,)) for token in (2, 3)]
    assert encode(batch, row_length=6, share_prompts=True).tokens.shape == (1, 6)
    assert encode(batch, row_length=5, share_prompts=True).tokens.shape == (2, 5)


def test_alive_intervals_ignored_is_caught() -> None:
    """Negative control: with plain causal attention the same check fails."""
    trajectory = Trajectory.rollout(SPACE, (4,), (1, 2, BK, 3, EOS))
    encoding = encode([trajectory])
    causal = Encoding(**{**vars(encoding), "deleted_at": torch.full_like(encoding.deleted_at, 5)})
    with pytest.raises(AssertionError):
        check_every_visit_sees_its_state(causal, [trajectory])


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self.elements = max(self.elements, *sizes, 0)
        return out


@both_layouts
def test_no_tensor_of_length_squared_is_made_unless_asked_for(layout: Layout) -> None:
    batch = [Trajectory.rollout(SPACE, (0,), [*([1, 2, BK] * 700)[:2000], EOS]) for _ in range(2)]
    with _LargestTensor() as largest:
        encoding = encode(batch, layout=layout, row_length=3000, share_prompts=True)
    assert largest.elements <= 3 * 3000  # two rows, and padding for one more
    with _LargestTensor() as largest:
        encoding.attend()
    assert largest.elements >= 3000**2


def test_an_encoding_moves_between_devices() -> None:
    encoding = encode([Trajectory.rollout(SPACE, (0,), (1, EOS))])
    moved = encoding.to("meta")
    assert {tensor.device.type for tensor in vars(moved).values()} == {"meta"}
    assert vars(moved).keys() == vars(encoding).keys()


def test_attend_is_the_stated_inequality() -> None:
    deleted_at = torch.tensor([3, 2, 3])
    expected = [[j <= i < int(deleted_at[j]) for j in range(3)] for i in range(3)]
    assert attend(deleted_at).tolist() == expected


def test_wrong_arguments_are_refused() -> None:
    trajectory = Trajectory.demonstration(SPACE, (0,), (1, 2))
    other = Trajectory.demonstration(type(SPACE)(vocab_size=9, eos=5), (0,), (1, 2))
    with pytest.raises(ValueError, match=re.escape("`trajectories` must hold at least one trajectory. Got none.")):
        encode([])
    with pytest.raises(ValueError, match=re.escape("`trajectories` must share one action space.")):
        encode([trajectory, other])
    with pytest.raises(ValueError, match=re.escape("`share_prompts` needs `row_length`")):
        encode([trajectory], share_prompts=True)
    message = "Got row_length=3, but trajectory 1 has 4 nodes in this layout. Raise `row_length`, or cut the trajectory"
    with pytest.raises(ValueError, match=re.escape(message)):
        encode([trajectory.truncate(2), trajectory], row_length=3)


# Row lengths


def of_length(nodes: int, prompt: tuple[int, ...] = (0,)) -> Trajectory:
    return Trajectory.rollout(SPACE, prompt, (*(1 + i % 3 for i in range(nodes - len(prompt) - 1)), EOS))


@pytest.mark.parametrize(
    ("lengths", "hidden_size", "shape"),
    [
        ([128] * 4, 512, (4, 128)),  # nothing to gain from longer rows
        ([128] * 4 + [80] * 4, 512, (4, 208)),  # each of the long ones with a short one
        ([60, 20, 20, 20], 8, (2, 64)),  # attention counts: 120 · (6 · 8 + 120) is more than 2 · 64 · (6 · 8 + 64)
        ([60, 20, 20, 20], 512, (1, 120)),  # 120 · (6 · 512 + 120) is less than 2 · 64 · (6 · 512 + 64)
        ([5], 512, (1, 8)),
    ],
)
def test_rows_are_as_long_as_leaves_least_to_compute(
    lengths: list[int], hidden_size: int, shape: tuple[int, int]
) -> None:
    trajectories = [of_length(n) for n in lengths]
    length = fitting_row_length(trajectories, hidden_size, share_prompts=False)
    assert tuple(encode(trajectories, row_length=length).tokens.shape) == shape


def test_rows_are_long_enough_for_what_shares_a_prompt() -> None:
    prompts = [tuple(1 + (i >> bit & 1) for bit in range(30)) for i in range(8)]
    pairs = [of_length(40, prompt) for prompt in prompts for _ in range(2)]
    length = fitting_row_length(pairs, 512)
    encoding = encode(pairs, row_length=length, share_prompts=True)
    assert encoding.tokens.numel() <= 1.1 * 8 * 50  # 50 nodes a pair: the prompt once, two completions of ten
    apart = fitting_row_length(pairs, 512, share_prompts=False)
    assert encode(pairs, row_length=apart).tokens.numel() >= 16 * 40


def test_sharing_one_token_is_no_reason_for_a_longer_row() -> None:
    assert fitting_row_length([of_length(512), of_length(512)], 512) == 512


@given(st.lists(st.integers(3, 90), min_size=1, max_size=12), st.sampled_from([8, 512, 4096]), st.booleans())
def test_every_batch_fits_and_little_of_it_is_padding(lengths: list[int], hidden_size: int, share: bool) -> None:
    trajectories = [of_length(n) for n in lengths]
    length = fitting_row_length(trajectories, hidden_size, share_prompts=share)
    encoding = encode(trajectories, row_length=length, share_prompts=share)
    alone = encode(trajectories)
    assert encoding.tokens.numel() <= alone.tokens.numel() + 8 * len(
        lengths
    )  # never worse than a row each, but for rounding
