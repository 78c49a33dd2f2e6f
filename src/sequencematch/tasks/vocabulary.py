"""A tokenizer with one token per word, for models that are trained from scratch on a task with few words."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Their ids are 0, 1, 2 and 3.
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def word_tokenizer(words: Iterable[str]) -> "PreTrainedTokenizerFast":
    """Text → `<bos>` and a token for each word between spaces; a word that is not in `words` becomes `<unk>`.

    The tokens of a prompt are a prefix of those of prompt and completion, and decoding joins words with single spaces. Ids
    follow the order of `words`, after the special tokens. A task gives its words: `word_tokenizer(PathStar().words())`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    listed = list(words)
    _check_words(listed)
    ids = {token: number for number, token in enumerate([*SPECIAL, *listed])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    names = {f"{token[1:-1]}_token": token for token in SPECIAL}
    # Cleaning up would drop the space before a full stop, which may be a word.
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **names)


def _check_words(words: list[str]) -> None:
    seen = set(SPECIAL)
    if not words:
        raise ValueError("`words` must hold at least one word. Got none.")
    for word in words:
        if word.split() != [word]:
            raise ValueError(f"`words` must hold words without spaces, none of them empty. Got {word!r}.")
        if word in seen:
            what = "a special token" if word in SPECIAL else "the same word twice"
            raise ValueError(f"`words` must hold each word once, and no special token. Got {what}: {word!r}.")
        seen.add(word)
