"""`sequencematch generate` prints the library's results with visible deletions, and answers bad input with one line."""

import dataclasses
import inspect
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sequencematch import Policy, cli
from sequencematch.cli.generate import generate
from sequencematch.core.mdp import ActionSpace, Trajectory
from sequencematch.policy import Sampling, display, generation
from tests import programs
from tests.cli.program import LETTERS, PROGRAM, check_error, lines_of_json, run

SMALL = ["--max-new-tokens", "6", "--seed", "1"]
ESCAPE = "\x1b["


# Case by hand: what is shown of a trajectory.


def by_hand(prompt: str, actions: str, floor: int = 1) -> Trajectory:
    """A rollout written with one letter per action: `<` deletes and `.` is <eos>."""
    space = ActionSpace(len(LETTERS), eos=1, bos=0)
    ids = {"<": space.bkspc, ".": space.eos} | {letter: i for i, letter in enumerate(LETTERS)}
    return Trajectory.rollout(space, [ids[x] for x in prompt], [ids[x] for x in actions], floor)


def spell(tokens: Any) -> str:
    return "".join(LETTERS[token] for token in tokens)


def struck(prompt: str, trajectory: Trajectory) -> list[tuple[str, str]]:
    """What is shown on a terminal, piece by piece with its style."""
    text = display.struck(prompt, trajectory, spell)
    styles = [str(next((s.style for s in text.spans if s.start <= i < s.end), "")) for i in range(len(text))]
    pieces: list[tuple[str, str]] = []
    for letter, style in zip(text.plain, styles, strict=True):
        if pieces and pieces[-1][1] == style:
            pieces[-1] = pieces[-1][0] + letter, style
        else:
            pieces.append((letter, style))
    return pieces


def test_a_deleted_token_is_struck_and_what_replaced_it_is_green() -> None:
    # ca|ts → c a t, then s goes, then t goes; r stands where t stood, e where s stood, d where nothing did.
    assert struck("ca", by_hand("ca", "ts<<red.")) == [
        ("ca", "dim"),
        ("ts", "red strike"),
        ("re", "green"),
        ("d", ""),
        ("<eos>", "dim"),
    ]


def test_a_token_that_was_written_and_deleted_twice_is_struck_twice() -> None:
    assert struck("c", by_hand("c", "a<b<d.")) == [
        ("c", "dim"),
        ("ab", "red strike"),
        ("d", "green"),
        ("<eos>", "dim"),
    ]


def test_a_deletion_in_the_prompt_is_struck_there_and_one_at_the_floor_is_not_shown() -> None:
    # The floor is one token: the third backspace finds nothing to delete.
    assert struck("cat", by_hand("cat", "<<<o.")) == [
        ("c", "dim"),
        ("at", "red strike"),
        ("o", "green"),
        ("<eos>", "dim"),
    ]
    assert struck("cat", by_hand("cat", "<<<o.", floor=3)) == [("cat", "dim"), ("o", ""), ("<eos>", "dim")]


def test_a_trajectory_that_was_cut_ends_in_an_ellipsis() -> None:
    assert struck("c", by_hand("c", "ar")) == [("c", "dim"), ("a", ""), ("…", "dim")]


def test_plain_text_is_what_the_trajectory_renders() -> None:
    for actions in ("ts<<red.", ".", "<<<", "a<b<c", "cab"):
        trajectory = by_hand("ca", actions)
        assert display.plain(trajectory, spell) == trajectory.render(lambda token: spell([token]))


def test_a_character_of_several_tokens_and_the_space_before_a_word_survive() -> None:
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_byte = Tokenizer(models.BPE(alphabet, []))
    by_byte.pre_tokenizer, by_byte.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁café": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    for backend, text, alone in ((by_byte, " café", False), (words, " café", True)):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        decode = display.decoder(tokenizer)
        ids = tokenizer(text.lstrip() if alone else text)["input_ids"]
        assert decode(ids) == text
        # Control: one by one and on their own they don't read so.
        assert "".join(tokenizer.decode([token]) for token in ids) != text


