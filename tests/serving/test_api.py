"""The API, asked by the real `openai` client and by plain HTTP."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sequencematch.policy import Policy
from sequencematch.serving.settings import ServerSettings
from tests.policy.tiny_models import character_tokenizer
from tests.serving.rows import policy
from tests.serving.server import CHAT_TEMPLATE, running

TEXT = "the cat "
#: Deletes often: about every third action.
DELETING = {"backspace_bias": 4.0}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running({"tiny": policy(), "other": policy()}, slots=8, chat_template=CHAT_TEMPLATE) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as found:
        yield found


def post(address: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json={"model": "tiny", **body}, timeout=600)


def tokens_of(text: str, *, special: bool = True) -> list[int]:
    tokenizer: Any = policy().tokenizer
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def events(address: str, **body: Any) -> list[dict[str, Any]]:
    """Server-sent events, which must end in [DONE]."""
    *lines, last, _ = post(address, **body).text.split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# The real client


def test_the_client_lists_and_describes_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").owned_by == "sequencematch"


def test_the_client_completes_what_policy_generate_writes(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=TEXT, max_tokens=20, seed=3, temperature=0.8, top_p=0.9, extra_body=DELETING
    )
    wanted = policy().generate(
        TEXT,
        max_new_tokens=20,
        seed=3,
        temperature=0.8,
        top_p=0.9,
        backspace_bias=4.0,
        hold_back=16,
        protect_prompt=True,
    )
    (trajectory,) = wanted.trajectories
    assert answer.choices[0].text == wanted.texts[0] != ""
    assert answer.choices[0].finish_reason == ("length" if trajectory.truncated else "stop")
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    assert (usage["actions"], usage["deletions"]) == (len(trajectory), trajectory.chosen.count(policy().space.bkspc))
    assert usage["deletions"] > 0
    assert usage["prompt_tokens"] == len(trajectory.initial)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_client_chats_by_the_models_template(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=1, extra_body=DELETING)
    options: Any = {"max_new_tokens": 12, "seed": 1, "backspace_bias": 4.0, "hold_back": 16, "protect_prompt": True}
    tokens = tokens_of("system: be kind user: hello assistant:", special=False)
    assert answer.choices[0].message.content == policy().generate(tokens, **options).texts[0]
    assert answer.choices[0].message.role == "assistant"


def test_the_client_streams_the_same_text_and_the_usage_last(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "max_tokens": 30, "seed": 5, "extra_body": {**DELETING, "hold_back": 3}}
    whole = client.completions.create(prompt=TEXT, **options)
    *chunks, last = client.completions.create(
        prompt=TEXT, stream=True, stream_options={"include_usage": True}, **options
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert sum(bool(chunk.choices[0].text) for chunk in chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, **options)
    parts = client.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content


def test_several_choices_are_the_rows_of_one_seed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[TEXT, "a dog"], n=2, max_tokens=8, seed=9)
    rows = [TEXT, TEXT, "a dog", "a dog"]
    wanted = policy().generate(rows, max_new_tokens=8, seed=9, hold_back=16, protect_prompt=True)
    assert [choice.text for choice in answer.choices] == wanted.texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_log_probabilities_are_the_models_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=TEXT, max_tokens=6, temperature=0, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens
    assert found.token_logprobs
    assert found.top_logprobs
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(len(found.tokens))]
    assert "".join(found.tokens) == answer.choices[0].text
    for text, log_prob, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert log_prob == max(likely.values())
        assert text in ("", max(likely, key=likely.__getitem__))  # a special token has a name, but writes nothing
        assert math.fsum(map(math.exp, likely.values())) < 1
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`model` must be one of tiny, other") as missing:
        client.completions.create(model="gpt", prompt=TEXT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="context of 64 tokens"):
        client.completions.create(model="tiny", prompt=TEXT, max_tokens=100)


# Settings


def test_a_stop_string_ends_a_stream_and_a_whole_answer_alike(address: str) -> None:
    whole = post(address, prompt=TEXT, max_tokens=30, seed=2, hold_back=4).json()["choices"][0]["text"]
    stop = whole[3:5]
    cut = post(address, prompt=TEXT, max_tokens=30, seed=2, hold_back=4, stop=[stop, "zzzz"]).json()
    assert cut["choices"][0]["text"] == whole[: whole.find(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    parts = events(address, prompt=TEXT, max_tokens=30, seed=2, hold_back=4, stop=[stop, "zzzz"], stream=True)
    assert "".join(part["choices"][0]["text"] for part in parts) == cut["choices"][0]["text"]


def test_a_prefix_is_text_that_the_model_may_delete(address: str) -> None:
    wrong = tokens_of("zz", special=False)
    options: Any = {"prompt": TEXT, "prefix": wrong, "max_tokens": 6, "stream_actions": True}
    kept = events(address, backspace_bias=-1000, seed=0, **options)
    assert [token["text"] for token in kept[0]["prefix_tokens"]] == ["z", "z"]
    assert kept[-1]["text"].startswith("zz")
    gone = events(address, backspace_bias=1000, ban_deleted=True, max_actions=3, temperature=0, **options)
    actions = [event for event in gone if event["object"] == "action"]
    assert [(event["kind"], event["token"]["text"]) for event in actions[:2]] == [("delete", "z"), ("delete", "z")]
    assert actions[2]["kind"] == "cut"  # the prompt is protected, so a token was chosen, by the last action
    assert gone[-1]["text"] == ""


def test_temperature_0_may_come_with_settings_that_it_ignores(address: str) -> None:
    plain = post(address, prompt=TEXT, temperature=0).json()["choices"]
    assert post(address, prompt=TEXT, temperature=0, seed=4, top_p=0.5, top_k=3).json()["choices"] == plain


def test_prompts_may_be_token_ids(address: str) -> None:
    tokens = tokens_of(TEXT)
    by_ids, by_text = (post(address, prompt=p, seed=1).json()["choices"] for p in (tokens, TEXT))
    assert by_ids == by_text
    assert len(post(address, prompt=[tokens, tokens], seed=1).json()["choices"]) == 2


def test_without_hold_back_nothing_is_final_before_the_end(address: str) -> None:
    assert len(events(address, prompt=TEXT, stream=True, hold_back=None, seed=0, max_tokens=20)) == 1
    assert len(events(address, prompt=TEXT, stream=True, hold_back=0, seed=0, max_tokens=20)) > 1  # the control


def test_a_model_without_a_template_takes_one_message_as_its_prompt() -> None:
    plain = Policy(policy().base, character_tokenizer())
    with running({"plain": plain}, slots=2) as address:
        chat = post(address, "/v1/chat/completions", model="plain", messages=[_user(TEXT)], max_tokens=5, seed=0).json()
        text = post(address, model="plain", prompt=TEXT, max_tokens=5, seed=0).json()
        assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
        refused = post(address, "/v1/chat/completions", model="plain", messages=[_user("a"), _user("b")])
        assert refused.status_code == 400
        assert "plain has no chat template" in refused.json()["error"]["message"]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# stream_actions


def test_stream_actions_sends_every_action_with_what_the_model_said(address: str) -> None:
    options: Any = {"max_tokens": 12, "seed": 4, "backspace_bias": 4.0}
    first, *actions, last = events(address, prompt=TEXT, stream_actions=True, alternatives=3, **options)
    wanted = policy().generate(TEXT, max_new_tokens=12, seed=4, backspace_bias=4.0, protect_prompt=True)
    (trajectory,) = wanted.trajectories
    bkspc, ends = policy().space.bkspc, policy().space.ends
    assert first["object"] == "action.start"
    assert [token["id"] for token in first["prompt_tokens"]] == list(trajectory.initial)
    assert "".join(token["text"] for token in first["prompt_tokens"]) == TEXT
    assert [event["step"] for event in actions] == list(range(len(trajectory)))
    stack: list[str] = []
    for event, chosen, executed, value in zip(
        actions, trajectory.chosen, trajectory.executed, wanted.values[0].tolist(), strict=True
    ):
        cut = chosen != executed
        kind = "cut" if cut else "delete" if chosen == bkspc else "end" if chosen in ends else "write"
        assert (event["object"], event["index"], event["kind"]) == ("action", 0, kind)
        if kind == "write":
            assert event["token"]["id"] == chosen
            stack.append(event["token"]["text"])
        elif kind == "delete":
            assert event["token"]["text"] == stack.pop()
        assert event["value"] == pytest.approx(value, rel=1e-6)  # `generate` returns float32
        likely = event["alternatives"]
        assert len(likely) == 3
        assert sorted((a["prob"] for a in likely), reverse=True) == [a["prob"] for a in likely]
        of_chosen = [a["prob"] for a in likely if a["id"] == chosen]
        assert of_chosen in ([], [event["prob"]])
        of_bkspc = [a["prob"] for a in likely if a["kind"] == "delete"]
        assert of_bkspc in ([], [event["bkspc_prob"]])
    assert "delete" in [event["kind"] for event in actions]
    assert (last["object"], last["text"]) == ("action.end", "".join(stack))
    assert last["text"] == wanted.texts[0]
    assert last["usage"]["actions"] == len(actions)
    assert last["finish_reason"] == ("length" if trajectory.truncated else "stop")


def test_a_search_is_streamed_and_equals_policy_generate(address: str) -> None:
    options: Any = {"prompt": TEXT, "search": True, "max_tokens": 5}
    *_, last = events(address, stream_actions=True, **options)
    wanted = policy().generate(TEXT, search=True, max_new_tokens=5)
    assert last["text"] == wanted.texts[0]
    assert last["usage"]["actions"] == len(wanted.trajectories[0])
    (chunk,) = events(address, stream=True, **options)  # it may delete back to the prompt, so all comes at the end
    assert chunk["choices"][0]["text"] == wanted.texts[0]


# Refusals


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"prompt": TEXT, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": TEXT, "temperature": "warm"}, "temperature", "valid number"),
        ({"prompt": TEXT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": TEXT, "max_tokens": True}, "max_tokens", "valid integer"),
        ({"prompt": TEXT, "top_p": 0}, "top_p", "a share above 0 and at most 1"),
        ({"prompt": TEXT, "n": 17}, "n", "at most 16"),
        ({"prompt": TEXT, "stop": ["a"] * 5}, "stop", "at most 4 strings"),
        ({"prompt": TEXT, "stop": ""}, "stop", "of 1 to 256 characters"),
        ({"prompt": TEXT, "search": True, "hold_back": 2}, "hold_back", "must be left out with `search`"),
        ({"prompt": TEXT, "search": True, "protect_prompt": False}, "protect_prompt", "must not be false"),
        ({"prompt": TEXT, "max_tokens": 2, "min_tokens": 3}, "min_tokens", "must not exceed `max_tokens`"),
        ({"prompt": TEXT, "alternatives": 2}, "alternatives", "ignored without `stream_actions`"),
        ({"prompt": TEXT, "stream_options": {}}, "stream_options", "ignored without `stream`"),
        ({"prompt": TEXT, "prefix": [999]}, "prompt", "token ids in [0, 48)"),
        ({"prompt": TEXT, "prefix": [5] * 9, "max_tokens": 8}, "prefix", "must not be longer than `max_tokens`"),
        ({"prompt": [TEXT, TEXT], "stream_actions": True}, "stream_actions", "one prompt"),
        ({"prompt": TEXT, "presence_penalty": 1}, "presence_penalty", "less than or equal to 0"),
        ({"prompt": TEXT, "echo": True}, "echo", "False"),
        ({"prompt": TEXT, "tmperature": 1}, "tmperature", "is not a setting of this server"),
        ({"prompt": [48]}, "prompt", "token ids in [0, 48)"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": "a" * 80}, "prompt", "context of 64 tokens"),
        ({}, "prompt", "Field required"),
    ],
)
def test_a_wrong_field_is_answered_with_its_name_and_the_rule(
    address: str, body: dict[str, Any], param: str, text: str
) -> None:
    answer = post(address, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert text in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/none", 404),
        ("POST", "/v1/none", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/", 405),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_a_wrong_path_or_method_is_answered_with_an_error_object(
    address: str, method: str, path: str, status: int
) -> None:
    answer = httpx.request(method, f"{address}{path}")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


# Beside the API


def test_health_readiness_metrics_and_examples(address: str) -> None:
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert httpx.get(f"{address}/ready").json() == {"status": "ready"}
    before = _metrics(address)
    post(address, prompt=TEXT, max_tokens=9, seed=1, backspace_bias=9.0, stream=True, hold_back=2)
    after = _metrics(address)
    for name in ("actions_total", "deletions_total", "forward_passes_total"):
        assert after[f'sequencematch_{name}{{model="tiny"}}'] > before[f'sequencematch_{name}{{model="tiny"}}'], name
    assert after["sequencematch_hold_back_seconds_count"] > before["sequencematch_hold_back_seconds_count"]
    assert after['sequencematch_slots{model="tiny"}'] == 8
    assert [e["prompt"] for e in httpx.get(f"{address}/v1/examples").json()["data"]]


def _metrics(address: str) -> dict[str, float]:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_browsers_are_told_to_run_nothing_from_elsewhere(address: str) -> None:
    for path in ("/", "/v1/models", "/none"):
        headers = httpx.get(f"{address}{path}").headers
        assert headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_examples_of_the_bundled_models_suit_them() -> None:
    served = {name: Policy.from_pretrained(f"sequencematch/{name}") for name in ("path-star", "arithmetic")}
    with running(served, ServerSettings(search=True), slots=2) as address:
        graphs = httpx.get(f"{address}/v1/examples", params={"model": "path-star"}).json()["data"]
        assert len(graphs) == 6
        for example in graphs:
            star = example["star"]
            assert any(arm[-1] == star["goal"] for arm in star["arms"])
            answer = post(address, model="path-star", prompt=example["prompt"], max_tokens=4).json()["choices"][0]
            assert answer["text"].split()[-1] == star["goal"]
            right = next(arm for arm in star["arms"] if arm[-1] == star["goal"])
            assert answer["text"].split() == right
        other = httpx.get(f"{address}/v1/examples", params={"model": "path-star", "seed": 1}).json()["data"]
        assert other != graphs
        sums = httpx.get(f"{address}/v1/examples", params={"model": "arithmetic"}).json()["data"]
        assert all(example["prompt"].endswith("Solution:") for example in sums)
