"""A model card says what a policy is, what it was made of and how, in a header that the hub reads."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from sequencematch.training import SequenceMatchConfig
from sequencematch.training.card import model_card


def card(base: str = "gpt2", **options: Any) -> ModelCard:
    return ModelCard(model_card(SequenceMatchConfig("out/run", use_cpu=True, **options), base, 7))


def test_the_header_names_library_tags_and_base_model() -> None:
    header = {"base_model": "gpt2", "library_name": "sequencematch", "tags": ["backspace", "bc", "sequencematch"]}
    assert card(objective="bc").data.to_dict() == header | {"pipeline_tag": "text-generation"}


@pytest.mark.parametrize("base", ["", "{folder}"])
def test_a_folder_or_no_name_is_not_named_as_base_model(base: str, tmp_path: Path) -> None:
    unnamed = card(base.format(folder=tmp_path))
    assert "base_model" not in unnamed.data.to_dict()
    assert "\n\nA causal language model fine-tuned with [SequenceMatch]" in unnamed.text
    assert "\n\n`gpt2` fine-tuned with [SequenceMatch]" in card().text


def test_the_text_says_whether_the_policy_deletes() -> None:
    deletes = "objective `{}`: it has a `<bkspc>` action that deletes the last token.\n"
    baseline = "objective `{}`, a baseline of [SequenceMatch](https://arxiv.org/abs/2306.05426) that does not delete.\n"
    for objective in ("sequencematch", "bc", "mle", "unlikelihood"):
        text = card(objective=objective).text.replace("`<bkspc>`\n", "`<bkspc>` ")
        said = [sentence.format(objective) in text for sentence in (deletes, baseline)]
        assert said == [objective in ("sequencematch", "bc"), objective in ("mle", "unlikelihood")]


def test_settings_are_a_table_and_the_snippet_loads_the_repository() -> None:
    text = card(alpha=0.25, learning_rate=1e-3, hub_model_id="me/model").text
    assert "# me/model\n" in text
    assert 'policy = Policy.from_pretrained("me/model")\n' in text
    table = text.split("| setting | value |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert table[0] == "| `objective` | sequencematch |"
    assert "| `alpha` | 0.25 |" in table
    assert table[-2:] == ["| `learning_rate` | 0.001 |", "| `steps` | 7 |"]
    assert text.endswith("    year      = {2024},\n}\n```\n")
