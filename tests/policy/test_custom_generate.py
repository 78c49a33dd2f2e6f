"""The options of `model.generate` work in an export, and as `custom_generate=sequencematch.generate`, or are refused by name."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import StoppingCriteriaList, StopStringCriteria, TextIteratorStreamer, TextStreamer

import sequencematch
from sequencematch.policy import Policy
from sequencematch.policy.decoding import custom_generate
from tests.policy.tiny_models import character_tokenizer, llama

PROMPT = "the dog sat"
QUESTION = "In base 7, what is 25 + 14? Solution: 5"
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 3, "max_new_tokens": 16, "backspace_bias": 6.0}


@pytest.fixture(scope="module")
def policy() -> Policy:
    made = Policy(llama(), character_tokenizer())
    with torch.no_grad():
        made.backspace.row.copy_(torch.randn(32, generator=torch.Generator().manual_seed(1)) * 0.8)
    return made


@pytest.fixture(scope="module")
def export(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "plain"
    policy.export(folder)
    return folder


@pytest.fixture
def model(export: Path) -> Any:
    """The export, loaded with its own code."""
    return transformers.AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)


@pytest.fixture(scope="module")
def tokenizer(policy: Policy) -> Any:
    return policy.tokenizer


def ids_of(tokenizer: Any, text: str = PROMPT) -> torch.Tensor:
    return torch.tensor(tokenizer([text])["input_ids"])


@pytest.mark.parametrize("hold_back", [None, 0, 2])
def test_an_iterator_streamer_ends_and_gives_the_text(model: Any, tokenizer: Any, hold_back: int | None) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600.0, skip_special_tokens=True)
    ids = ids_of(tokenizer)
    options = SAMPLED | {"hold_back": hold_back}
    thread = threading.Thread(target=lambda: model.generate(ids, streamer=streamer, **options))
    thread.start()
    pieces = list(streamer)
    thread.join()
    whole = model.generate(ids, **options)[0, ids.shape[1] :]
    assert "".join(pieces) == tokenizer.decode(whole, skip_special_tokens=True)
    assert len("".join(pieces)) > 3


def test_a_streamer_gets_tokens_while_the_row_goes_on_if_they_are_held_back_and_all_at_the_end_if_not(
    model: Any, tokenizer: Any
) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list[list[int]] = []
            self.ended = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.calls.append(tokens.flatten().tolist())

        def end(self) -> None:
            self.ended += 1

    counts = {}
    for hold_back in (None, 2):
        recorder, ids = Recorder(), ids_of(tokenizer)
        done = model.generate(ids, streamer=recorder, **(SAMPLED | {"hold_back": hold_back}))
        assert recorder.calls[0] == ids[0].tolist()
        assert [token for call in recorder.calls for token in call] == done[0].tolist()
        assert recorder.ended == 1
        counts[hold_back] = len(recorder.calls)
    assert counts[None] == 2
    assert counts[2] > 4


def test_a_text_streamer_prints_prompt_and_text(model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ids_of(tokenizer)
    done = model.generate(ids, streamer=TextStreamer(tokenizer), **SAMPLED)
    assert capsys.readouterr().out == tokenizer.decode(done[0]) + "\n"


def test_a_streamer_ends_where_generation_fails(model: Any, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=600.0)

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        model.generate(ids_of(tokenizer), streamer=streamer, logits_processor=[broken], **SAMPLED)
    assert "".join(streamer) == PROMPT


@pytest.mark.parametrize("options", [{"protect_prompt": False}, {"num_return_sequences": 2}])
def test_a_streamer_that_would_have_to_take_something_back_is_refused(
    model: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="`text_streamer` needs one row and `protect_prompt=True`"):
        model.generate(ids_of(tokenizer), streamer=TextStreamer(tokenizer), **SAMPLED, **options)


def test_a_function_given_as_custom_generate_takes_a_streamer_by_another_name(policy: Policy, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600.0)
    ids = ids_of(tokenizer)
    options = {"do_sample": False, "max_new_tokens": 6, "custom_generate": sequencematch.generate}
    done = policy.base.generate(ids, text_streamer=streamer, **options)
    assert "".join(streamer) == tokenizer.decode(done[0, ids.shape[1] :])


def test_stop_strings_end_a_row_where_they_stand_in_what_is_left(model: Any, tokenizer: Any) -> None:
    ids, stopped = ids_of(tokenizer), 0
    for seed in range(12):
        options = SAMPLED | {"seed": seed, "suppress_tokens": [0, 1, 2, 3]}  # whose names are text, too
        free = tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])
        stop = free[2:4]
        done = tokenizer.decode(
            model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **options)[0, ids.shape[1] :]
        )
        assert stop not in done[:-1]
        stopped += done.endswith(stop) and len(done) < len(free)
    assert stopped >= 3
    with pytest.raises(ValueError, match="`stop_strings` need a tokenizer"):
        model.generate(ids, stop_strings=["a"], **SAMPLED)
    config = transformers.GenerationConfig(max_new_tokens=8, stop_strings=["a"], do_sample=False, eos_token_id=2)
    model.generate(ids, config, tokenizer=tokenizer)
    assert config.stop_strings == ["a"]


def test_stopping_criteria_see_what_is_left_of_a_row(policy: Policy, tokenizer: Any) -> None:
    ids = ids_of(tokenizer)
    options: dict[str, Any] = SAMPLED | {
        "custom_generate": sequencematch.generate,
        "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, ["a", "e", "o"])]),
        "bkspc_token_id": 9,
        "backspace_bias": 3.0,
        "suppress_tokens": [0, 1, 2, 3],
    }
    rows = (policy.base.generate(ids, **(options | {"seed": seed}))[0, ids.shape[1] :] for seed in range(8))
    texts = [tokenizer.decode(row) for row in rows]
    assert not any(set("aeo") & set(text[:-1]) for text in texts)
    assert sum(text[-1] in "aeo" for text in texts) >= 2


@pytest.mark.parametrize("length", [{"min_new_tokens": 9}, {"min_length": len(PROMPT) + 9}])
def test_a_row_does_not_end_before_its_shortest_length(model: Any, tokenizer: Any, length: dict[str, int]) -> None:
    """In a left-padded batch as well, where a processor of transformers would count the padding."""
    batch = tokenizer([PROMPT, "go"], return_tensors="pt", padding=True)
    width = batch["input_ids"].shape[1]
    assert width == len(PROMPT)
    early = 0
    for seed in range(10):
        options = SAMPLED | {"seed": seed, "backspace_bias": 2.0, "pad_token_id": 0}
        free = model.generate(**batch, **options)[:, width:]
        early += sum(2 in row[:9] for row in free.tolist())
        long = model.generate(**batch, **options, **length)[:, width:]
        assert not any(2 in row[:9] for row in long.tolist())
    assert early >= 2


def test_several_sequences_are_drawn_for_each_prompt(model: Any, tokenizer: Any) -> None:
    batch = tokenizer([PROMPT, "go"], return_tensors="pt", padding=True)
    done = model.generate(**batch, **SAMPLED, num_return_sequences=3)
    assert done.shape[0] == 6
    width = batch["input_ids"].shape[1]
    assert torch.equal(done[:, :width], batch["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in done[:3, width:].tolist()}) == 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    ],
)
def test_what_would_be_ignored_is_refused(model: Any, tokenizer: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` would be ignored by decoding with deletions"):
        model.generate(ids_of(tokenizer), max_new_tokens=4, **options)


def test_embeddings_as_input_are_refused(model: Any, tokenizer: Any) -> None:
    embeds = model.get_input_embeddings()(ids_of(tokenizer))
    with pytest.raises(ValueError, match="`inputs_embeds` would be ignored by decoding with deletions"):
        model.generate(inputs_embeds=embeds, max_new_tokens=4)


def test_the_bundled_models_export_deletes_a_wrong_digit_of_its_prompt(tmp_path: Path) -> None:
    """Handed a wrong digit, the policy writes <bkspc>42; its export wrote nothing, since a prompt was always protected."""
    bundled = Policy.from_pretrained("sequencematch/arithmetic")
    written = bundled.generate(QUESTION, temperature=0.0, max_new_tokens=8)
    assert written.texts == ["42"]
    bundled.export(tmp_path / "plain")
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    inputs = tokenizer(QUESTION, return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "protect_prompt": False}
    done = made.generate(**inputs, **options, return_dict_in_generate=True)
    assert tokenizer.decode(done.sequences[0, width:], skip_special_tokens=True) == "42"
    assert done.prompt_kept.tolist() == [width - 1]
    assert done.actions[0] == list(written.trajectories[0].chosen)
    pipeline = transformers.pipeline("text-generation", model=made, tokenizer=tokenizer)
    assert pipeline(QUESTION, return_full_text=False, **options)[0]["generated_text"] == "42"


@pytest.mark.parametrize("hold_back", [0, 2, 10])
def test_nothing_is_streamed_that_may_still_be_deleted(hold_back: int) -> None:
    class Recorder(list[int]):
        def put(self, tokens: torch.Tensor) -> None:
            self.extend(tokens.flatten().tolist())

    recorder = Recorder()
    streamed = custom_generate._Streamed(recorder, torch.tensor([[1, 2, 3]]), 3, hold_back)
    state = [1, 2, 3]
    for token in range(10, 18):
        state.append(token)
        streamed.update(state)
        assert recorder == state[: max(3, len(state) - hold_back)]


@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids"])
def test_other_inputs_of_a_model_are_refused(policy: Policy, tokenizer: Any, name: str) -> None:
    ids = ids_of(tokenizer)
    config = transformers.GenerationConfig(max_length=20, eos_token_id=2)
    inputs: Any = {name: torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=f"`{name}` would be ignored by decoding with deletions"):
        sequencematch.generate(policy.base, ids, generation_config=config, **inputs)


def test_ends_beyond_the_vocabulary_are_left_out(policy: Policy, tokenizer: Any) -> None:
    options = {"custom_generate": sequencematch.generate, "max_new_tokens": 6, "min_new_tokens": 2, "do_sample": False}
    policy.base.generate(ids_of(tokenizer), eos_token_id=[2, 9999], **options)
    with pytest.raises(ValueError, match="`eos_token_id` must be in the vocabulary of 48 tokens"):
        policy.base.generate(ids_of(tokenizer), eos_token_id=9999, **options)


def test_stop_strings_in_the_models_own_config_are_refused_for_the_true_reason(model: Any, tokenizer: Any) -> None:
    model.generation_config.stop_strings = ["a"]
    with pytest.raises(ValueError, match="`stop_strings` must be passed to `generate`"):
        model.generate(ids_of(tokenizer), tokenizer=tokenizer, **SAMPLED)
