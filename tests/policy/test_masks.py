"""Masks from alive intervals: the block mask against FlexAttention's own, windows counted in positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from sequencematch.core.encoding import attend, encode
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.policy.masks import FLEX_BLOCK, block_mask, dense

SPACE = ActionSpace(vocab_size=50, eos=1)


def rows(lengths: list[int], backspaces: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`deleted_at` and `position_ids` of long packed rows."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for length in lengths:
        actions = torch.randint(2, 50, (length,), generator=generator)
        actions[torch.rand(length, generator=generator) < backspaces] = SPACE.bkspc
        trajectories.append(Trajectory.rollout(SPACE, (5, 6, 7), (*actions.tolist(), 1)))
    encoding = encode(trajectories, row_length=max(lengths) + 150)
    return encoding.deleted_at, encoding.position_ids


def test_a_window_is_counted_in_positions_so_that_a_deleted_token_takes_no_room() -> None:
    """4 a b <bkspc> c: c stands at position 2, so a window of 2 reaches a, two columns back, and not <bos>."""
    encoding = encode([Trajectory.rollout(SPACE, (4,), (10, 11, SPACE.bkspc, 12, 1))])
    kept = dense(encoding.deleted_at, encoding.position_ids, window=2)
    assert kept[0, 3].tolist() == [False, True, False, True, False]
    assert attend(encoding.deleted_at)[0, 3].tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("window", [None, 60])
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    backspaces=st.sampled_from([0.0, 0.2, 0.45]),
    seed=st.integers(0, 99),
)
def test_the_block_mask_masks_what_the_dense_one_does(
    window: int | None, lengths: list[int], backspaces: float, seed: int
) -> None:
    """No block that matters is skipped, and none is called full that is not; a few empty ones may be visited."""
    deleted_at, position_ids = rows(lengths, backspaces, seed)
    mask = block_mask(deleted_at, position_ids, window)
    kept = dense(deleted_at, position_ids, window)
    nodes = kept.shape[-1]
    blocks = -(-nodes // FLEX_BLOCK)
    padded = torch.nn.functional.pad(kept, (0, blocks * FLEX_BLOCK - nodes) * 2)
    tiles = padded.view(len(kept), blocks, FLEX_BLOCK, blocks, FLEX_BLOCK).transpose(2, 3).flatten(3)

    def listed(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(blocks) < count[..., None]
        return torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), chosen)[:, 0]

    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    partial, full = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert bool((partial | full | ~tiles.any(-1)).all())
    inside = tiles.all(-1) | ~full
    assert bool(inside.all())
    assert not bool((partial & full).any())
    i, j = torch.meshgrid(torch.arange(nodes), torch.arange(nodes), indexing="ij")
    for row in range(len(kept)):
        assert torch.equal(mask.mask_mod(torch.tensor(row), torch.tensor(0), i, j), kept[row])


def test_without_deletions_it_is_flex_attentions_own_causal_block_mask() -> None:
    deleted_at, position_ids = rows([700], 0.0, 0)
    row_length = deleted_at.shape[1]
    used = 704
    ours = block_mask(deleted_at[:, :used], position_ids[:, :used])
    theirs = create_block_mask(
        lambda b, h, i, j: j <= i,  # noqa: ARG005
        None,
        None,
        used,
        used,
        device="cpu",
    )
    assert row_length > used
    assert torch.equal(ours.to_dense(), theirs.to_dense())
