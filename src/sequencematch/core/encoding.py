"""Algorithm A as alive intervals: a batch of trajectories → the rows a transformer scores in one pass (§4.1, App. A).

Replay a trajectory on a stack. Every pushed token is a *node*, one transformer position. A node lives from its push until a
backspace pops it; `deleted_at[j]` is how many nodes had been pushed by then (all of them, if it is never popped). Then

    node i attends to node j  ⇔  j ≤ i < deleted_at[j]            position_ids[i] = number of live nodes below i

One integer per node replaces the L×L mask of Algorithm A. A *visit* is a time step: the node on top of the stack when an
action is chosen. After a backspace that is an earlier node, already computed, so deleting costs no position. Trajectories
laid one after another in a row never see each other, since each deletes all its nodes when it ends.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sequencematch.core.mdp import Trajectory

Layout = Literal["tree", "paper"]


@dataclass(frozen=True)
class Encoding:
    """Transformer inputs that score a batch of trajectories in one pass, and the nodes to read the scores from   (Alg. A).

    `visit[b, t]` is the node of state s_t of trajectory b, as an index into the flattened [row × node] axis; after the last
    state, its index is repeated. `chosen[b, t]` is the label a_t. `length[b]` is the number T of decisions; later entries are
    padding. A padding node attends to itself only.
    """

    tokens: Int[Tensor, "row node"]
    position_ids: Int[Tensor, "row node"]
    deleted_at: Int[Tensor, "row node"]
    chosen: Int[Tensor, "batch step"]
    visit: Int[Tensor, "batch step+1"]
    policy_chosen: Bool[Tensor, "batch step"]
    length: Int[Tensor, "batch"]

    def attend(self) -> Bool[Tensor, "row node node"]:
        """The dense mask, True where the first node attends to the second. Quadratic in memory: for small rows and tests."""
        return attend(self.deleted_at)

    def to(self, device: torch.device | str) -> "Encoding":
        """The same encoding on another device."""
        return Encoding(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def attend(deleted_at: Int[Tensor, "*batch node"]) -> Bool[Tensor, "*batch node node"]:
    """The mask m of Algorithm A from alive intervals: m[i, j] ⇔ j ≤ i < deleted_at[j]   (Alg. A)."""
    node = torch.arange(deleted_at.shape[-1], device=deleted_at.device)
    return (node <= node[:, None]) & (node[:, None] < deleted_at[..., None, :])


def encode(
    trajectories: Sequence[Trajectory],
    *,
    layout: Layout = "tree",
    row_length: int | None = None,
    share_prompts: bool = False,
    device: torch.device | str | None = None,
) -> Encoding:
    """Algorithm A for a batch: nodes, positions, alive intervals, visits and labels   (App. A).

    By default every trajectory has its own row. With `row_length`, whole trajectories are packed into rows of that many nodes.
    With `share_prompts`, trajectories of equal initial state in the same row share the prompt's nodes. Each deletes its other
    nodes before the next begins. Only the last may delete into the prompt; any other that does gets its own copy of it.

    `layout="tree"` is the encoding described in this module. `layout="paper"` is Algorithm A with its positions corrected (the
    printed ones are one too large): a backspace appends a copy of the token it returns to and hides the original. Both give
    the same logits and gradients.
    """
    if not trajectories:
        raise ValueError("`trajectories` must hold at least one trajectory. Got none.")
    if layout not in _LAYOUTS:
        raise ValueError(f"`layout` must be one of {', '.join(map(repr, _LAYOUTS))}. Got {layout!r}.")
    if share_prompts and row_length is None:
        raise ValueError(
            "`share_prompts` needs `row_length`: prompts are shared inside packed rows. Got row_length=None."
        )
    space = trajectories[0].space
    if any(trajectory.space != space for trajectory in trajectories):
        raise ValueError(
            "`trajectories` must share one action space. Got several; build them from the same ActionSpace."
        )

    def column(numbers: Iterable[int]) -> Int[Tensor, "batch"]:
        return torch.tensor(list(numbers), dtype=torch.long, device=device)

    prompt = column(len(t.initial) for t in trajectories)
    length = column(len(t) for t in trajectories)
    floor = column(t.floor for t in trajectories)
    events = _pad([t.initial + t.executed for t in trajectories], space.eos, device)
    nodes = stack_nodes(events, prompt + length, floor, bkspc=space.bkspc, layout=layout)

    # Where each trajectory goes is decided per trajectory, on the host.
    counts = nodes.count.tolist()
    in_prompt = torch.arange(events.shape[1], device=device) < prompt[:, None]
    deletes_prompt = [False] * len(trajectories)
    if share_prompts:
        deletes_prompt = (in_prompt & (nodes.deleted_at < nodes.count[:, None])).any(1).tolist()
    groups = _group(trajectories, counts, deletes_prompt, limit=row_length if share_prompts else None)
    places, rows, width = _place(groups, trajectories, counts, row_length)
    row, prompt_start, body_start, owns_prompt = (column(part) for part in zip(*places, strict=True))

    def slot(node: Int[Tensor, "batch some"]) -> Int[Tensor, "batch some"]:
        """A trajectory's node → its place on the flattened [row × node] axis."""
        start = torch.where(node < prompt[:, None], prompt_start[:, None], (body_start - prompt)[:, None])
        return row[:, None] * width + start + node

    node = torch.arange(events.shape[1], device=device).expand_as(events)
    written = (node < nodes.count[:, None]) & (~in_prompt | owns_prompt[:, None].bool())
    slots = torch.where(written, slot(node), rows * width)  # one slot past the end takes the others

    def lay(values: Int[Tensor, "batch event"], padding: Int[Tensor, "slot"]) -> Int[Tensor, "row node"]:
        return padding.scatter(0, slots.flatten(), values.flatten())[:-1].view(rows, width)

    padding = torch.zeros(rows * width + 1, dtype=torch.long, device=device)
    own_only = (torch.arange(width, device=device) + 1).repeat(rows + 1)[: rows * width + 1]  # no empty softmax
    t = torch.arange(max(map(len, trajectories)) + 1, device=device)
    state = (prompt - 1)[:, None] + torch.minimum(t, length[:, None])
    return Encoding(
        tokens=lay(nodes.tokens, padding + space.eos),
        position_ids=lay(nodes.position_ids, padding),
        deleted_at=lay(nodes.deleted_at + (body_start - prompt)[:, None], own_only),
        visit=slot(nodes.top.gather(1, state)),
        chosen=_pad([trajectory.chosen for trajectory in trajectories], space.eos, device),
        policy_chosen=_pad([trajectory.policy_chosen for trajectory in trajectories], 0, device).bool(),
        length=length,
    )


