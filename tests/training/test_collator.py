"""Data trajectories: noise is a function of row and epoch, what is too long is cut; every kind of dataset trains."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sequencematch.core.mdp import ActionSpace
from sequencematch.data.examples import Example, Reader
from sequencematch.training.collator import Collator
from sequencematch.training.rollouts import prompt_of
from tests.data.test_examples import EOS, Stream, ids, read
from tests.training.tiny_run import rows, trainer

SPACE = ActionSpace(vocab_size=48, eos=EOS, bos=1, pad=0)
LONG = Reader(None, frozenset({EOS}), max_length=128)


def test_what_is_too_long_is_cut_where_that_is_asked_for_and_ends_in_a_forced_eos() -> None:
    collate = Collator(SPACE, Reader(None, frozenset({EOS}), max_length=5))
    text = collate.trajectory(read({"text": "abcdefgh"}, max_length=5))
    assert (text.initial, text.chosen) == (ids("a"), ids("bcde"))
    assert text.executed == (*ids("bcd"), EOS)  # the last action is kept and not executed
    assert text.truncated
    pair = read({"prompt": "ab", "completion": "cdefgh"}, max_length=5, truncation=True)
    assert collate.trajectory(pair).executed == (*ids("cd"), EOS)
    whole = collate.trajectory(read({"text": "abcd"}, max_length=5))
    assert not whole.truncated
    with pytest.raises(ValueError, match="must fit `max_length`=5"):
        read({"text": "abcdefgh"}, max_length=5, truncation=False)


def test_noise_is_a_function_of_seed_epoch_and_row() -> None:
    example = Example(ids("c"), ids("at on a mat in a house by the sea"), is_text=False, index=3)
    collate = Collator(SPACE, LONG, seed=1, noise_rate=0.5)
    variants = {
        "same": (collate, example),
        "epoch": (collate, Example(**{**vars(example), "epoch": 1})),
        "row": (collate, Example(**{**vars(example), "index": 4})),
        "seed": (Collator(SPACE, LONG, seed=2, noise_rate=0.5), example),
    }
    first = collate.trajectory(example)
    torch.manual_seed(123)  # nothing global takes part
    drawn = {name: make.trajectory(row) for name, (make, row) in variants.items()}
    assert drawn.pop("same") == first
    assert all(other != first for other in drawn.values())
    assert all(t.final_state == collate.clean(example).final_state for t in drawn.values())


def test_noise_comes_from_the_examples_own_tokens() -> None:
    own = ids("01")
    example = Example(ids("c"), ids("at on a mat in a house"), is_text=False, noise_tokens=own)
    noised = Collator(SPACE, LONG, noise_rate=1.0).trajectory(example)
    wrong = {e for a, e in zip(noised.chosen, noised.executed, strict=True) if a != e}
    assert wrong == set(own)


def test_noise_comes_from_the_list_of_its_own_step() -> None:
    """0 or 1 for the first token, 2 or 3 for the second and before <eos>. The control draws each of them everywhere."""
    row = {"prompt": "c", "completion": "at", "noise_tokens": [["0", "1"], ["2", "3"]]}
    collate = Collator(SPACE, LONG, noise_rate=1.0)
    for column, expected in ((row["noise_tokens"], ("01", "23", "23")), (["0", "1", "2", "3"], ("0123",) * 3)):
        example = read({**row, "noise_tokens": column}, needs_noise=True)
        runs = [collate.trajectory(replace(example, index=i)).executed for i in range(100)]
        assert [{run[place] for run in runs} for place in (0, 3, 6)] == [set(ids(tokens)) for tokens in expected]


def test_half_of_the_bursts_end_in_the_examples_own_ends() -> None:
    """Bursts of 0 and 1 that end in 2 half of the time; in the control without ends never."""
    row = {"prompt": "c", "completion": "at on a mat", "noise_tokens": ["0", "1"], "noise_ends": ["2"]}
    example = read(row, needs_noise=True)
    collate = Collator(SPACE, replace(LONG, max_length=512), noise_rate=1.0, noise_burst=3)
    runs = [collate.trajectory(replace(example, index=i)).executed for i in range(100)]
    pushed = [token for run in runs for token, after in itertools.pairwise(run) if after == SPACE.bkspc != token]
    assert len(pushed) == 1200  # the last tokens of the bursts: 12 in each
    assert abs(pushed.count(*ids("2")) - 600) < 5 * math.sqrt(1200 / 4)
    control = collate.trajectory(replace(example, noise_ends=()))
    assert not set(ids("2")) & set(control.executed)


def test_with_the_whole_sequence_scored_noise_stays_out_of_the_prompt() -> None:
    example = Example(ids("abcdef"), ids("gh"), is_text=False)
    scored = Collator(SPACE, replace(LONG, scores_prompt=True), noise_rate=1.0).trajectory(example)
    assert scored.initial == ids("a")
    assert scored.chosen[:5] == scored.executed[:5] == ids("bcdef")
    assert scored.executed.count(SPACE.bkspc) == 3


def test_a_rollout_of_plain_text_starts_from_a_prefix_of_random_length() -> None:
    text = Example(ids("a"), ids("bcdefghij"), is_text=True)
    lengths = {len(prompt_of(text, number, 0, 4)) for number in range(200)}
    assert lengths == {1, 2, 3, 4}
    assert prompt_of(text, 5, 0, 4) == ids("abcdefghij")[: len(prompt_of(text, 5, 0, 4))]
    assert prompt_of(Example(ids("abc"), ids("d"), is_text=False), 0, 0, 1) == ids("abc")  # a question stays whole


@pytest.mark.parametrize("kind", ["list", "stream", "datasets-like", "text", "tokens"])
def test_every_kind_of_dataset_trains(kind: str, tmp_path: Path) -> None:
    class Columns:
        """Rows by number, like `datasets.Dataset`, and not a list."""

        def __len__(self) -> int:
            return len(rows())

        def __getitem__(self, index: int) -> dict[str, str]:
            return rows()[index]

    made: dict[str, Any] = {
        "list": rows(),
        "stream": Stream(),
        "datasets-like": Columns(),
        "text": [{"text": row["prompt"] + row["completion"]} for row in rows()],
        "tokens": [{"input_ids": list(ids(row["prompt"] + row["completion"]))} for row in rows()],
    }
    run = trainer(tmp_path, dataset=made[kind], max_steps=6)
    run.train()
    assert run.state.global_step == 6
    assert run.on_policy.buffer.made >= 8
    trajectories = [experience.trajectory for experience in run.on_policy.buffer.rollouts]
    assert all(len(t.initial) == 1 for t in trajectories)
    # A prefix of plain text counts as decisions that the policy did not choose.
    assert all(all(t.policy_chosen) for t in trajectories) == (kind in ("list", "stream", "datasets-like"))
    assert all(t.policy_chosen[-1] for t in trajectories)


def test_streaming_a_second_time_draws_other_noise(tmp_path: Path) -> None:
    """Twelve rows in batches of four are three steps a pass."""
    run = trainer(tmp_path, dataset=Stream(), max_steps=6, noise_rate=0.5, objective="bc")
    seen: list[Any] = []
    make = run._data

    def record(batch: dict[str, Any]) -> Any:
        seen.append((batch["examples"], make(batch)))
        return seen[-1][1]

    run._data = record  # type: ignore[method-assign]
    run.train()
    passes = [[t for _, batch in seen[start : start + 3] for t in batch] for start in (0, 3)]
    assert [e.epoch for examples, _ in seen for e in examples] == [0] * 12 + [1] * 12
    assert [t.final_state for t in passes[0]] == [t.final_state for t in passes[1]]
    assert passes[0] != passes[1]


def test_an_id_that_the_model_does_not_have_is_named_with_its_row(tmp_path: Path) -> None:
    """48 is `<bkspc>` here, and the id of a token that was added to a tokenizer without growing the model."""
    for wrong in (48, 60):
        rows_with_it = [{"input_ids": [5, 6]}, {"input_ids": [5, wrong, 6]}]
        run = trainer(tmp_path / str(wrong), dataset=rows_with_it)
        with pytest.raises(ValueError, match=r"Row 1 of the dataset does not fit the model. `completion` must"):
            run.train()


def test_noise_that_would_cut_an_answer_is_left_out_and_a_text_is_cut() -> None:
    fits = Reader(None, frozenset({EOS}), max_length=8)
    answer, text = (Example(ids("a"), ids("bcdefg"), is_text=kind) for kind in (False, True))
    kept = [Collator(SPACE, fits, noise_rate=0.3).trajectory(replace(answer, index=i)) for i in range(50)]
    assert not any(t.truncated for t in kept)
    assert {t.num_nodes for t in kept} == {8}
    cut = [Collator(SPACE, fits, noise_rate=0.3).trajectory(replace(text, index=i)) for i in range(50)]
    assert any(t.truncated for t in cut)


def test_the_last_batches_of_a_stream_that_make_no_step_leave_no_gradient(tmp_path: Path) -> None:
    """Twelve rows in batches of four, two to a step: one is left over in every pass."""
    run = trainer(tmp_path, dataset=Stream(), max_steps=4, gradient_accumulation_steps=2, objective="mle")
    batches: list[int] = []
    step = run.training_step

    def count(*arguments: Any, **options: Any) -> Any:
        batches.append(run.state.global_step)
        return step(*arguments, **options)

    run.training_step = count  # type: ignore[method-assign]
    run.train()
    assert batches == [0, 0, 1, 1, 2, 2, 3, 3]
