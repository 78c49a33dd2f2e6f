"""A prompt may be text, ids in any container, or a conversation; anything else is refused by its own name."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from sequencematch.data.examples import Reader
from sequencematch.policy import Policy
from tests import programs
from tests.policy.sweep import small_model
from tests.policy.tiny_models import character_tokenizer, llama

OPTIONS: dict[str, Any] = {"seed": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(llama(), character_tokenizer())


@pytest.mark.parametrize(
    "prompt",
    [
        torch.tensor([5, 6, 7]),
        numpy.array([5, 6, 7]),
        numpy.array([5, 6, 7], dtype=numpy.int32),
        (5, 6, 7),
    ],
    ids=["tensor", "array", "int32 array", "tuple"],
)
def test_one_prompt_of_ids_may_be_in_any_container(policy: Policy, prompt: Any) -> None:
    expected = policy.generate([[5, 6, 7]], **OPTIONS).trajectories
    assert policy.generate(prompt, **OPTIONS).trajectories == expected
    assert policy.generate([prompt], **OPTIONS).trajectories == expected
    assert [event.chosen for event in policy.stream(prompt, **OPTIONS)] == list(expected[0].chosen)


@pytest.mark.parametrize("make", [torch.tensor, numpy.array], ids=["tensor", "array"])
def test_the_rows_of_a_matrix_are_prompts(policy: Policy, make: Any) -> None:
    rows = [[5, 6, 7], [8, 9, 10]]
    assert policy.generate(make(rows), **OPTIONS).trajectories == policy.generate(rows, **OPTIONS).trajectories


CONVERSATION = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def test_a_conversation_is_continued_with_the_models_turn() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chats = Policy(llama(), tokenizer)
    ids = tokenizer("u:hi", add_special_tokens=False)["input_ids"] + [2]
    ids += tokenizer(";a:", add_special_tokens=False)["input_ids"]
    one = chats.generate(CONVERSATION, **OPTIONS)
    assert one.trajectories == chats.generate([ids], **OPTIONS).trajectories
    assert one.texts == chats.generate([ids], **OPTIONS).texts
    two = chats.generate([CONVERSATION, [*CONVERSATION, {"role": "assistant", "content": "oh"}]], **OPTIONS)
    assert two.trajectories[0] == one.trajectories[0]
    assert len(two.trajectories[1].initial) > len(ids)
    assert [event.chosen for event in chats.stream(CONVERSATION, **OPTIONS)] == list(one.trajectories[0].chosen)


def test_without_a_template_a_conversation_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match="`messages` need a tokenizer with a chat template"):
        policy.generate(CONVERSATION, **OPTIONS)


def test_a_template_whose_tokens_merge_at_the_boundary_works() -> None:
    """':' and 'b' are one token where they meet: prompt and answer are tokenised separately, as in generation."""
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, ":": 3, ":b": 4}, [(":", "b")]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    assert tokenizer(":a:b")["input_ids"] == [3, 1, 4]
    read = Reader(tokenizer, frozenset({0}), max_length=16)
    example = read({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ba"}]})
    assert (example.prompt, example.completion) == ((3, 1, 3), (2, 1))


_PROMPTS = "`prompts` must be text, token ids, which are whole numbers, or messages. Got "
_TEMPERATURE = "`temperature` must be 0 (greedy), or a number of at least 1e-6. Got "
#: Prompts, options → what is wrong with them. In text: they are tried in a process without the run-time checker of types.
WRONG = {
    "[[1.7]], {}": f"{_PROMPTS}[1.7].",
    "[1.7], {}": f"{_PROMPTS}[1.7].",
    "torch.tensor([1.7]), {}": f"{_PROMPTS}[1.7",
    "[[5]], {'max_new_tokens': 3.0}": "`max_new_tokens` must be a whole number of at least 1. Got 3.0.",
    "[[5]], {'max_new_tokens': None}": "`max_new_tokens` must be a whole number of at least 1. Got None.",
    "{'role': 'user', 'content': 'hi'}, {}": "`prompts` must be text, token ids, or a list of messages.",
    "[[5]], {'max_new_tokens': True}": "`max_new_tokens` must be a whole number of at least 1. Got True.",
    "[[5]], {'min_new_tokens': 5}": "`min_new_tokens` must not exceed `max_new_tokens`. Got 5 and 4.",
    "[[5]], {'temperature': 1e-38}": f"{_TEMPERATURE}1e-38.",
    "[[5]], {'temperature': math.inf}": f"{_TEMPERATURE}inf.",
    "[[5]], {'temperature': 'hot'}": f"{_TEMPERATURE}'hot'.",
    "[[5]], {'backspace_bias': math.inf}": "`backspace_bias` must be a number, or -inf never to delete. Got inf.",
    "[[5]], {'backspace_bias': math.nan}": "`backspace_bias` must be a number, or -inf never to delete. Got nan.",
    "[[5]], {'top_p': math.nan}": "`top_p` must be a share above 0 and at most 1. Got nan.",
    "[[5]], {'top_p': 0}": "`top_p` must be a share above 0 and at most 1. Got 0.",
    "[[5]], {'min_p': 1.5}": "`min_p` must be a share in [0, 1]. Got 1.5.",
    "[[5]], {'top_k': 0}": "`top_k` must be a whole number of at least 1. Got 0.",
    "[[5]], {'seed': 0.5}": "`seed` must be a whole number. Got 0.5.",
    "[[5]], {'hold_back': -1}": "`hold_back` must be a whole number of at least 0. Got -1.",
    "[[5]], {'hold_back': 1, 'self_loops': True}": "`self_loops` must be off with `hold_back`, whose floor moves.",
    "[[5]], {'max_actions': 10**9}": "`max_actions` must leave room in memory for a record of every action.",
}
#: The same for what can be meant, with the ids that it means.
RIGHT = {
    "[torch.tensor(5), torch.tensor(6)], {}": [5, 6],
    "[numpy.int64(5), numpy.int64(6)], {}": [5, 6],
    "[[5, 6]], {'max_new_tokens': numpy.int64(3), 'temperature': numpy.float32(0.5), 'top_p': 1}": [5, 6],
    "[[5, 6]], {'backspace_bias': -math.inf}": [5, 6],
    "[[5, 6]], {'temperature': None}": [5, 6],
}
UNCHECKED = """
import json, math, sys, numpy, torch
from sequencematch.policy import Policy
from tests.policy.tiny_models import llama
policy = Policy(llama())
for text in json.loads(sys.argv[1]):
    prompts, options = eval(text)
    try:
        done = policy.generate(prompts, **({"max_new_tokens": 4} | options))
        print(json.dumps(["ids", list(done.trajectories[0].initial)]))
    except ValueError as error:
        print(json.dumps(["refused", str(error)]))
"""


def test_bad_input_is_refused_by_its_own_name_and_what_can_be_meant_works() -> None:
    run = programs.run("-c", UNCHECKED, json.dumps([*WRONG, *RIGHT]), cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr
    answers = dict(zip([*WRONG, *RIGHT], map(json.loads, run.stdout.splitlines()), strict=True))
    for text, message in WRONG.items():
        assert answers[text][0] == "refused", text
        assert message in answers[text][1]
    assert {text: answers[text] for text in RIGHT} == {text: ["ids", ids] for text, ids in RIGHT.items()}


def test_a_config_without_special_tokens_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("codegen")
    for name in ("pad_token_id", "bos_token_id"):
        vars(model.config).pop(name, None)
        monkeypatch.delattr(type(model.config), name, raising=False)
    assert not hasattr(model.config, "pad_token_id")
    assert (Policy(model).space.bos, Policy(model).space.pad) == (None, None)


def test_bert_is_refused_for_the_true_reason() -> None:
    with pytest.raises(ValueError, match="BertLMHeadModel computes its logits by more than its output layer"):
        Policy(small_model("bert"))