@dataclass(frozen=True)
class Nodes:
    """The nodes of each trajectory by itself; `top[b, k]` is the node on top of the stack after event k   (Alg. A)."""

    tokens: Int[Tensor, "batch event"]
    position_ids: Int[Tensor, "batch event"]
    deleted_at: Int[Tensor, "batch event"]
    top: Int[Tensor, "batch event"]
    count: Int[Tensor, "batch"]


def stack_nodes(
    events: Int[Tensor, "batch event"],
    length: Int[Tensor, "batch"],
    floor: Int[Tensor, "batch"],
    *,
    bkspc: int,
    layout: Layout = "tree",
) -> Nodes:
    """Replay pushes and backspaces without a loop: cumulative sums, one sort, gathers; on any device   (Alg. A).

    Let S be the cumulative sum of ±1. A walk kept at or above a non-decreasing floor F has depth S − running minimum of
    (S − F). Here F is `floor`, or the number of tokens pushed so far if that is smaller. A stable sort of the events by depth
    puts each event beside the next event of the same depth: this gives when a node is popped, and which node a backspace
    returns to. Padding beyond `length` may be any token except `<bkspc>`: it only adds nodes beyond `count`.
    """
    time = torch.arange(events.shape[1], device=events.device)
    is_push = events != bkspc
    pushed = is_push.cumsum(1)
    walk = (2 * pushed).sub_(time + 1)
    depth = walk.sub_((walk - torch.minimum(pushed, floor[:, None])).cummin(1).values)
    by_depth, order = depth.sort(dim=1, stable=True)
    # In this order each depth starts with the push that first reached it: the latest push so far has the same depth.
    latest_push = (time * is_push.gather(1, order)).cummax(1).values
    next_is_as_deep = by_depth[:, 1:] == by_depth[:, :-1]
    return _LAYOUTS[layout](
        _Replay(events, length[:, None], is_push, pushed, depth, order, next_is_as_deep, latest_push)
    )


