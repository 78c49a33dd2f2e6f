"""Translation: the prompt is a sentence in one language, the completion its translation   (App. G.2)."""

import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sequencematch.data.rows import ending, read_json_lines, read_lines, text_in
from sequencematch.tasks.splits import check_share, hold_out, shuffle
from sequencematch.tasks.task import Row, Task, check_at_least

Pair = tuple[str, str]  # a sentence and its translation


@dataclass(frozen=True)
class Translation(Task):
    """Sentences and their translations, from two files with aligned lines or from one file of JSON lines.

    A row reads `{sentence} Translation: {translation}`, by analogy with arithmetic: the paper gives no format. Duplicates and
    pairs with an empty side are dropped, and no test sentence is in training. As in the paper, both sides must be shorter than
    `max_tokens`, counted with the tokenizer's special tokens.
    """

    name: ClassVar[str] = "translation"
    metrics: ClassVar[tuple[str, ...]] = ("bleu", "backspace_rate")
    source: str | Path = field(default="", metadata={"help": "A file of sentences, or a .jsonl file of pairs."})
    target: str | Path | None = field(
        default=None, metadata={"help": "The file of their translations; not for .jsonl."}
    )
    test_source: str | Path | None = field(
        default=None, metadata={"help": "Like source. Default: a share is held out."}
    )
    test_target: str | Path | None = field(default=None, metadata={"help": "Like target, for test_source."})
    source_field: str = field(default="en", metadata={"help": "Field of a .jsonl row that holds the sentence."})
    target_field: str = field(default="fr", metadata={"help": "Field of a .jsonl row that holds the translation."})
    max_tokens: int | None = field(
        default=64,
        metadata={"help": "Both sides have fewer tokens than this. None: any length, and no tokenizer needed."},
    )
    plain_letters: bool = field(
        default=False,
        metadata={
            "help": "Write accents as plain letters and leave out pairs with other characters than ASCII's, for models that "
            "know no others."
        },
    )
    test_size: int = field(default=1000, metadata={"help": "Pairs to test on, at most."})
    test_share: float | None = field(default=None, metadata={"help": "Share of pairs held out. Default: 0.1."})
    seed: int = field(default=0, metadata={"help": "Which pairs are held out, and their order."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest translation when tested."})

    def __post_init__(self) -> None:
        """Refuse options that make no sense."""
        if not self.source:
            raise ValueError("`source` must be a file. Got none.")
        _check_files("", self.source, self.target)
        _check_files("test_", self.test_source, self.test_target)
        check_share(self.test_share, self.test_source is not None, "test_source")
        check_at_least(self, {"max_tokens": 1, "test_size": 0, "max_new_tokens": 1})

    def train(self, tokenizer: Any = None) -> list[Row]:
        """All pairs whose sentence is not held out."""
        pairs = self._pairs("", self.source, self.target)
        held_out = {sentence for sentence, _ in self._held_out()}
        return self._rows([pair for pair in pairs if pair[0] not in held_out], tokenizer)

    def test(self, tokenizer: Any = None) -> list[Row]:
        """Pairs held out."""
        return self._rows(self._held_out(), tokenizer)[: self.test_size]

    def _held_out(self) -> list[Pair]:
        if self.test_source is None:
            pairs = self._pairs("", self.source, self.target)
            return hold_out(pairs, self.test_share, self.seed, "Give `test_source`.")
        return shuffle(self._pairs("test_", self.test_source, self.test_target), self.seed)

    def _pairs(self, kind: str, source: str | Path, target: str | Path | None) -> list[Pair]:
        if target is None:
            found = [self._pair(row, f"{source}, line {n}") for n, row in read_json_lines(f"{kind}source", source)]
        else:
            found = _aligned(kind, source, target)
        if self.plain_letters:
            found = [(plain_letters(sentence), plain_letters(other)) for sentence, other in found]
            found = [pair for pair in found if "".join(pair).isascii() and "".join(pair).isprintable()]
        return [(sentence, other) for sentence, other in dict.fromkeys(found) if sentence and other]

    def _pair(self, row: Any, place: str) -> Pair:
        sentence = text_in(row, "source_field", self.source_field, place)
        return sentence.strip(), text_in(row, "target_field", self.target_field, place).strip()

    def _rows(self, pairs: list[Pair], tokenizer: Any) -> list[Row]:
        if self.max_tokens is None:
            return [as_row(pair) for pair in pairs]
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given to count tokens. Got none; `max_tokens=None` keeps any length.")
        short = [pair for pair in pairs if all(len(tokenizer(side)["input_ids"]) < self.max_tokens for side in pair)]
        if not short:
            raise ValueError(f"`max_tokens` must leave some pairs. Got max_tokens={self.max_tokens}, and none shorter.")
        return [as_row(pair) for pair in short]


#: Characters that Unicode does not decompose → how they are written in ASCII.
_IN_ASCII = str.maketrans(
    {"œ": "oe", "Œ": "OE", "æ": "ae", "Æ": "AE", **dict.fromkeys("’‘", "'"), **dict.fromkeys("“”«»", '"')}
)


def plain_letters(text: str) -> str:
    """The text without accents, and with straight quotation marks; characters without a plain form stay as they are."""
    parts = unicodedata.normalize("NFKD", text.translate(_IN_ASCII))
    return "".join(part for part in parts if not unicodedata.combining(part))


def as_row(pair: Pair) -> Row:
    """A pair as a row, with prompt and completion."""
    return {"prompt": f"{pair[0]} Translation:", "completion": f" {pair[1]}"}


def _aligned(kind: str, source: str | Path, target: str | Path) -> list[Pair]:
    sentences, translations = read_lines(f"{kind}source", source), read_lines(f"{kind}target", target)
    if len(sentences) != len(translations):
        raise ValueError(
            f"`{kind}source` and `{kind}target` must have the same number of lines, each the translation of the other. "
            f"Got {len(sentences):,} in {source} and {len(translations):,} in {target}."
        )
    return list(zip(sentences, translations, strict=True))


def _check_files(kind: str, source: str | Path | None, target: str | Path | None) -> None:
    if source is None and target is not None:
        raise ValueError(f"`{kind}target` needs `{kind}source`. Got {target} alone.")
    if source is not None and (ending(source) == ".jsonl") == (target is not None):
        expected = "must be left out" if target is not None else "must be the file of translations"
        raise ValueError(f"`{kind}target` {expected} with `{kind}source`={str(source)!r}. Got {target}.")
