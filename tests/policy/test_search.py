"""A search tries each token of a state once, finds what can be found, and always ends with an answer."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sequencematch
from sequencematch.policy import Policy, Sampling
from sequencematch.policy.decoding.choice import Choice
from sequencematch.policy.decoding.decoder import Decoder, Limits
from sequencematch.policy.decoding.search import REMEMBERED, DeletedTokens, action_limit, keep_open
from tests.oracles.naive_sampler import naive_rollout
from tests.policy.test_generation import BK, EOS, Script, policy_of, ragged_prompts, with_row
from tests.policy.tiny_models import exact_llama, llama

#: The tokens of a path → the logits of all actions there.
Table = Callable[[tuple[int, ...]], Sequence[float]]


@pytest.fixture
def policy() -> Policy:
    return policy_of("float64")


@functools.cache
def beside_tables() -> Policy:
    """A small network, in float64: where logits come from tables, its own are not used."""
    return Policy(llama(num_hidden_layers=1).double())


def logits_of(likely: dict[int, float]) -> list[float]:
    """Probabilities of some actions as logits of all; the others are impossible."""
    return [math.log(likely[action]) if action in likely else -math.inf for action in range(BK + 1)]


def decode(tables: Sequence[Table], *, depth: int, choice: Choice, max_actions: int) -> list[list[int]]:
    """The actions of one row per table, of a decoder whose logits are the tables'."""
    policy = beside_tables()

    def process(states: list[list[int]], logits: Tensor) -> Tensor:
        rows = [tables[state[0] * 48 + state[1]](tuple(state[2:])) for state in states]
        return torch.tensor(rows, dtype=logits.dtype)

    limits = Limits(EOS, frozenset({EOS}), BK, depth, max_actions, protect_prompt=True)
    choice = Choice(choice.greedy, process, ban_deleted=choice.ban_deleted, search_min_p=choice.search_min_p)
    decoder = Decoder(policy.base, policy.action_logits, limits, choice, slots=len(tables), longest_prompt=2)
    drawn = torch.rand(len(tables), max_actions, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prompts = [[row // 48, row % 48] for row in range(len(tables))]
    decoder.fill(range(len(tables)), range(len(tables)), prompts, list(drawn))
    actions: list[list[int]] = [[] for _ in tables]
    for event in decoder.run():
        actions[event.row].append(event.chosen)
    return actions


# By hand


def test_a_search_tries_likely_tokens_in_turn_and_goes_back_when_none_is_left() -> None:
    # 10 (60 %) leads to a dead end of which the model is sure; 11 (36 %) to two tokens it doubts, then to nothing;
    # 12 (4 %, above a twentieth of 60 %) to the answer; 13 (2 %) is below that.
    tree = {
        (): {10: 0.6, 11: 0.36, 12: 0.04, 13: 0.02},
        (10,): {20: 0.01, BK: 0.99},
        (11,): {21: 0.5, 22: 0.4, BK: 0.1},
        (11, 21): {EOS: 0.1, BK: 0.9},
        (11, 22): {30: 0.3, BK: 0.7},
        (12,): {EOS: 1.0},
    }
    (actions,) = decode(
        [lambda path: logits_of(tree[path])], depth=4, choice=Choice(greedy=True, search_min_p=0.05), max_actions=99
    )
    assert actions == [10, BK, 11, 21, BK, 22, BK, BK, 12, EOS]


def test_full_length_without_eos_is_a_dead_end() -> None:
    tree = {(): {10: 0.7, 11: 0.3}, (10,): {20: 0.9, BK: 0.1}, (11,): {EOS: 0.6, 20: 0.4}}
    (actions,) = decode(
        [lambda path: logits_of(tree[path])], depth=1, choice=Choice(greedy=True, search_min_p=0.05), max_actions=99
    )
    assert actions == [10, BK, 11, EOS]


def test_with_few_actions_left_a_row_stops_deleting_and_ends_with_an_answer() -> None:
    """Ten actions; every state wants to delete. Full length is three tokens and <eos>."""
    table = logits_of({10: 0.1, 11: 0.1, EOS: 0.05, BK: 0.75})
    (actions,) = decode([lambda _: table], depth=3, choice=Choice(greedy=True, search_min_p=0.05), max_actions=10)
    # 10, delete (8 left), 11, delete (6 left, room 4), <eos>: the only token not tried
    assert actions == [10, BK, 11, BK, EOS]


def test_a_row_that_can_not_end_writes_a_deleted_token_again_and_keeps_it() -> None:
    """After 10 is deleted nothing is left to try. At full length nothing is possible at all, and the row ends."""
    table = logits_of({10: 0.2, BK: 0.8})
    (actions,) = decode([lambda _: table], depth=2, choice=Choice(greedy=True, search_min_p=0.05), max_actions=20)
    # 10, deleted; 10, which stays; behind it the same once more; then full length.
    assert actions == [10, BK, 10, 10, BK, 10, EOS]


def test_at_full_length_a_row_ends_if_it_can_even_where_it_may_not_delete() -> None:
    """No action is left for a deletion: 20 is likelier than <eos>, but would be cut."""
    table = logits_of({20: 0.9, EOS: 0.1})
    (actions,) = decode([lambda _: table], depth=1, choice=Choice(greedy=True, search_min_p=0.05), max_actions=2)
    assert actions == [20, EOS]


def test_a_first_token_that_can_not_be_remembered_stays() -> None:
    """At the prompt 32 tokens are deleted; the 33rd choice is kept, and the search goes on behind it."""
    table = [0.0 if action != EOS else -20.0 for action in range(BK)] + [9.0]
    (actions,) = decode([lambda _: table], depth=2, choice=Choice(greedy=True, search_min_p=0.5), max_actions=9999)
    first = [action for action, after in itertools.pairwise(actions[: 2 * REMEMBERED]) if after == BK]
    assert len(set(first)) == len(first) == REMEMBERED
    assert actions[2 * REMEMBERED] not in (*first, BK)
    # Behind it another 32 are deleted; then one stays, at full length, where the next choice is cut.
    assert actions.count(BK) == 2 * REMEMBERED
    assert len(actions) == 4 * REMEMBERED + 3


def test_open_actions_are_likely_not_deleted_and_end_at_a_leaf() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.2]]).log()  # tokens 0, 1, 2; 3 is <eos>; 4 is <bkspc>

    def found(tokens: list[int], *, may_delete: bool, only_ends: bool = False, min_p: float = 0.25) -> list[float]:
        deleted, slot, size, offered = (
            DeletedTokens(1, 2, torch.device("cpu")),
            torch.tensor([0]),
            torch.tensor([1]),
            logits.clone(),
        )
        for token in tokens:
            deleted.update(slot, size + 1, torch.tensor([token]), torch.tensor([True]), torch.tensor([False]))
        flags = {"may_delete": torch.tensor([may_delete]), "only_ends": torch.tensor([only_ends])}
        keep_open(offered, deleted, slot, size, min_p=min_p, bkspc=4, ends=torch.tensor([3]), eos=3, **flags)
        return [round(p, 6) for p in offered.exp()[0].tolist()]

    assert found([], may_delete=True) == [0.5, 0.3, 0.15, 0, 0.2]  # 0.05 is below a quarter of 0.5
    assert found([0], may_delete=True) == [0, 0.3, 0.15, 0, 0.2]  # compared with 0.5 all the same
    assert found([0, 1, 2], may_delete=True) == [0, 0, 0, 0, 1]  # none open
    assert found([0, 1, 2], may_delete=False) == [0, 0, 0, 0.05, 0]  # every token that was not deleted
    assert found([0, 1, 2, 3], may_delete=False) == [0.5, 0.3, 0.15, 0.05, 0]  # none at all: what was deleted, again
    assert found([0], may_delete=False, only_ends=True) == [0, 0, 0, 0.05, 0]
    assert found([], may_delete=True, only_ends=True) == [0, 0, 0, 0, 1]
    assert found([], may_delete=True, only_ends=True, min_p=0.1) == [0, 0, 0, 0.05, 0.2]


