"""The models that come with the package: they load without a network, the base adds in base 10, the other one deletes."""

import json
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from peft import LoraConfig
from typer.testing import CliRunner

from benchmarks.base_model import questions
from sequencematch import cli
from sequencematch.experiments.demo import MISTAKEN
from sequencematch.policy import Policy, storage
from sequencematch.policy.storage import BUNDLED
from sequencematch.tasks import PathStar

BASE, FINE_TUNED, SEARCHING = "sequencematch/arithmetic-base", "sequencematch/arithmetic", "sequencematch/path-star"
ROOT = Path(__file__).parents[2]
#: Right answers of MISTAKEN: 19 + 11 = 30 = 4·7 + 2; 477 − 54 = 423 = 6·64 + 4·8 + 7; 5 − 91 = −86 = −(3·25 + 2·5 + 1);
#: 13 + 6 = 19 = 16 + 2 + 1.
ANSWERS = ("42", "647", "-321", "10011")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Hosts looked up on the network: none. Refusing connections is not enough, since some callers ignore the error."""
    found: list[Any] = []

    def refuse(*arguments: object, **_: object) -> None:
        found.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the hub is asked again after a while
    yield found
    assert found == []


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([[1, 20, 30, 35]])).logits


def in_base(number: int, base: int) -> str:
    digits, rest = "", abs(number)
    while rest or not digits:
        digits, rest = str(rest % base) + digits, rest // base
    return digits if number >= 0 else f"-{digits}"


def carries(a: int, b: int, base: int) -> bool:
    """Whether some pair of digits sums to the base or more. Then the sum is written otherwise than in base 10."""
    return any(a // base**k % base + b // base**k % base >= base for k in range(8))


def final_texts(policy: Policy, prompts: list[str]) -> list[str]:
    """What stands in the end, the prompt included: a policy may delete some of it."""
    tokenizer: Any = policy.tokenizer
    made = policy.generate(prompts, temperature=0, max_new_tokens=16, batch_size=200).trajectories
    return [tokenizer.decode(t.final_state.tokens, skip_special_tokens=True) for t in made]


def share_right(policy: Policy, pairs: list[tuple[str, str]]) -> float:
    texts = final_texts(policy, [prompt for prompt, _ in pairs])
    return sum(text == "".join(pair) for text, pair in zip(texts, pairs, strict=True)) / len(pairs)


def check_names_no_place(folder: Path) -> None:
    """Nothing in a saved folder says where the package lies."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert str(ROOT).encode() not in path.read_bytes(), path.name
        assert str(BUNDLED[BASE].parent).encode() not in path.read_bytes(), path.name


# By hand.


def test_the_fine_tuned_model_deletes_a_wrong_digit_and_keeps_a_right_one() -> None:
    policy, base = Policy.from_pretrained(FINE_TUNED), Policy.from_pretrained(BASE)
    for prompt, answer in zip(MISTAKEN, ANSWERS, strict=True):
        question, digits = prompt.split(" Solution: ")
        _, _, number_base, _, _, left, sign, right = question.replace(",", "").rstrip("?").split()
        a, b = int(left, int(number_base)), int(right, int(number_base))
        assert int(answer, int(number_base)) == (a + b if sign == "+" else a - b)
        assert answer.startswith(digits[:-1])
        assert not answer.startswith(digits)

        (trajectory,) = policy.generate(prompt, temperature=0, max_new_tokens=12).trajectories
        assert trajectory.executed.count(policy.space.bkspc) == 1
        assert trajectory.executed[0] == policy.space.bkspc
        assert final_texts(policy, [prompt]) == [f"{question} Solution: {answer}"]
        # Controls: the digit that belongs there stays, and the base has not learnt to delete.
        righted = f"{question} Solution: {answer[: len(digits)]}"
        (kept,) = policy.generate(righted, temperature=0, max_new_tokens=12).trajectories
        assert policy.space.bkspc not in kept.executed
        (untaught,) = base.generate(prompt, temperature=0, max_new_tokens=12).trajectories
        assert base.space.bkspc not in untaught.executed


def test_the_base_adds_in_base_10_and_writes_the_same_in_any_other() -> None:
    """With a carry a sum in base 7 is written otherwise than one in base 10, so nothing is right by luck."""
    policy = Policy.from_pretrained(BASE)
    assert share_right(policy, list(questions(200, np.random.default_rng(1), held_out=True))) >= 0.98
    drawn = np.random.default_rng(8).integers(0, 7**4, (100, 2)).tolist()
    sums = [(in_base(a, 7), in_base(b, 7), in_base(a + b, 7)) for a, b in drawn if carries(a, b, 7)][:48]
    assert len(sums) == 48
    assert all(int(a, 7) + int(b, 7) == int(c, 7) and int(a) + int(b) != int(c) for a, b, c in sums)
    asked = [f"In base 7, what is {a} + {b}? Solution:" for a, b, _ in sums]
    assert share_right(policy, [(q, f" {c}") for q, (_, _, c) in zip(asked, sums, strict=True)]) < 0.2
    assert share_right(policy, [(q, f" {int(a) + int(b)}") for q, (a, b, _) in zip(asked, sums, strict=True)]) > 0.9


