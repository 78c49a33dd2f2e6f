"""Settings are converted to their types; an error names the file and line."""

from pathlib import Path
from typing import Any, Literal

import pytest

from sequencematch.data.settings import kinds, override, parse_flags, read_yaml, typed

KNOWN: dict[str, Any] = {
    "rate": float,
    "steps": int,
    "packing": bool,
    "name": str,
    "strategy": Literal["no", "steps"],
    "maybe": float | None,
    "modules": str | list[str] | None,
    "peft": dict[str, Any] | None,
    "no_trouble": bool,
    "anything": Any,
}


def file(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> dict[str, Any]:
    return typed(*_swap(read_yaml(file(folder, text))))


def _swap(found: tuple[dict[str, Any], dict[str, str]]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    return found[0], KNOWN, found[1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rate: 1e-4", 1e-4),
        ("rate: '1e-4'", 1e-4),
        ("rate: 1.5e+2", 150.0),
        ("rate: 3", 3.0),
        ("rate: .5", 0.5),
        ("rate: 1_000", 1000.0),
        ("steps: 1e3", 1000),
        ("steps: '12'", 12),
        ("steps: 2.0", 2),
        ("steps: 9007199254740993", 9007199254740993),  # no float is that number
        ("packing: true", True),
        ("packing: yes", True),
        ("packing: Off", False),
        ("name: no", "no"),
        ("name: 7", "7"),
        ("name: 1e3", "1000.0"),
        ("name: 2024-05-01", "2024-05-01"),
        ("strategy: no", "no"),
        ("maybe: null", None),
        ("maybe:", None),
        ("maybe: 2", 2.0),
        ("modules: all-linear", "all-linear"),
        ("modules: [q, v]", ["q", "v"]),
        ("peft: {r: 16, dropout: 1e-1}", {"r": 16, "dropout": 0.1}),
        ("anything: [1, a]", [1, "a"]),
    ],
)
def test_a_value_is_read_as_the_type_of_its_setting(tmp_path: Path, line: str, expected: Any) -> None:
    (value,) = read(tmp_path, line).values()
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate: fast", "`rate` in {path}, line 1, must be a number. Got 'fast'."),
        ("# why\n\nsteps: 1.5", "`steps` in {path}, line 3, must be a whole number. Got 1.5."),
        ("steps: true", "`steps` in {path}, line 1, must be a whole number. Got True."),
        ("steps:", "`steps` in {path}, line 1, must be a whole number. Got nothing."),
        ("packing: 1", "`packing` in {path}, line 1, must be true or false. Got 1."),
        ("packing: maybe", "`packing` in {path}, line 1, must be true or false. Got 'maybe'."),
        ("name: [a]", "`name` in {path}, line 1, must be text. Got ['a']."),
        ("name: true", "`name` in {path}, line 1, must be text. Got True."),
        ("modules: {a: b}", "`modules` in {path}, line 1, must be text or a list. Got {{'a': 'b'}}."),
        ("peft: 16", "`peft` in {path}, line 1, must be a mapping. Got 16."),
        (
            "rate: 1\nstepps: 3",
            "`stepps` in {path}, line 2, is not a setting; did you mean 'steps'? See `sequencematch train --help`.",
        ),
        ("7: 3", "`7` in {path}, line 1, is not a setting. See `sequencematch train --help`."),
        ("rate: 1\nsteps: 3\nrate: 2", "Got `rate` twice, in lines 1 and 3."),
        ("", "{path} must hold settings in YAML, one `name: value` a line. Got nothing."),
        ("# only a comment\n", "Got nothing."),
        ("- rate\n- steps\n", "Got a list."),
        ("rate", "Got a single value."),
        ("rate: 1\nsteps: [1, 2\nname: x", "In line 3, column 5: expected ',' or ']', but got ':'."),
        ("rate: 1\n\tsteps: 2", "In line 2, column 1: found character '\\t' that cannot start any token."),
        ("rate: 1\n---\nrate: 2", "In line 2, column 1: but found another document."),
        ("rate: !!python/name:os.system x", "In line 1, column 7: could not determine a constructor for the tag"),
        ("rate: \x00", "{path} must hold settings in YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the text is compared whole below)
        read(tmp_path, text)
    assert message.format(path=tmp_path / "recipe.yaml") in str(error.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.yaml can't be read: No such file or directory"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.yaml must hold settings in YAML, .* and in UTF-8"):
        read_yaml(tmp_path / "latin.yaml")


def test_flags_may_have_their_value_behind_a_space_or_an_equals_sign_or_be_bare() -> None:
    words = ["--rate", "1e-4", "--steps=12", "--packing", "--maybe", "-1", "--modules", "[q, v]", "--peft.lora-alpha=8"]
    assert dict(parse_flags(words, KNOWN)) == {
        "rate": 1e-4,
        "steps": 12,
        "packing": True,
        "maybe": -1,
        "modules": ["q", "v"],
        "peft.lora_alpha": 8,
    }


def test_a_bare_flag_with_no_in_front_is_false_unless_the_setting_is_called_so() -> None:
    assert dict(parse_flags(["--no-packing", "--no-trouble"], KNOWN)) == {"packing": False, "no_trouble": True}
    assert dict(parse_flags(["--packing", "--packing", "false"], KNOWN)) == {"packing": False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["recipe2.yaml"],
            "'recipe2.yaml' must be a flag, or follow one as in `--learning-rate 1e-4`. It does neither.",
        ),
        (["--packing", "yes", "no"], "'no' must be a flag"),
        (["-rate", "3"], "'-rate' must be a flag"),
        (["--rate"], "`--rate` must have a value. Got none."),
        (["--name", "--packing"], "`--name` must have a value. Got none."),
        (["--modules", "[q"], "`--modules` must have a value that is YAML. Got '[q'."),
    ],
)
def test_flags_that_are_none_or_lack_a_value_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        dict(parse_flags(words, KNOWN))
    assert message in str(error.value)


def test_a_flag_replaces_a_setting_or_a_part_of_one() -> None:
    inside = {"rate": 1, "peft": {"r": 8, "dropout": 0.1}}
    places = {"rate": "here", "peft": "there"}
    settings, where = override(inside, places, {"rate": 2, "peft.r": 16, "steps": 3})
    assert settings == {"rate": 2, "peft": {"r": 16, "dropout": 0.1}, "steps": 3}
    assert where == {"rate": "`--rate`", "peft": "there", "peft.r": "`--peft.r`", "steps": "`--steps`"}
    assert inside == {"rate": 1, "peft": {"r": 8, "dropout": 0.1}}


def test_a_part_of_nothing_makes_a_mapping() -> None:
    assert override({"peft": None}, {"peft": "there"}, {"peft.r": 16})[0] == {"peft": {"r": 16}}
    settings, where = override({}, {}, {"peft.r": 16})
    assert (settings, where["peft"]) == ({"peft": {"r": 16}}, "`--peft.r`")


def test_a_flag_is_named_as_it_was_written_when_it_is_wrong() -> None:
    for flags, message in (
        ({"stepps": 3}, "`--stepps` is not a setting; did you mean 'steps'?"),
        ({"rate": "fast"}, "`--rate` must be a number. Got 'fast'."),
    ):
        settings, places = override({}, {}, flags)
        with pytest.raises(ValueError, match=message):
            typed(settings, KNOWN, places)


def test_kinds_looks_into_unions_lists_and_literals() -> None:
    assert kinds(str | list[str] | None) == [str, list, type(None)]
    assert kinds(Literal["a", "b", False]) == [str, bool]
    assert kinds(dict[str, Any]) == [dict]


def test_aliases_are_refused_with_their_line(tmp_path: Path) -> None:
    """Each line holds the one before nine times: ten lines are a billion numbers."""
    lines = ["a0: &a0 [1, 1, 1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(
        ValueError, match=r"In line 2, column 10: an alias \(\*a0\) is not read here; write the value out"
    ):
        read_yaml(path)
    with pytest.raises(ValueError, match=r"`--peft` must have a value that is YAML\. Got '\[&a 1, \*a\]'"):
        dict(parse_flags(["--peft", "[&a 1, *a]"], {"peft": dict}))
    path.write_text("a: &anchor 1\nb: 2")  # an anchor alone is harmless
    assert read_yaml(path)[0] == {"a": 1, "b": 2}
