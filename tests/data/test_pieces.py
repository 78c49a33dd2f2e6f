"""All that was written, in pieces that were kept or deleted: by hand, and against a search through the states."""

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.data.pieces import Fate, Piece, as_html, pieces, text_behind
from tests.strategies import SPACE, rollouts

LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
EOS = ("<eos>", "end")


def spell(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


def by_hand(prompt: str, actions: str, floor: int = 1) -> Trajectory:
    """A rollout with one letter per action: `<` deletes and `.` is <eos>."""
    space = ActionSpace(len(LETTERS) + 1, eos=len(LETTERS))
    ids = {"<": space.bkspc, ".": space.eos} | {letter: number for number, letter in enumerate(LETTERS)}
    return Trajectory.rollout(space, [ids[x] for x in prompt], [ids[x] for x in actions], floor)


@pytest.mark.parametrize(
    ("prompt", "actions", "floor", "expected"),
    [
        ("ca", "t.", 1, [("ca", "prompt"), ("t", "kept"), EOS]),
        # t and s are deleted; r stands where t stood, e where s stood, d where nothing did.
        ("ca", "ts<<red.", 1, [("ca", "prompt"), ("ts", "deleted"), ("re", "replacement"), ("d", "kept"), EOS]),
        ("c", "a<b<d.", 1, [("c", "prompt"), ("ab", "deleted"), ("d", "replacement"), EOS]),
        # Into the prompt, down to the floor: the third backspace finds nothing to delete.
        ("cat", "<<<o.", 1, [("c", "prompt"), ("at", "deleted"), ("o", "replacement"), EOS]),
        ("cat", "<<<o.", 3, [("cat", "prompt"), ("o", "kept"), EOS]),
        ("ca", "t\n<.", 1, [("ca", "prompt"), ("t", "kept"), ("\n", "deleted"), EOS]),
        ("c", "at", 1, [("c", "prompt"), ("a", "kept"), ("…", "end")]),  # cut: t is not executed
        ("c", "a<", 1, [("c", "prompt"), ("a", "kept"), ("…", "end")]),
    ],
)
def test_pieces_by_hand(prompt: str, actions: str, floor: int, expected: list[tuple[str, str]]) -> None:
    assert list(pieces(by_hand(prompt, actions, floor), spell, prompt)) == expected


def test_the_prompt_is_shown_as_it_was_typed_and_left_out_where_it_was_not_given() -> None:
    trajectory = by_hand("cat", "<r.")
    deleted_on = [("t", "deleted"), ("r", "replacement"), EOS]
    assert list(pieces(trajectory, spell, "C a t")) == [("C a ", "prompt"), *deleted_on]
    assert list(pieces(trajectory, spell)) == deleted_on


def test_tokens_without_a_text_make_no_piece() -> None:
    def silent(tokens: Sequence[int]) -> str:
        return spell(tokens).replace("x", "")

    assert list(pieces(by_hand("c", "x<a."), silent)) == [("a", "replacement"), EOS]
    assert list(pieces(by_hand("c", "x<a."), spell)) == [("x", "deleted"), ("a", "replacement"), EOS]  # the control


@given(rollouts())
def test_fates_are_those_found_by_searching_all_states(trajectory: Trajectory) -> None:
    """A node of depth d is deleted if the stack is that low again later, and replaces another if it was higher before."""
    depths = [len(state.tokens) for state in trajectory.states()]
    written: list[tuple[int, Fate]] = []
    for depth, token in enumerate(trajectory.initial):
        if min(depths) <= depth:
            written.append((token, "deleted"))
    for step, action in enumerate(trajectory.executed[:-1]):
        if action != SPACE.bkspc:
            is_deleted = min(depths[step + 1 :]) <= depths[step]
            replaces = max(depths[: step + 1]) > depths[step]
            written.append((action, "deleted" if is_deleted else "replacement" if replaces else "kept"))
    runs = [(spell([token for token, _ in run]), fate) for fate, run in groupby(written, key=lambda pair: pair[1])]
    assert list(pieces(trajectory, spell)) == [*runs, ("…" if trajectory.truncated else "<eos>", "end")]


def test_actions_are_replayed_once_and_no_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = by_hand("cat", "s<" * 1000 + ".")
    replays: list[Trajectory] = []
    replay = Trajectory.replay

    def counted(one: Trajectory) -> tuple[list[int], list[int], list[int]]:
        replays.append(one)
        return replay(one)

    monkeypatch.setattr(Trajectory, "replay", counted)
    monkeypatch.delattr(Trajectory, "states")
    assert list(pieces(trajectory, spell, "cat")) == [("cat", "prompt"), ("s" * 1000, "deleted"), EOS]
    assert replays == [trajectory]


def test_html_escapes_every_piece_and_marks_what_was_deleted() -> None:
    found = (Piece("a < b ", "prompt"), Piece("<i>\n", "deleted"), Piece("&", "replacement"), Piece("<eos>", "end"))
    assert as_html(found) == "a &lt; b <del>&lt;i&gt;\n</del>&amp;&lt;eos&gt;"


def test_the_space_before_a_word_survives() -> None:
    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁café": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    assert text_behind(tokenizer.decode, [0], [1]) == " café"
    assert tokenizer.decode([1]) == "café"  # the control: on its own it has none
    assert text_behind(tokenizer.decode, [0, 1], []) == ""