def test_the_search_model_finds_the_way_by_deleting_and_not_without() -> None:
    policy, task = Policy.from_pretrained(SEARCHING), PathStar(test_size=150, seed=1)
    rows = task.test()

    def share(**options: Any) -> float:
        texts = policy.generate([row["prompt"] for row in rows], max_new_tokens=4, batch_size=150, **options).texts
        return sum(task.is_right(text, row) for text, row in zip(texts, rows, strict=True)) / len(rows)

    assert share(search=True) >= 0.97
    assert share(temperature=0, protect_prompt=True) < 0.5  # it deletes, and writes the same again
    assert share(temperature=0, backspace_bias=float("-inf")) < 0.5


@pytest.mark.parametrize("model", [[FINE_TUNED], []], ids=["named", "by default"])
def test_the_command_of_the_documentation_prints_the_deletion(model: list[str]) -> None:
    flags = ["--prompt", MISTAKEN[0], "--temperature", "0"]
    result = CliRunner().invoke(cli.app, ["generate", *model, *flags], env={"FORCE_COLOR": None})
    assert result.stdout == f"{MISTAKEN[0]}<bkspc>42<eos>\n", result.output


# Loading.


@pytest.mark.parametrize("offline", [False, True], ids=["online", "offline"])
@pytest.mark.parametrize("name", [BASE, FINE_TUNED, SEARCHING])
def test_a_bundled_name_loads_in_float32_and_asks_nobody(
    name: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    policy = Policy.from_pretrained(name)
    assert (policy.base.dtype, policy.base.name_or_path) == (torch.float32, name)
    assert policy.tokenizer is not None
    assert storage.load_tokenizer(name, {}) is not None
    mean = policy.unembedding().weight.mean(0)  # an untrained row is the mean of the others
    assert torch.allclose(policy.backspace.row, mean, atol=1e-6) == (name == BASE)


def test_any_other_name_is_looked_for_on_the_hub(asked: list[Any]) -> None:
    """The control: the test above would see a question to the network."""
    with pytest.raises(OSError, match="couldn't connect"):
        Policy.from_pretrained("sequencematch/arithmetic-bass")
    assert asked
    asked.clear()


def test_a_folder_of_the_same_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = (Policy.from_pretrained(name) for name in (BASE, FINE_TUNED))
    other.save_pretrained(tmp_path / BASE)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(Policy.from_pretrained(BASE)), logits(other))
    (tmp_path / BASE / "tokenizer.json").unlink()
    (tmp_path / BASE / "tokenizer_config.json").unlink()
    assert storage.load_tokenizer(BASE, {}) is None  # that folder's, which has none now
    monkeypatch.chdir(tmp_path / "sequencematch")
    assert torch.equal(logits(Policy.from_pretrained(BASE)), logits(base))
    assert not torch.equal(logits(base), logits(other))


# Saving.


def test_an_adapter_remembers_the_name_and_no_place_on_this_machine(tmp_path: Path) -> None:
    """Nor is the hub asked for the base while it is saved. What is loaded and saved again is no different."""
    policy = Policy.from_pretrained(BASE, peft_config=lora())
    for generation in ("first", "second"):
        folder = tmp_path / generation
        policy.save_pretrained(folder)
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == BASE
        check_names_no_place(folder)
        again = Policy.from_pretrained(folder)
        assert again.base.name_or_path == BASE
        assert torch.equal(logits(again), logits(policy))
        assert torch.equal(again.backspace.row, policy.backspace.row)
        policy = again
    assert not torch.equal(logits(policy), logits(Policy.from_pretrained(BASE)))  # the control: it does something


def test_an_adapter_loads_on_a_folder_of_that_name_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Policy.from_pretrained(FINE_TUNED).save_pretrained(tmp_path / BASE)
    monkeypatch.chdir(tmp_path)
    policy = Policy.from_pretrained(BASE, peft_config=lora())
    policy.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(Policy.from_pretrained(tmp_path / "adapter")), logits(policy))
    (tmp_path / BASE).rename(tmp_path / "gone")
    assert not torch.equal(logits(Policy.from_pretrained(tmp_path / "adapter")), logits(policy))


def test_a_whole_model_names_no_place_on_this_machine(tmp_path: Path) -> None:
    for name in (BASE, FINE_TUNED, SEARCHING):
        policy = Policy.from_pretrained(name)
        policy.save_pretrained(tmp_path / name)
        check_names_no_place(tmp_path / name)
        assert torch.equal(logits(Policy.from_pretrained(tmp_path / name)), logits(policy))
    check_names_no_place(BUNDLED[BASE].parent)


# The package.


def test_together_they_have_at_most_ten_megabytes() -> None:
    weights = sorted(BUNDLED[BASE].parent.rglob("*.safetensors"))
    assert {path.parent for path in weights} == set(BUNDLED.values())
    assert len(weights) == 5  # the base, and two models with their <bkspc> rows
    assert 1_000_000 < sum(path.stat().st_size for path in weights) <= 10_000_000


def test_the_wheel_is_built_from_the_folder_they_are_in_and_leaves_out_what_git_ignores() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/sequencematch"], "force-include": {"examples": "sequencematch/examples"}}
    files = [path for folder in BUNDLED.values() for path in folder.iterdir()]
    assert all(path.is_relative_to(ROOT / "src" / "sequencematch") for path in files)
    if not (ROOT / ".git").exists():
        pytest.skip("what is ignored is known in a checkout only")
    ignored = subprocess.run(["git", "check-ignore", *files, "out/x"], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == "out/x\n"  # the control, and none of them