@dataclass(frozen=True)
class _Replay:
    """A replayed stack: per event the depth and the number of tokens pushed so far; and the events ordered by depth, then time."""

    events: Int[Tensor, "batch event"]
    length: Int[Tensor, "batch 1"]
    is_push: Bool[Tensor, "batch event"]
    pushed: Int[Tensor, "batch event"]
    depth: Int[Tensor, "batch event"]
    order: Int[Tensor, "batch event"]
    next_is_as_deep: Bool[Tensor, "batch event-1"]  # in that order
    latest_push: Int[Tensor, "batch event"]  # in that order, the place of the push whose token is on top


def _tree(replay: _Replay) -> Nodes:
    """A node per push. It is popped when the stack next returns to its depth before that push."""
    count = replay.pushed.gather(1, replay.length - 1)
    pushed = replay.pushed.gather(1, replay.order)
    place = replay.pushed * replay.is_push  # node j has place j + 1; place 0 takes backspaces
    place_after = torch.cat([place[:, 1:], torch.zeros_like(place[:, :1])], dim=1).gather(1, replay.order)

    def per_node(values: Int[Tensor, "batch event"]) -> Int[Tensor, "batch event"]:
        batch, events = values.shape
        return values.new_empty(batch, events + 1).scatter_(1, place, values)[:, 1:]

    popped_place = place_after[:, :-1] * replay.next_is_as_deep
    deleted_at = (
        count.expand(-1, replay.events.shape[1] + 1).contiguous().scatter_(1, popped_place, pushed[:, 1:])[:, 1:]
    )
    return Nodes(
        tokens=per_node(replay.events),
        position_ids=per_node(replay.depth - 1),
        deleted_at=deleted_at,
        top=torch.empty_like(pushed).scatter_(1, replay.order, pushed.gather(1, replay.latest_push) - 1),
        count=count.squeeze(1),
    )


def _paper(replay: _Replay) -> Nodes:
    """A node per event. A backspace copies the token it returns to; from then on the popped token and the original are hidden."""
    time = torch.arange(replay.events.shape[1], device=replay.events.device).expand_as(replay.events)
    pushed_top = torch.empty_like(replay.order).scatter_(1, replay.order, replay.order.gather(1, replay.latest_push))
    hidden = torch.where(replay.next_is_as_deep, replay.order[:, 1:], replay.length)
    next_as_deep = replay.length.repeat(1, time.shape[1]).scatter_(1, replay.order[:, :-1], hidden)
    next_pops = torch.cat([~replay.is_push[:, 1:], torch.zeros_like(replay.is_push[:, :1])], dim=1)
    return Nodes(
        tokens=replay.events.gather(1, pushed_top),
        position_ids=replay.depth - 1,
        deleted_at=torch.where(next_pops, time + 1, next_as_deep),
        top=time,
        count=replay.length.squeeze(1),
    )


_LAYOUTS: Mapping[str, Callable[[_Replay], Nodes]] = MappingProxyType({"tree": _tree, "paper": _paper})


@dataclass
class _Group:
    """Trajectories that share one prompt, in the order of their row; the last owns the prompt and may delete into it."""

    members: list[int] = field(default_factory=list)
    size: int = 0
    closed: bool = False


def _group(
    trajectories: Sequence[Trajectory], counts: Sequence[int], deletes_prompt: Sequence[bool], limit: int | None
) -> list[_Group]:
    """Group trajectories of equal initial state, at most `limit` nodes per group: largest first, but those that delete
    into the prompt last.

    Without a limit each is a group of its own.
    """
    if limit is None:
        return [_Group([index], count) for index, count in enumerate(counts)]
    groups: list[_Group] = []
    open_groups: dict[tuple[int, ...], list[_Group]] = {}
    for index in sorted(range(len(trajectories)), key=lambda index: (deletes_prompt[index], -counts[index])):
        initial = trajectories[index].initial
        body = counts[index] - len(initial)
        candidates = open_groups.setdefault(initial, [])
        group = next((g for g in candidates if not g.closed and g.size + body <= limit), None)
        if group is None:
            group = _Group(size=len(initial))
            candidates.append(group)
            groups.append(group)
        group.members.append(index)
        group.size += body
        group.closed = deletes_prompt[index]
    return groups