# Oracle: the library itself.


def test_json_holds_what_generate_returns(folder: Path, policy: Policy) -> None:
    prompts = ["a long prompt", "cat", "a dog", "b"]
    expected = policy.generate(prompts, seed=5, max_actions=12, backspace_bias=2.0)
    assert any(policy.space.bkspc in trajectory.executed for trajectory in expected.trajectories)
    flags = [flag for prompt in prompts for flag in ("--prompt", prompt)]
    flags += ["--seed", "5", "--max-actions", "12", "--backspace-bias", "2"]
    for batch_size in (64, 3, 1):
        result = run("generate", folder, *flags, "--json", "--batch-size", str(batch_size))
        records = lines_of_json(result.stdout)
        assert [record["prompt"] for record in records] == prompts
        for record, text, trajectory, log_probs in zip(
            records, expected.texts, expected.trajectories, expected.log_probs, strict=True
        ):
            assert record["text"] == text
            assert record["actions"] == trajectory.render(lambda token: spell([token]))
            assert tuple(record["chosen"]) == trajectory.chosen
            assert tuple(record["executed"]) == trajectory.executed
            assert record["truncated"] == trajectory.truncated
            # Rounded to four digits.
            assert record["log_probs"] == pytest.approx(log_probs.tolist(), abs=0.51e-4)
            assert set(record) == {"prompt", "text", "actions", "chosen", "executed", "truncated", "log_probs"}


def test_every_flag_reaches_the_sampler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 5, "max_actions": 9, "temperature": 0.7, "seed": 3}
    settings |= {"top_k": 9, "top_p": 0.9, "min_p": 0.02, "backspace_bias": 2.5}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--protect-prompt", "--ban-deleted", "--batch-size", "7"]
    received: list[Any] = []

    def receive(*arguments: Any) -> Iterator[Any]:
        received.extend(arguments[2:])
        return iter(())

    monkeypatch.setattr(generation, "rollouts", receive)
    assert run("generate", folder, "--prompt", "cat", *flags).exit_code == 0
    assert received == [Sampling(**settings, protect_prompt=True, ban_deleted=True), 7]


def test_the_flags_are_the_fields_of_sampling_with_their_defaults_and_help() -> None:
    flags = inspect.signature(generate).parameters
    shown = " ".join(run("generate", "--help").stdout.split())
    for field in dataclasses.fields(Sampling):
        if field.name not in ("stop_tokens", "logits_processor"):  # a list of ids and a function
            assert flags[field.name].default.default == field.default, field.name
            assert field.metadata["help"] in shown, field.name


def test_plain_text_is_the_prompt_and_the_actions(folder: Path, policy: Policy) -> None:
    result = run("generate", folder, "--prompt", "a cat", *SMALL, "--backspace-bias", "2")
    trajectory = policy.generate("a cat", seed=1, max_new_tokens=6, backspace_bias=2.0).trajectories[0]
    assert "<bkspc>" in result.stdout
    assert result.stdout == "a cat" + trajectory.render(lambda token: spell([token])) + "\n"


