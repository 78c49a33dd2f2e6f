"""App. G.2: sentences and their translations."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sequencematch.data.examples import Reader
from sequencematch.tasks import Translation
from sequencematch.tasks.translation import plain_letters
from tests.policy.tiny_models import character_tokenizer


def words(text: str) -> dict[str, list[str]]:
    """A tokenizer: one token per word."""
    return {"input_ids": text.split()}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def files(folder: Path, **changes: Any) -> dict[str, Any]:
    """Two sentences to train on and one to be tested on."""
    return {
        "source": write(folder / "train.en", "a cat", "two dogs"),
        "target": write(folder / "train.fr", "un chat", "deux chiens"),
        "test_source": write(folder / "test.en", "a tree"),
        "test_target": write(folder / "test.fr", "un arbre"),
        **changes,
    }


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Fifty pairs of 1 to 50 words."""
    rows = [{"de": " ".join([f"d{i}"] * i), "en": " ".join([f"e{i}"] * i)} for i in range(1, 51)]
    return write(tmp_path / "many.jsonl", *map(json.dumps, rows))


def test_lines_of_two_files_are_prompt_and_completion(tmp_path: Path) -> None:
    task = Translation(**files(tmp_path))
    assert task.train(words) == [
        {"prompt": "a cat Translation:", "completion": " un chat"},
        {"prompt": "two dogs Translation:", "completion": " deux chiens"},
    ]
    assert task.test(words) == [{"prompt": "a tree Translation:", "completion": " un arbre"}]
    assert task.is_right("un arbre ", task.test(words)[0])
    assert not task.is_right("un chat", task.test(words)[0])


def test_accents_become_plain_letters_and_pairs_with_other_characters_are_left_out(tmp_path: Path) -> None:
    assert plain_letters("L’œuvre d’un élève où ça ? « Là… »") == "L'oeuvre d'un eleve ou ca ? \" La... \""
    given = files(tmp_path)
    write(given["source"], "an oak", "a soup", "an elm")
    write(given["target"], "un chêne là", "un щи", "un\torme")
    assert [row["completion"] for row in Translation(**given).train(words)] == [" un chêne là", " un щи", " un\torme"]
    assert [row["completion"] for row in Translation(**given, plain_letters=True).train(words)] == [" un chene la"]


def test_two_fields_of_json_lines_are_prompt_and_completion(tmp_path: Path) -> None:
    rows = [
        {"en": " a cat", "fr": "un chat\n", "de": "eine Katze"},
        {"en": "a tree", "fr": "un arbre", "de": "ein Baum"},
    ]
    source = write(tmp_path / "pairs.jsonl", *map(json.dumps, rows))
    test = write(tmp_path / "test.jsonl", json.dumps(rows[1]))
    assert Translation(source, test_source=test).train(words) == [
        {"prompt": "a cat Translation:", "completion": " un chat"}
    ]
    other = Translation(source, test_source=test, source_field="fr", target_field="de")
    assert other.test(words) == [{"prompt": "un arbre Translation:", "completion": " ein Baum"}]


def test_only_pairs_shorter_than_the_limit_on_both_sides_are_kept(tmp_path: Path) -> None:
    """Two, three and four words against a limit of three: fewer than three on both sides stay."""
    source = write(tmp_path / "a.en", "one two", "one two b", "one", "one", "one two c")
    target = write(tmp_path / "a.fr", "un deux", "un", "un deux trois", "un", "un deux trois quatre")
    task = Translation(**files(tmp_path, source=source, target=target, max_tokens=3))
    assert [row["completion"] for row in task.train(words)] == [" un deux", " un"]
    unlimited = Translation(**files(tmp_path, source=source, target=target, max_tokens=None))
    assert len(unlimited.train()) == 5


def test_only_a_newline_ends_a_line_and_pairs_with_an_empty_side_are_dropped(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "a\u2028b\x85c", "", "no answer", "d\r")
    target = write(tmp_path / "a.fr", "A", "no question", " ", "D")
    task = Translation(**files(tmp_path, source=source, target=target))
    assert [row["prompt"] for row in task.train(words)] == ["a\u2028b\x85c Translation:", "d Translation:"]