def _place(
    groups: Sequence[_Group], trajectories: Sequence[Trajectory], counts: Sequence[int], row_length: int | None
) -> tuple[list[tuple[int, int, int, bool]], int, int]:
    """First fit, largest first. For each trajectory its row, where prompt and body start, and whether it writes the prompt."""
    width = max(group.size for group in groups) if row_length is None else row_length
    if width < max(counts):
        longest = max(range(len(counts)), key=counts.__getitem__)
        raise ValueError(
            f"`row_length` must fit the longest trajectory: trajectories are not split. Got row_length={row_length}, but "
            f"trajectory {longest} has {counts[longest]} nodes in this layout. Raise `row_length`, or cut the trajectory with "
            f"`truncate`, which counts the nodes of layout 'tree'."
        )
    used: list[int] = []
    places: list[tuple[int, int, int, bool]] = [(0, 0, 0, False)] * len(trajectories)
    largest_first = sorted(groups, key=lambda group: -group.size)
    for group in groups if row_length is None else largest_first:
        tried = () if row_length is None else enumerate(used)
        row = next((row for row, nodes in tried if nodes + group.size <= width), len(used))
        if row == len(used):
            used.append(0)
        prompt_start = used[row]
        body_start = prompt_start + len(trajectories[group.members[0]].initial)
        for index in group.members:
            places[index] = (row, prompt_start, body_start, index == group.members[-1])
            body_start += counts[index] - len(trajectories[index].initial)
        used[row] = body_start
    return places, len(used), width


def fitting_row_length(trajectories: Sequence[Trajectory], hidden_size: int, *, share_prompts: bool = True) -> int:
    """The row length with the least compute for a transformer of width d = `hidden_size`, padding included   (Alg. A).

    Per layer a node costs 24 d² in matrix products and 4 · row · d in attention, a ratio of row / 6d. Lengths are rounded up
    to at most sixteen values per power of two, so that batches of similar size have the same shape.
    """
    longest = max(trajectory.num_nodes for trajectory in trajectories)
    groups: dict[tuple[int, ...] | int, list[int]] = {}
    alone: dict[tuple[int, ...] | int, int] = {}
    for index, trajectory in enumerate(trajectories):
        key = trajectory.initial if share_prompts else index
        group = groups.setdefault(key, [])
        group.append(trajectory.num_nodes - len(trajectory.initial) * bool(group))
        alone[key] = alone.get(key, 0) + trajectory.num_nodes
    # Those that share much of a prompt stay together; those that share <bos> alone are spread over rows.
    together = [
        [sum(group)] if 2 * longest >= sum(group) <= 0.9 * alone[key] else group for key, group in groups.items()
    ]
    sizes = sorted((size for group in together for size in group), reverse=True)
    shortest, total = max(longest, sizes[0]), sum(sizes)
    tried = (shortest * sixteenths // 16 for sixteenths in (*range(16, 33), 48, 64))
    lengths = {_rounded(max(shortest, min(length, total))) for length in tried}
    return min(lengths, key=lambda length: (_rows_needed(sizes, length) * length * (6 * hidden_size + length), length))


def _rounded(length: int) -> int:
    step = max(8, (1 << (length - 1).bit_length()) // 32)
    return -(-length // step) * step


def _rows_needed(sizes: Sequence[int], length: int) -> int:
    """Best fit, largest first."""
    rooms: list[int] = []  # ascending
    rows = 0
    for size in sizes:
        place = bisect_left(rooms, size)
        if place == len(rooms):
            rows += 1
            room = length - size
        else:
            room = rooms.pop(place) - size
        insort(rooms, room)
    return rows


def _pad(
    sequences: Sequence[Sequence[int]], padding: int, device: torch.device | str | None
) -> Int[Tensor, "batch longest"]:
    """Ragged integer sequences → one tensor, padded on the right."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    given = torch.arange(int(lengths.max())) < lengths[:, None]
    flat = torch.frombuffer(array("q", chain.from_iterable(sequences)), dtype=torch.long)
    return torch.full(given.shape, padding).masked_scatter_(given, flat).to(device)