def test_of_more_deleted_tokens_than_there_is_room_for_the_oldest_returns() -> None:
    deleted, slot = DeletedTokens(1, 3, torch.device("cpu")), torch.tensor([0])
    for token in range(REMEMBERED + 1):
        for pops in (False, True):
            size = torch.tensor([2 + pops])
            deleted.update(slot, size, torch.tensor([token]), torch.tensor([pops]), torch.tensor([not pops]))
    logits = torch.zeros(1, 48)
    deleted.close(logits, slot, torch.tensor([2]))
    assert logits[0].isinf().nonzero().flatten().tolist() == list(range(1, REMEMBERED + 1))


# The naive reference


def random_table(number: int) -> Table:
    """Normally distributed logits of every action, other ones in every state."""

    def table(path: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((number, path)) % 2**63)
        return (3 * torch.randn(BK + 1, generator=generator, dtype=torch.float64)).tolist()

    return table


def random_search(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    options: dict[str, Any] = {
        "max_new_tokens": draw.choice([2, 3, 4]),
        "max_actions": draw.choice([8, 16, 24]),
        "min_p": draw.choice([0.02, 0.1, 0.4]),
        "backspace_bias": draw.choice([0.0, 2.0, 5.0]),
        "search": True,
    }
    return options | draw.choice([{}, {"seed": seed, "temperature": draw.choice([0.7, 1.0, 1.5])}])


def test_in_500_random_tables_a_search_is_the_naive_search_action_for_action() -> None:
    """The reference looks every state up anew and keeps a dictionary of the tokens deleted in each."""
    policy, deletions = beside_tables(), 0
    for first in range(0, 500, 20):
        tables = [random_table(first + row) for row in range(20)]

        def from_table(state: Tensor, _: Tensor, tables: list[Table] = tables) -> Tensor:
            number, *path = state[0].tolist()
            return torch.tensor([tables[number](tuple(path))], dtype=torch.float64)

        options = random_search(first) | {"logits_processor": from_table, "backspace_bias": 0.0}
        prompts = [[row] for row in range(20)]
        found = policy.generate(prompts, **options).trajectories
        for row, (prompt, trajectory) in enumerate(zip(prompts, found, strict=True)):
            steps = naive_rollout(policy, prompt, row, Sampling(**options), lambda *_: [0.0] * (BK + 1))
            assert trajectory.chosen == tuple(step.chosen for step in steps), f"table {first + row}, {options}"
            deletions += trajectory.executed.count(BK)
    print(f"{deletions} deletions")
    assert deletions > 1000


def test_in_random_networks_a_search_is_the_naive_search_action_for_action() -> None:
    """The reference runs the model on every state from its tokens alone. Every network has other weights, in float64."""
    policy, deletions = with_row(exact_llama()), 0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in (*policy.model.parameters(), policy.backspace.row):
                if parameter.ndim > 1 or parameter is policy.backspace.row:
                    parameter.normal_(std=0.5, generator=generator)
        options = random_search(seed)
        (prompt,) = ragged_prompts(1, seed, longest=4)
        steps = naive_rollout(policy, prompt, 0, Sampling(**options))
        (trajectory,) = policy.generate(prompt, **options).trajectories
        assert trajectory.chosen == tuple(step.chosen for step in steps), f"seed {seed}, {options}"
        deletions += trajectory.executed.count(BK)
    print(f"{deletions} deletions")
    assert deletions > 30


def test_with_tokens_that_stay_open_the_comparison_fails(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    def leave_open(self: DeletedTokens, logits: Tensor, slot: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        return self.tokens[slot, size].long(), torch.full((len(logits), REMEMBERED), -torch.inf, dtype=logits.dtype)

    monkeypatch.setattr(DeletedTokens, "close", leave_open)
    options: dict[str, Any] = {"search": True, "backspace_bias": 4.0, "max_new_tokens": 4, "max_actions": 40}
    prompts = ragged_prompts(12, 3)
    chosen = [t.chosen for t in policy.generate(prompts, **options).trajectories]
    naive = [tuple(s.chosen for s in naive_rollout(policy, prompt, 0, Sampling(**options))) for prompt in prompts]
    assert sum(ours != theirs for ours, theirs in zip(chosen, naive, strict=True)) >= 6


# It ends, and finds


def paths_of(actions: list[int]) -> list[tuple[int, ...]]:
    """The path behind every push."""
    path, pushed = list[int](), list[tuple[int, ...]]()
    for action in actions:
        if action == BK:
            path.pop()
        else:
            path.append(action)
            pushed.append(tuple(path))
    return pushed


def adversarial_table(number: int) -> Table:
    """Random logits by state, with what could trap a search: everything deletes, nothing ends, ties, impossible actions."""
    draw = random.Random(number)
    tokens, spite, never_ends = draw.sample(range(3, 48), 3), draw.choice([-3.0, 0.0, 8.0]), draw.random() < 0.5

    def table(path: tuple[int, ...]) -> list[float]:
        here = random.Random(hash((number, path)))
        row = [-math.inf] * (BK + 1)
        for token in tokens:
            row[token] = here.choice([0.0, 0.0, -1.0, -9.0, 3.0])
        row[EOS] = -40.0 if never_ends else here.choice([-9.0, 0.0, 1.0])
        row[BK] = here.choice([-9.0, 0.0, 3.0]) + spite
        return row

    return table


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_a_search_ends_in_each_of_5000_adversarial_tables_and_pushes_no_edge_twice(greedy: bool) -> None:
    """Three tokens, depth 3: 39 edges at most. A row that could go on for ever would reach the limit of 1,000 actions."""
    most = 0
    for first in range(0 if greedy else 5000, 5000 if greedy else 10_000, 1000):
        tables = [adversarial_table(first + row) for row in range(1000)]
        for actions in decode(tables, depth=3, choice=Choice(greedy=greedy, search_min_p=0.05), max_actions=1000):
            pushed = paths_of(actions)
            assert len(set(pushed)) == len(pushed)
            assert actions[-1] == EOS
            most = max(most, len(actions))
    print(f"at most {most} actions")
    assert 40 < most <= 2 * 39 + 1


@pytest.mark.parametrize("branches", [2, 3])
def test_a_search_finds_the_leaf_in_500_trees_that_branch_everywhere(branches: int) -> None:
    """Every wrong leaf is seen to be wrong, no branch is seen to be wrong before: a search needs each edge once at most."""
    depth, count = 5 if branches == 2 else 4, 500
    draw = random.Random(branches)
    leaves = [tuple(draw.choices(range(10, 10 + branches), k=depth)) for _ in range(count)]

    def table(leaf: tuple[int, ...]) -> Table:
        inner = logits_of(dict.fromkeys(range(10, 10 + branches), 1.0 / branches))
        right, wrong = logits_of({EOS: 1.0}), logits_of({BK: 1.0})
        return lambda path: inner if len(path) < depth else right if path == leaf else wrong

    tables = [table(leaf) for leaf in leaves]
    edges = sum(branches**level for level in range(1, depth + 1))
    for actions, leaf in zip(
        decode(tables, depth=depth, choice=Choice(greedy=True, search_min_p=0.05), max_actions=9999),
        leaves,
        strict=True,
    ):
        pushed = paths_of(actions)
        assert pushed[-1] == (*leaf, EOS)
        assert len(pushed) <= edges + 1
        assert actions.count(BK) < edges
    # Negative control: without a memory of what was deleted, greedy decoding goes back to the same leaf for ever.
    plain = decode(tables[:50], depth=depth, choice=Choice(greedy=True), max_actions=200)
    assert sum(actions[-1] == EOS for actions in plain) < 10


# Options


def test_a_search_is_greedy_protects_the_prompt_and_has_room_for_dead_ends() -> None:
    sampling = Sampling(search=True, max_new_tokens=5)
    assert (sampling.temperature, sampling.protect_prompt, sampling.action_limit) == (0.0, True, 161)
    assert sampling.action_limit == action_limit(5, search=True)
    assert Sampling(max_new_tokens=5).temperature == 1.0
    assert Sampling(search=True, temperature=0.7, seed=1).choice().search_min_p == 0.05
    assert Sampling(search=True, min_p=0.2).choice().search_min_p == 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ban_deleted": True}, "`ban_deleted` must be left out with `search`"),
        ({"self_loops": True}, "`self_loops` must be left out with `search`"),
        ({"hold_back": 3}, "`hold_back` must be left out with `search`, which deletes back to the prompt"),
        ({"min_p": 0.0}, "`min_p` must be above 0 with `search`"),
        ({"backspace_bias": -math.inf}, "`backspace_bias` must not be -inf with `search`"),
        (
            {"max_actions": 6, "max_new_tokens": 4},
            r"`max_actions` must be at least `max_new_tokens` \+ 3 with `search`",
        ),
        ({"seed": 1, "min_p": 0.1}, "^`seed` would be ignored at temperature 0"),
    ],
)
def test_an_option_that_a_search_would_ignore_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(search=True, **options)


def test_streaming_a_search_yields_the_actions_of_generate(policy: Policy) -> None:
    for prompt in ragged_prompts(6, 61):
        options: dict[str, Any] = {"search": True, "max_new_tokens": 5, "backspace_bias": 2.0}
        (trajectory,) = policy.generate(prompt, **options).trajectories
        assert tuple(event.chosen for event in policy.stream(prompt, **options)) == trajectory.chosen


def test_a_prescribed_action_that_is_not_open_is_not_taken(policy: Policy) -> None:
    """`logits_processor` comes before the search: what it leaves may be closed already, and then the row deletes."""
    script = Script(iter([10, 20, BK, 20, BK, 11, EOS]))
    (trajectory,) = policy.generate([5], search=True, max_new_tokens=4, logits_processor=script).trajectories
    assert trajectory.chosen == (10, 20, BK, BK, EOS)


NEEDS = "`search` needs a model with `bkspc_token_id`, `protect_prompt=True`"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, NEEDS),
        ({"bkspc_token_id": 9, "protect_prompt": False}, NEEDS),
        ({"bkspc_token_id": 9, "hold_back": 2}, NEEDS),
        ({"bkspc_token_id": 9, "do_sample": True, "min_p": 0.0}, "`min_p` must be above 0 and at most 1 with `search`"),
        ({"bkspc_token_id": 9, "backspace_bias": -math.inf}, "`backspace_bias` must not be -inf with `search`"),
    ],
)
def test_custom_generate_refuses_a_search_that_can_not_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama().generate(
            torch.tensor([[5, 6]]), custom_generate=sequencematch.generate, search=True, max_new_tokens=4, **options
        )


def test_custom_generate_searches_as_the_policy_does() -> None:
    """Token 9 of the model is taken for <bkspc>; the policy has the same row behind a vocabulary without that token.

    Sampled searches are compared in exports, where both have <bkspc> in the same place.
    """
    model, policy = llama(), Policy(llama())
    with torch.no_grad():
        policy.backspace.row.copy_(model.get_output_embeddings().weight[9])
    never_nine, deleted = transformers.SuppressTokensLogitsProcessor([9]), 0
    options: dict[str, Any] = {"search": True, "backspace_bias": 3.0, "max_new_tokens": 5}
    theirs = {"custom_generate": sequencematch.generate, "bkspc_token_id": 9, "do_sample": False}
    for prompt in ([5, 6, 7], [20, 21], [11]):
        done = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **theirs, **options)
        (trajectory,) = policy.generate(prompt, logits_processor=never_nine, **options).trajectories
        assert [BK if action == 9 else action for action in done.actions[0]] == list(trajectory.chosen)
        deleted += done.actions[0].count(9)
    assert deleted >= 5