def test_no_sentence_of_the_test_is_trained_on_and_no_pair_occurs_twice(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "a cat", "a tree", "a cat", "a cat")
    target = write(tmp_path / "a.fr", "un chat", "un autre arbre", "un chat", "une chatte")
    task = Translation(**files(tmp_path, source=source, target=target))
    assert [row["completion"] for row in task.train(words)] == [" un chat", " une chatte"]


def test_a_tenth_is_held_out_by_the_seed_whatever_the_tokenizer(many: Path) -> None:
    fields: dict[str, Any] = {"source_field": "de", "target_field": "en"}
    task = Translation(many, max_tokens=None, **fields)
    train, test = task.train(), task.test()
    assert (len(train), len(test)) == (45, 5)
    assert not [row for row in test if row in train]
    assert Translation(many, max_tokens=None, seed=1, **fields).test() != test
    assert Translation(many, max_tokens=None, test_size=2, **fields).test() == test[:2]
    short = Translation(many, max_tokens=30, **fields)
    assert short.test(words) == [row for row in test if len(row["completion"].split()) < 30]
    assert short.train(words) == [row for row in train if len(row["completion"].split()) < 30]


def test_rows_are_read_by_the_trainer(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    read = Reader(tokenizer, frozenset({tokenizer.eos_token_id}), max_length=64)
    row = Translation(**files(tmp_path)).train(tokenizer)[0]
    example = read(row)
    assert tokenizer.decode(example.completion) == " un chat"
    assert tokenizer.decode(example.prompt) == "a cat <unk>ranslation:"


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    paths = files(tmp_path)
    long = write(tmp_path / "long.fr", "un chat", "deux chiens", "")
    empty = write(tmp_path / "empty.fr")
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"target": long},
            "`source` and `target` must have the same number of lines, each the translation of the other. "
            f"Got 2 in {paths['source']} and 3 in {long}.",
        ),
        (
            {"test_target": long},
            "`test_source` and `test_target` must have the same number of lines, each the translation",
        ),
        ({"target": empty}, f"`target` must not be an empty or blank file. Got {empty}."),
        (
            {"source": "nowhere.en"},
            "`source` must be a file that can be read. Got nowhere.en: No such file or directory.",
        ),
        ({"test_source": "nowhere.en"}, "`test_source` must be a file that can be read. Got nowhere.en: No such file"),
        ({"max_tokens": 1}, "`max_tokens` must leave some pairs. Got max_tokens=1, and none shorter."),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Translation(**{**paths, **changes}).train(words)


def test_wrong_fields_are_refused(many: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`target_field` must be .*, 'fr' here. Got the fields 'de', 'en' in .*, line 1\."
    ):
        Translation(many).train(words)
    with pytest.raises(
        ValueError, match=r"`source_field` must be a field of every row, 'it' here. Got the fields 'de'"
    ):
        Translation(many, source_field="it").train(words)
    one = write(tmp_path / "one.jsonl", '{"en": "a", "fr": "b"}')
    with pytest.raises(
        ValueError, match=r"`test_share` needs at least two items to split\. Got 1\. Give `test_source`\."
    ):
        Translation(one).train(words)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    paths = files(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"source": ""}, "`source` must be a file. Got none."),
        ({"target": None}, "`target` must be the file of translations with `source`='"),
        ({"source": "a.jsonl"}, "`target` must be left out with `source`='a.jsonl'. Got "),
        ({"test_target": None}, "`test_target` must be the file of translations with `test_source`='"),
        ({"test_source": None}, "`test_target` needs `test_source`. Got "),
        ({"test_share": 0.5}, "`test_share` must be left out where `test_source` is given. Got test_share=0.5."),
        ({"max_tokens": 0}, "`max_tokens` must be at least 1. Got max_tokens=0."),
        ({"test_size": -1}, "`test_size` must be at least 0. Got test_size=-1."),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Translation(**{**paths, **options})
    with pytest.raises(
        ValueError, match=r"`tokenizer` must be given to count tokens\. Got none; `max_tokens=None` keeps"
    ):
        Translation(**paths).test()
