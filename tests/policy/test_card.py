"""Model cards show a deletion that was made, or none."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from sequencematch import Policy
from sequencematch.data.pieces import Piece
from sequencematch.policy.card import Deletion, find_deletion
from tests.policy.tiny_models import tiny

MISTAKEN = "In base 7, what is 25 + 14? Solution: 5"


@pytest.fixture(scope="module")
def adds() -> Policy:
    return Policy.from_pretrained("sequencematch/arithmetic")


def test_text_is_escaped_and_a_deletion_struck_out() -> None:
    written = (Piece("1 < 2", "prompt"), Piece(" & *", "deleted"), Piece("3", "replacement"))
    assert "<pre><b>1 &lt; 2</b><del> &amp; *</del>3</pre>" in Deletion(written).markdown()
    assert "put in by hand" in Deletion(written, is_given=True).markdown()
    assert "put in by hand" not in Deletion(written).markdown()


def test_the_shortest_sample_that_deletes_is_shown(adds: Policy) -> None:
    """19 + 11 = 30 = 4·7 + 2. The prompts without a mistake are answered without a deletion."""
    right = ["In base 7, what is 25 + 14? Solution:", "In base 7, what is 25 + 14? Solution: 4"]
    assert find_deletion(adds, right) is None
    assert find_deletion(adds, []) is None
    longer = "In base 5, what is 10 - 331? Solution: 3"  # -321 takes two more actions
    found = find_deletion(adds, [longer, *right, MISTAKEN])
    assert found is not None
    assert "".join(text for text, fate in found.written if fate == "deleted") == "5"
    assert found.written[0].text == "In base 7, what is 25 + 14? Solution: "


def test_a_policy_without_a_tokenizer_has_a_card_without_a_sample(tmp_path: Path) -> None:
    policy = Policy.from_pretrained(tiny("Llama"))
    assert find_deletion(policy, [[2, 3]]) is None
    policy.save_pretrained(tmp_path / "saved")
    card = ModelCard.load(tmp_path / "saved" / "README.md")
    assert card.data.to_dict()["tags"] == ["backspace", "sequencematch"]
    assert "## A deletion" not in card.text


def test_exports_and_saved_policies_show_what_is_deleted_after_their_prompts(adds: Policy, tmp_path: Path) -> None:
    adds.save_pretrained(tmp_path / "saved", prompts=[MISTAKEN])
    adds.export(tmp_path / "plain", prompts=[MISTAKEN])
    for name in ("saved", "plain"):
        text = (tmp_path / name / "README.md").read_text()
        assert "Solution: </b><del>5</del>42&lt;eos&gt;</pre>" in text
        assert f'("{MISTAKEN}"' in text
        Policy.from_pretrained(tmp_path / name)  # the card belongs to no list of files
