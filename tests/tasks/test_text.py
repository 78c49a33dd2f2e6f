"""§6.2: documents from files, or from the hub."""

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from sequencematch.data.examples import Reader
from sequencematch.tasks import Text
from tests.policy.tiny_models import character_tokenizer

WIKITEXT = " \n = Ann = \n \n Ann is . \n = = Life = = \n She lived . \n = Bob = \n Bob was . \n"


def words(text: str) -> dict[str, list[str]]:
    """A tokenizer: one token per word."""
    return {"input_ids": text.split()}


def texts(rows: list[dict[str, Any]]) -> list[str]:
    assert all(list(row) == ["text"] for row in rows)
    return [row["text"] for row in rows]


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A file of 50 documents of 1 to 50 words."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join([f"w{i}"] * i), "n": i}) + "\n" for i in range(1, 51)))
    return path


def test_a_text_file_is_one_document_or_begins_one_at_every_separator(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WIKITEXT)
    (tmp_path / "b.txt").write_text("\n Cid \n\n came .\n")
    files: list[str | Path] = [tmp_path / "a.txt", str(tmp_path / "b.txt")]
    whole = Text(files=files, test_files=tmp_path / "b.txt")
    assert texts(whole.train()) == [WIKITEXT.strip()]
    assert texts(whole.test()) == ["Cid \n\n came ."]
    cut = Text(files=tmp_path / "a.txt", test_files=tmp_path / "b.txt", separator="= [^=]+ =")
    assert texts(cut.train()) == ["= Ann = \n \n Ann is . \n = = Life = = \n She lived .", "= Bob = \n Bob was ."]
    blank = Text(files=tmp_path / "b.txt", test_files=tmp_path / "a.txt", separator="")
    assert texts(blank.train()) == ["Cid", "came ."]


def test_a_row_of_json_lines_is_a_document_packed_or_not(tmp_path: Path) -> None:
    lines = '{"text": "é one", "body": "x"}\n\n{"text": " two\\u2028b \\n", "body": "y"}\n{"text": "  ", "body": "z"}\n'
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "test.txt.gz").write_bytes(gzip.compress(b"three"))
    for name in ("a.jsonl", "a.jsonl.gz"):
        task = Text(files=tmp_path / name, test_files=tmp_path / "test.txt.gz")
        assert texts(task.train()) == ["é one", "two\u2028b"]
        assert texts(task.test()) == ["three"]
    assert texts(Text(files=tmp_path / "a.jsonl", test_files=tmp_path / "test.txt.gz", text_field="body").train()) == [
        "x",
        "y",
        "z",
    ]


def test_a_tenth_is_held_out_by_the_seed(many: Path) -> None:
    task = Text(files=many)
    train, test = texts(task.train()), texts(task.test())
    assert (len(train), len(test)) == (45, 5)
    assert set(train).isdisjoint(test)
    assert train == sorted(train, key=len)  # in the order of the file
    assert texts(Text(files=many).test()) == test
    assert texts(Text(files=many, seed=1).test()) != test
    assert len(Text(files=many, test_share=0.5).test()) == 25
    assert len(Text(files=many, test_share=0.999).train()) == 1
    assert len(Text(files=many, test_share=0.001).test()) == 1