def test_prompts_come_from_a_file_by_line_or_by_field(folder: Path, tmp_path: Path) -> None:
    flags = run("generate", folder, "--prompt", "cat", "--prompt", "a dog", *SMALL, "--json")
    (tmp_path / "prompts.txt").write_text("cat\n\na dog\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "cat", "id": 1}\n{"prompt": "a dog"}\n\n')
    for name in ("prompts.txt", "prompts.jsonl"):
        result = run("generate", folder, "--prompts-file", tmp_path / name, *SMALL, "--json")
        assert (result.exit_code, result.stdout) == (0, flags.stdout)


def test_prompts_are_read_from_stdin(folder: Path) -> None:
    flags = run("generate", folder, "--prompt", "cat", "--prompt", "a dog", *SMALL, "--json")
    result = run("generate", folder, "--prompts-file", "-", *SMALL, "--json", stdin="cat\n\na dog\n")
    assert (result.exit_code, result.stdout) == (0, flags.stdout)
    empty = run("generate", folder, "--prompts-file", "-", stdin="\n")
    check_error(empty, "`--prompts-file` must not be an empty or blank file. Got -.")


def test_dtype_and_device_reach_the_model(folder: Path) -> None:
    result = run("generate", folder, "--prompt", "cat", *SMALL, "--json", "--dtype", "bfloat16", "--device", "cpu")
    in_bfloat16 = Policy.from_pretrained(folder, dtype="bfloat16").generate("cat", seed=1, max_new_tokens=6)
    log_probs = lines_of_json(result.stdout)[0]["log_probs"]
    assert log_probs == pytest.approx(in_bfloat16.log_probs[0].tolist(), abs=0.51e-4)
    in_float32 = lines_of_json(run("generate", folder, "--prompt", "cat", *SMALL, "--json").stdout)[0]["log_probs"]
    assert log_probs != in_float32


# Terminals.


@pytest.mark.parametrize("prompts", [["--prompt", "cat"], ["--prompt", "cat", "--prompt", "a dog"]])
def test_deletions_are_struck_on_a_terminal_and_named_elsewhere(folder: Path, prompts: list[str]) -> None:
    deleting: list[str | Path] = ["generate", folder, *prompts, *SMALL, "--backspace-bias", "100"]
    shown = run(*deleting, terminal=True).stdout
    assert f"{ESCAPE}9;31mat" in shown  # 9 strikes through, 31 is red
    assert "<bkspc>" not in shown
    piped = run(*deleting).stdout
    assert ESCAPE not in piped
    assert re.match("cat<bkspc><bkspc>[^<]<bkspc>", piped)  # at the first token it has to write
    # Control: where nothing is deleted, nothing is struck.
    writing: list[str | Path] = ["generate", folder, *prompts, *SMALL, "--backspace-bias", "-100"]
    assert f"{ESCAPE}9;31m" not in run(*writing, terminal=True).stdout


def test_json_has_no_colours_on_a_terminal_either(folder: Path) -> None:
    on_terminal = run("generate", folder, "--prompt", "cat", *SMALL, "--json", terminal=True)
    assert on_terminal.stdout == run("generate", folder, "--prompt", "cat", *SMALL, "--json").stdout


def test_a_real_terminal_gets_colours_and_a_bar_on_stderr(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["generate", str(folder), "--prompt", "cat", "--prompt", "a dog", *SMALL, "--backspace-bias", "100"]
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, out_end = pty.openpty()
    err, err_end = pty.openpty()
    termios.tcsetwinsize(err_end, (24, 80))  # a bar needs room
    with ThreadPoolExecutor() as threads:
        reading = threads.map(read_all, (out, err))
        with open(out_end, "w") as stdout, open(err_end, "w") as stderr, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", stderr)
            with pytest.raises(SystemExit) as ended:
                cli.app(command)
        shown, bar = reading
    assert ended.value.code == 0
    assert f"{ESCAPE}2mc{ESCAPE}0m{ESCAPE}9;31mat" in shown
    assert "2/2" in bar
    assert "2/2" not in shown


def read_all(terminal: int) -> str:
    """What was written to a terminal until its other end was closed."""

    def chunks() -> Iterator[bytes]:
        while True:
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # how Linux says that the other end is closed
                return
            if not chunk:
                return
            yield chunk

    text = b"".join(chunks()).decode()
    os.close(terminal)
    return text


# Interruption.


def test_ctrl_c_exits_with_130_and_leaves_whole_lines(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("cat\n" * 2_000)
    command = [*PROGRAM[1:], "generate", str(folder), "--prompts-file", str(tmp_path / "many.txt"), "--json"]
    with programs.Program(*command, *SMALL, "--batch-size", "1") as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")
    records = lines_of_json(first + rest)
    assert 1 <= len(records) < 2_000
    assert records[0]["prompt"] == "cat"


def test_what_ended_before_an_earlier_prompt_is_printed_when_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["--prompt", "cat", "--prompt", "a dog", "--prompt", "b"]
    whole = lines_of_json(run("generate", folder, *prompts, *SMALL, "--json").stdout)
    rollouts = generation.rollouts

    def interrupted(*arguments: Any) -> Iterator[generation.Rollout]:
        yield from (rollout for rollout in rollouts(*arguments) if rollout.row != 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "rollouts", interrupted)
    result = run("generate", folder, *prompts, *SMALL, "--json")
    assert result.exit_code == 130
    assert lines_of_json(result.stdout) == whole[1:]
    assert result.stderr == ""


# Errors.


def test_a_prompt_is_needed_and_comes_from_one_place(folder: Path, tmp_path: Path) -> None:
    check_error(run("generate", folder), "A prompt must be given, with `--prompt` or `--prompts-file`. Got none.")
    (tmp_path / "prompts.txt").write_text("cat\n")
    both = run("generate", folder, "--prompt", "cat", "--prompts-file", tmp_path / "prompts.txt")
    check_error(both, "`--prompt` and `--prompts-file` exclude each other. Got both")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("missing.txt", None, "No such file or directory"),
        ("empty.txt", b"", "must not be an empty or blank file"),
        ("blank.jsonl", b"\n \n", "must not be an empty or blank file"),
        ("latin.txt", b"caf\xe9\n", "in UTF-8"),
        ("broken.jsonl", b'{"prompt": "cat"}\n\n{"prompt": \n', "line 3, column 12: Expecting value"),
        ("list.jsonl", b'["cat"]\n', "line 1 holds something else"),
        ("other.jsonl", b'{"prompt": "cat"}\n{"text": "cat"}\n', "line 2 holds something else"),
        ("number.jsonl", b'{"prompt": 3}\n', "line 1 holds something else"),
    ],
)
def test_a_prompts_file_that_cannot_be_read_is_named(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, text: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    check_error(run("generate", folder, "--prompts-file", tmp_path / name), "`--prompts-file` must", name, text)


@pytest.mark.parametrize("command", ["generate", "export"])
@pytest.mark.parametrize("model", ["./no/such/folder", "nobody/nothing"])
def test_a_model_that_is_nowhere_is_neither_a_folder_nor_a_hub_id(
    command: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network in tests
    rest = ["--prompt", "cat"] if command == "generate" else [str(tmp_path / "out")]
    check_error(run(command, model, *rest), f"Got {model!r}, which is neither a folder nor reachable as a hub id")


def test_a_folder_without_a_model_is_said_to_be_one(tmp_path: Path) -> None:
    check_error(run("generate", tmp_path, "--prompt", "cat"), str(tmp_path), "config.json")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-new-tokens", "0"], "`max_new_tokens` must be a whole number of at least 1. Got 0."),
        (["--max-new-tokens", "1000"], "`prompts` and `max_new_tokens` must fit the model's context of 128 tokens."),
        (["--temperature", "0", "--seed", "1"], "would be ignored at temperature 0"),
        (["--top-k", "0"], "`top_k`"),
        (["--batch-size", "0"], "`--batch-size` must be at least 1. Got 0."),
        (["--device", "abacus"], "`--device` must be a device of this machine. Got 'abacus'"),
    ],
)
def test_a_value_the_library_refuses_is_one_line(folder: Path, flags: list[str], text: str) -> None:
    check_error(run("generate", folder, "--prompt", "cat", "--max-new-tokens", "6", *flags), text)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--beams", "4"], "No such option: --beams"),
        (["--temperature", "hot"], "'--temperature'"),
        (["--dtype", "int3"], "'--dtype'"),
    ],
)
def test_a_flag_that_does_not_exist_or_parse_exits_with_2(folder: Path, flags: list[str], text: str) -> None:
    result = run("generate", folder, "--prompt", "cat", *flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    assert "Traceback" not in result.stderr
