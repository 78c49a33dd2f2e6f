"""A policy on lm-eval: its numbers are those of `sequencematch evaluate` and of fresh forward passes.

`make test-lm-eval` runs this file. lm-eval does not fit the versions that everything else is tested with.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from sequencematch import Policy
from sequencematch.evaluation import evaluate
from sequencematch.evaluation.harness import PolicyLM, before
from sequencematch.tasks import Rows
from tests.test_architecture import PACKAGE

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{completion.strip()}}"
generation_kwargs: {until: [], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list: [{name: strip, filter: [{function: remove_whitespace}, {function: take_first}]}]
"""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.from_pretrained("sequencematch/arithmetic")


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def in_base(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits or "0"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_benchmark_has_the_accuracy_of_our_own_evaluation(temperature: float, policy: Policy, tmp_path: Path) -> None:
    """At temperature 1 the samples are the same too, because a row's random numbers depend on seed and row alone."""
    rows = []
    for number in range(150):
        base, a, b = 5 + number % 5, 37 * number % 601, 91 * number % 577
        question = f"In base {base}, what is {in_base(a, base)} + {in_base(b, base)}? Solution:"
        rows.append({"prompt": question, "completion": f" {in_base(a + b, base)}"})
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.replace("FILE", str(file)))
    ours = evaluate(
        policy, Rows(file, 24), metrics=["accuracy", "backspace_rate"], progress=False, temperature=temperature
    )
    model = PolicyLM(policy, temperature=temperature)
    found = simple_evaluate(model, tasks=["sums"], task_manager=TaskManager(include_path=str(tmp_path)))
    measured = {measure.name: measure.value for measure in ours.measures}
    assert found["results"]["sums"]["exact_match,strip"] == pytest.approx(measured["accuracy"], abs=1e-12)
    assert 0.5 < measured["accuracy"] < 1  # the control: neither everything nor nothing is right
    assert measured["backspace rate"] > 0


def test_deletions_are_obeyed_and_a_changed_prompt_has_no_answer(policy: Policy) -> None:
    """The policy deletes the 5, which belongs to the prompt; where it can't, it continues."""
    mistaken: tuple[str, dict[str, Any]] = ("In base 7, what is 25 + 14? Solution: 5", {"until": []})
    assert PolicyLM(policy).generate_until([request(*mistaken)], disable_tqdm=True) == [""]
    (kept,) = PolicyLM(policy, protect_prompt=True).generate_until([request(*mistaken)], disable_tqdm=True)
    assert kept.isdigit()


def test_a_text_ends_before_its_first_stop_string(policy: Policy) -> None:
    assert before("a b\nc. d", [".", "\n"]) == "a b"
    assert before("a", ["b"]) == "a"
    asked = "In base 8, what is 735 - 66? Solution:"  # 477 − 54 = 423 = 6·64 + 4·8 + 7
    answers = PolicyLM(policy).generate_until(
        [request(asked, {"until": until}) for until in ([], ["4"], ["47"], "7")], disable_tqdm=True
    )
    assert answers == [" 647", " 6", " 6", " 64"]


