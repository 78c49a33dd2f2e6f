"""A policy is pushed to a hub, which runs on this machine, and loaded from there, as people do it with the real one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from sequencematch.policy.storage import BUNDLED
from tests.test_architecture import PACKAGE
from tests.training.fake_hub import FakeHub, fake_hub

MISTAKEN = "In base 7, what is 25 + 14? Solution: 5"
#: The first block of docs/hub.md.
DOCUMENTED = re.findall(r"```text\n(.*?)```", (PACKAGE.parents[1] / "docs" / "hub.md").read_text(), flags=re.DOTALL)[0]
SCRIPT = f"""
import json
from sequencematch import SequenceMatchConfig, SequenceMatchTrainer

{DOCUMENTED.replace("out/run/final", "sequencematch/arithmetic")}
printed = {{"policy": policy.push_to_hub("me/again", token="hf_other", commit_message="Again")}}

rows = [{{"prompt": "In base 5, what is 1 + 1? Solution:", "completion": " 2", "noise_tokens": list("01234")}}]
args = SequenceMatchConfig(
    "out/run", objective="bc", max_steps=1, max_length=64, use_cpu=True, save_strategy="no", push_to_hub=True,
    hub_model_id="me/trained", hub_token="hf_secret", learning_rate=1e-9, per_device_train_batch_size=1, disable_tqdm=True
)
trainer = SequenceMatchTrainer("sequencematch/arithmetic", args, train_dataset=rows)
trainer.train()
trainer.save_model()

def answer(name):
    return Policy.from_pretrained(name).generate("{MISTAKEN}", temperature=0, max_new_tokens=8).texts[0]

printed["answers"] = [answer(name) for name in ("me/adds", "me/adds-plain", "me/trained")]
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeHub, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pushed")
    with fake_hub() as hub:
        mine = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(folder / "hf"),
            "HF_TOKEN": "hf_mine",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=folder, env={**os.environ, **mine}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        yield hub, json.loads(done.stdout.splitlines()[-1])


def test_a_pushed_policy_loads_by_its_name_and_deletes(pushed: tuple[FakeHub, dict[str, Any]]) -> None:
    """19 + 11 = 30 = 4·7 + 2: all three delete the 5."""
    hub, printed = pushed
    assert printed["answers"] == ["42"] * 3
    assert printed["policy"].startswith(f"{hub.url}/me/again/commit/")
    assert hub.messages == ["Upload a policy", "Upload a policy", "Again", "Model save"]
    assert hub.visibility == {"me/adds": "private", "me/adds-plain": None, "me/again": None, "me/trained": None}
    assert hub.keys == {"Bearer hf_mine", "Bearer hf_other", "Bearer hf_secret"}


def test_a_push_holds_what_is_saved_and_nothing_else(pushed: tuple[FakeHub, dict[str, Any]]) -> None:
    hub, _ = pushed
    saved = {path.name for path in BUNDLED["sequencematch/arithmetic"].iterdir()} | {"README.md"}
    assert hub.files["me/adds"].keys() == saved
    assert hub.files["me/trained"].keys() == saved | {"sequencematch_run.json"}
    assert "custom_generate/generate.py" in hub.files["me/adds-plain"]
    assert "sequencematch.json" not in hub.files["me/adds-plain"]


def test_the_cards_show_a_deletion_that_was_made(pushed: tuple[FakeHub, dict[str, Any]]) -> None:
    """By default nothing is sampled for a card, so the plain model's shows none. A trained policy's own data give the prompts."""
    hub, _ = pushed
    cards = {name: ModelCard(files["README.md"].decode()) for name, files in hub.files.items()}
    shown = "<pre><b>In base 7, what is 25 + 14? Solution: </b><del>5</del>42&lt;eos&gt;</pre>"
    assert shown in cards["me/adds"].text
    assert 'Policy.from_pretrained("me/adds")' in cards["me/adds"].text
    assert "base_model" not in cards["me/adds"].data.to_dict()  # a bundled model is not on the hub
    assert "## A deletion" not in cards["me/adds-plain"].text
    trained = cards["me/trained"].text
    assert re.search(r"<pre><b>In base 5, what is 1 \+ 1\? Solution:</b><del>[0134]</del> 2&lt;eos&gt;</pre>", trained)
    assert "The last token of the prompt is a mistake, put in by hand." in trained


def test_files_of_a_push_are_written_nowhere_else(pushed: tuple[FakeHub, dict[str, Any]], tmp_path: Path) -> None:
    hub, _ = pushed
    for name, content in hub.files["me/trained"].items():
        (tmp_path / name).write_bytes(content)
    listed = json.loads((tmp_path / "sequencematch.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: len(content) for name, content in hub.files["me/trained"].items() if name in listed
    }