def test_documents_of_the_test_are_not_trained_on_wherever_they_are(many: Path, tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("w1\nw2 w2\nnew\nw1")
    task = Text(files=(many, many), test_files=tmp_path / "test.txt", separator=".*")
    assert sorted(texts(task.test())) == ["new", "w1", "w2 w2"]
    assert texts(task.train()) == [" ".join([f"w{i}"] * i) for i in range(3, 51)]


def test_a_tokenizer_leaves_documents_long_enough_for_prompt_and_continuation(many: Path) -> None:
    """Held out are 25 of 1 to 50 words; of these, those of 20 words or more stay, and training doesn't change."""
    task = Text(files=many, test_share=0.5, prompt_length=12, max_new_tokens=8)
    held_out = texts(task.test())
    long = [text for text in held_out if len(text.split()) >= 20]
    assert texts(task.test(words)) == long
    assert 0 < len(long) < 25
    assert (
        texts(Text(files=many, test_share=0.5, prompt_length=12, max_new_tokens=8, test_size=3).test(words)) == long[:3]
    )
    assert task.train(words) == task.train()
    assert Text(files=many, test_size=0).test(words) == []


def test_a_dataset_will_do_for_files() -> None:
    rows = [{"body": f"text {i}"} for i in range(20)]
    for dataset in (rows, datasets.Dataset.from_list(rows)):
        task = Text(dataset=dataset, text_field="body")
        assert sorted(texts(task.train()) + texts(task.test())) == sorted(row["body"] for row in rows)
        assert len(task.test()) == 2


def test_the_hub_is_asked_for_name_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(Text(dataset="some/text").train()) == 1
    assert len(Text(dataset="some/text:raw").train()) == 1
    assert asked == [(("some/text", None), {"split": "train"}), (("some/text", "raw"), {"split": "train"})]


def test_the_papers_lengths_and_sampling_are_the_default(many: Path) -> None:
    task = Text(files=many)
    assert (task.prompt_length, task.max_new_tokens, task.test_size, task.temperature) == (256, 256, 1000, 1.0)


def test_rows_are_read_by_the_trainer(many: Path) -> None:
    tokenizer = character_tokenizer()
    example = Reader(tokenizer, frozenset({tokenizer.eos_token_id}), max_length=16)(Text(files=many).train()[-1])
    assert example.is_text


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    for name, content, message in [
        ("nowhere.txt", None, "`files` must be a file that can be read. Got {path}: No such file or directory."),
        ("empty.txt", b" \n\n", "`files` must not be an empty or blank file. Got {path}."),
        ("a.txt", "é".encode("latin-1"), "`files` must be text in UTF-8. Got {path}: 'utf-8' codec can't decode"),
        ("a.txt.gz", b"plain", "`files` must be a file that can be read. Got {path}: Not a gzipped file"),
        (
            "b.txt.gz",
            gzip.compress(b"cut")[:-9],
            "`files` must be a file that can be read. Got {path}: Compressed file",
        ),
        ("a.parquet", b"", "`files` must be text, or JSON lines in a file that ends in .jsonl. Got {path}."),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text"',
            "`files` must be JSON lines. Got {path}: line 2, column 8: Expecting ':' delim",
        ),
        (
            "b.jsonl",
            b'{"b": 1, "c": 2}',
            "`text_field` must be a field of every row, 'text' here. Got the fields 'b', 'c' in",
        ),
        (
            "c.jsonl",
            b'["text"]',
            "`text_field` must be a field of every row, 'text' here. Got a list in {path}, line 1.",
        ),
        ("d.jsonl", b'{"text": 3}', "`text_field` must be a field that holds text. Got int in {path}, line 1."),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            Text(files=path).train()
        assert message.format(path=path) in str(error.value)
    (tmp_path / "ok.txt").write_text("fine")
    with pytest.raises(
        ValueError, match=r"`test_files` must be a file that can be read. Got .*nowhere.txt: No such file"
    ):
        Text(files=tmp_path / "ok.txt", test_files=tmp_path / "nowhere.txt").test()


def test_wrong_options_are_refused(many: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "`files` or `dataset` must be given, and not both. Got neither."),
        ({"files": many, "dataset": "x"}, "`files` or `dataset` must be given, and not both. Got both."),
        ({"files": many, "test_share": 1.0}, "`test_share` must lie strictly between 0 and 1. Got test_share=1.0."),
        ({"files": many, "test_files": many, "test_share": 0.5}, "`test_share` must be left out where `test_files` is"),
        ({"files": many, "test_size": -1}, "`test_size` must be at least 0. Got test_size=-1."),
        ({"files": many, "prompt_length": 0}, "`prompt_length` must be at least 1. Got prompt_length=0."),
        ({"files": many, "max_new_tokens": 0}, "`max_new_tokens` must be at least 1. Got max_new_tokens=0."),
        ({"files": many, "separator": "("}, "`separator` must be a regular expression. Got '(': missing )"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            Text(**options)


def test_too_little_to_test_on_is_refused(many: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(
        ValueError, match=r"`test_share` needs at least two items to split\. Got 1\. Give `test_files`, or cut text"
    ):
        Text(files=tmp_path / "one.txt").test()
    with pytest.raises(
        ValueError, match=r"must fit some document held out: 512 tokens. Got 5 documents, all of them shor"
    ):
        Text(files=many).test(words)


def test_a_missing_package_or_dataset_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("Dataset 'x' doesn't exist\non the Hub")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda *_: None)
        with pytest.raises(
            ValueError,
            match=r"^`dataset`='x', which is not a file, needs the package datasets: pip install 'sequencematch\[data",
        ):
            Text(dataset="x").train()
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError, match=r"`dataset` must be .* or a dataset on the hub. Got 'x': Dataset 'x' doesn't exist$"
    ):
        Text(dataset="x").train()