def test_nothing_is_written_after_a_stop_string(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 4 and <eos>: the 7 is never chosen."""
    seen: list[Any] = []
    own = Policy.generate

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(own(*args, **options))
        return seen[-1]

    monkeypatch.setattr(Policy, "generate", noted)
    asked = request("In base 8, what is 735 - 66? Solution:", {"until": ["4"]})
    assert PolicyLM(policy).generate_until([asked], disable_tqdm=True) == [" 6"]
    assert len(seen[0].trajectories[0]) == 4


def fresh(policy: Policy, tokens: list[int], *, include_bkspc: bool) -> torch.Tensor:
    """log p of all actions after each token, from a plain forward pass."""
    with torch.no_grad():
        hidden = policy.base.base_model(torch.tensor([tokens])).last_hidden_state[0]
        logits = policy.action_logits(hidden).double()
    return (logits if include_bkspc else logits[:, :-1]).log_softmax(-1)


@pytest.mark.parametrize("include_bkspc", [False, True])
def test_log_likelihoods_are_those_of_forward_passes(include_bkspc: bool, policy: Policy) -> None:
    """Several lengths in one batch, the order of the requests kept; right answers are likeliest, wrong ones aren't."""
    question = "In base 8, what is 735 - 66? Solution:"
    asked = [
        (question, " 647"),
        (question, " 643"),
        ("In base 7, what is 25 + 14? Solution: ", "42"),
        ("", "In base 8"),
    ]
    model = PolicyLM(policy, include_bkspc=include_bkspc, batch_size=3)
    found = model.loglikelihood([request(*pair) for pair in asked], disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(asked, found, strict=True):
        whole = policy.tokenizer(context + continuation)["input_ids"]  # type: ignore[misc]
        start = len(policy.tokenizer(context.rstrip())["input_ids"]) if context else 1  # type: ignore[misc]
        log_probs = fresh(policy, whole, include_bkspc=include_bkspc)[start - 1 : -1]
        chosen = torch.tensor(whole[start:])
        assert score == pytest.approx(
            float(log_probs.gather(1, chosen[:, None]).sum()), abs=1e-3
        )  # float32, ten tokens
        assert is_greedy == bool((log_probs.argmax(-1) == chosen).all())
    assert [is_greedy for _, is_greedy in found] == [True, False, True, False]


def test_leaving_bkspc_out_can_only_raise_a_likelihood(policy: Policy) -> None:
    mistaken = request("In base 8, what is 735 - 66? Solution: 643", "1")
    left_out, kept = (
        PolicyLM(policy, include_bkspc=flag).loglikelihood([mistaken], disable_tqdm=True)[0][0]
        for flag in (False, True)
    )
    assert kept < left_out - 1  # it wants to delete


def test_a_long_text_is_scored_in_windows_that_predict_each_token_once(policy: Policy) -> None:
    """With windows of 8: the first predicts 8 tokens after <bos>; each other one 8 more, after the token before them."""
    text = "In base 8, what is 735 - 66? In base 7, what is 25 + 14?"
    tokens = policy.tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    bos = policy.space.bos
    assert bos is not None
    expected = 0.0
    for first in range(0, len(tokens), 8):
        part = tokens[first : first + 8]
        before_it = [bos] if first == 0 else tokens[max(0, first + len(part) - 9) : first]
        log_probs = fresh(policy, [*before_it, *part], include_bkspc=False)[len(before_it) - 1 : -1]
        expected += float(log_probs.gather(1, torch.tensor(part)[:, None]).sum())
    found = PolicyLM(policy, max_length=8).loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert found == pytest.approx([expected], abs=1e-3)
    (whole,) = PolicyLM(policy).loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert whole != pytest.approx(expected, abs=1e-1)  # the control


def test_what_the_documentation_shows_runs(policy: Policy, tmp_path: Path) -> None:
    """Its Python with the bundled model and its task in place of gsm8k; 4 of the 8 questions are answered right."""
    root = PACKAGE.parents[1]
    python, task = re.findall(r"```text\n(.*?)```", (root / "docs" / "lm_eval.md").read_text(), flags=re.DOTALL)
    (tmp_path / "sums.yaml").write_text(task.replace("examples/", f"{root}/examples/"))
    tasks = f'tasks=["sums"], task_manager=TaskManager(include_path={str(tmp_path)!r})'
    code = python.replace('"out/run/final", search=True', "policy").replace('tasks=["gsm8k"]', tasks)
    names: dict[str, Any] = {"policy": policy, "TaskManager": TaskManager}
    exec(code.replace("simple_evaluate(Pol", "found = simple_evaluate(Pol"), names)
    assert names["found"]["results"]["sums"]["exact_match,strip"] == 0.5


def test_settings_that_would_be_ignored_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"`--model_args` must hold settings of the policy, .* Got 'serach'\."):
        PolicyLM(policy, serach=True)
    with pytest.raises(ValueError, match=r"`--gen_kwargs` must hold settings of the policy, .* Got 'num_beams'\."):
        PolicyLM(policy).generate_until([request("1 + 1", {"num_beams": 4})], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"`max_gen_toks` must leave room for a prompt in 128 tokens\. Got 127\."):
        PolicyLM(policy, max_length=128).generate_until([request("1", {"max_gen_toks": 127})], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"`pretrained` must have a tokenizer"):
        PolicyLM(Policy(policy.model, None))
