"""Several tokens may end a sequence, as in chat models: generation stops at each, and data keeps which one it ended in."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from sequencematch.core import ActionSpace, Trajectory, encode, token_noise
from sequencematch.data.examples import Reader
from sequencematch.policy import Policy
from sequencematch.policy.storage import load_ends
from sequencematch.training.collator import Collator
from sequencematch.training.inputs import ends_of
from sequencematch.training.replay import Experience, ReplayBuffer
from tests.policy.tiny_models import character_tokenizer, llama

EOS, OTHER, BOTH = 2, 9, frozenset({2, 9})
SPACE = ActionSpace(48, EOS, bos=1, pad=0, ends=BOTH)


def chat_model(**changes: Any) -> Any:
    model = llama(**changes)
    model.generation_config.eos_token_id = [EOS, OTHER]
    return model


def test_ends_hold_eos_by_default_and_always() -> None:
    assert ActionSpace(48, EOS).ends == {EOS}
    assert ActionSpace(48, EOS, ends=frozenset({OTHER})).ends == BOTH
    assert ActionSpace(48, EOS) == ActionSpace(48, EOS, ends=frozenset({EOS}))
    with pytest.raises(ValueError, match=r"`ends` must be a token id in \[0, vocab_size\). Got ends=48"):
        ActionSpace(48, EOS, ends=frozenset({48}))


def test_a_trajectory_ends_in_one_of_them_and_absorbs_there() -> None:
    ended = Trajectory.rollout(SPACE, (5,), (6, 7, OTHER))
    assert (ended.executed, ended.truncated) == ((6, 7, OTHER), False)
    *states, last = ended.states()
    assert last == ended.final_state
    assert (last.tokens, last.absorbing) == ((5, 6, 7, OTHER), True)
    assert not any(state.absorbing for state in states)
    cut = Trajectory.rollout(SPACE, (5,), (6, 7, 8))
    assert (cut.executed, cut.truncated) == ((6, 7, EOS), True)
    assert cut.truncate(3).executed == (6, EOS)
    for actions in ((6, OTHER, 7), (6, EOS, OTHER)):
        with pytest.raises(ValueError, match=r"`actions` must hold <eos> \(id 2 or 9\) at the end only"):
            Trajectory.rollout(SPACE, (5,), actions)
    with pytest.raises(ValueError, match=r"`completion` must not hold <eos> \(id 2 or 9\)"):
        Trajectory.demonstration(SPACE, (5,), (6, OTHER, 7))
    with pytest.raises(ValueError, match=r"`score_prompt` needs a prompt without <eos> \(id 2 or 9\)"):
        Trajectory.rollout(SPACE, (5, OTHER, 6), (7, EOS)).score_prompt()


def test_each_end_has_the_value_of_its_own_state() -> None:
    policy = Policy(chat_model())
    trajectories = [Trajectory.demonstration(policy.space, (5, 6), (7, 8), end) for end in (EOS, OTHER)]
    scores: Any = policy(encode(trajectories))
    with torch.no_grad():
        for row, end in enumerate((EOS, OTHER)):
            hidden = policy.base.base_model(input_ids=torch.tensor([[5, 6, 7, 8, end]])).last_hidden_state[0, -1]
            expected = policy.action_logits(hidden).logsumexp(-1)
            torch.testing.assert_close(scores.value[row, 3].detach(), expected, atol=1e-4, rtol=0)
    assert abs(float(scores.value[0, 3] - scores.value[1, 3])) > 0.01


def test_noise_is_never_an_end() -> None:
    draw = token_noise(SPACE, exclude_right=False)
    steps = [0] * 20_000
    assert set(draw(steps, steps, torch.Generator().manual_seed(0))) == set(range(48)) - {0, 1, EOS, OTHER}


def test_generation_stops_at_every_end_of_a_chat_model() -> None:
    policy = Policy(chat_model(initializer_range=0.3), character_tokenizer())
    assert policy.space.ends == BOTH
    done = policy.generate([[5 + n] for n in range(40)], max_new_tokens=30, seed=0)
    last = [trajectory.executed[-1] for trajectory in done.trajectories if not trajectory.truncated]
    assert set(last) == BOTH
    assert all(not BOTH & set(trajectory.executed[:-1]) for trajectory in done.trajectories)
    for trajectory in done.trajectories:
        events = list(policy.stream(trajectory.initial, max_new_tokens=4, seed=1))
        assert sum(event.executed in BOTH for event in events) == 1
        assert events[-1].executed in BOTH
    # A single id that differs from the tokenizer's is a default nobody changed.
    assert Policy(llama(eos_token_id=7), character_tokenizer()).space.ends == {EOS}


def test_rows_keep_which_end_they_ended_in_and_chat_rows_are_cut_at_the_first() -> None:
    tokenizer = character_tokenizer()
    read = Reader(tokenizer, BOTH, max_length=64)
    row = {"input_ids": [5, 6, 7, OTHER], "completion_mask": [0, 1, 1, 1]}
    example = read(row)
    assert (example.completion, example.end) == ((6, 7), OTHER)
    assert Collator(SPACE, read).clean(example).chosen == (6, 7, OTHER)
    with pytest.raises(ValueError, match=r"must not hold an end token such as <eos> \(id 9\) inside the learnt part"):
        read({"input_ids": [5, 6, OTHER, 7], "completion_mask": [0, 1, 1, 1]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}f.{% endfor %}"  # f is the other end
    assert tokenizer("f")["input_ids"] == [OTHER]
    turn = read({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]})
    assert (turn.prompt, turn.completion, turn.end) == ((4, 5, OTHER, 31), (6, 7), OTHER)


@pytest.mark.parametrize("is_adapter", [False, True])
def test_ends_are_saved_loaded_and_known_before_a_model_is(tmp_path: Path, is_adapter: bool) -> None:
    base = chat_model()
    base.save_pretrained(tmp_path / "base")
    tokenizer = character_tokenizer()
    model: Any = base
    if is_adapter:
        base.name_or_path = str(tmp_path / "base")
        base.generation_config.eos_token_id = EOS  # as in the stock base of another release
        base.save_pretrained(tmp_path / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        base.generation_config.eos_token_id = [EOS, OTHER]
    policy = Policy(model, tokenizer)
    policy.save_pretrained(tmp_path / "policy")
    assert Policy.from_pretrained(tmp_path / "policy").space.ends == BOTH
    assert load_ends(str(tmp_path / "policy")) == BOTH
    assert ends_of(str(tmp_path / "policy"), tokenizer) == ends_of(policy, None) == ends_of(model, tokenizer) == BOTH
    assert load_ends(str(tmp_path)) == frozenset()


def test_old_buffers_load_and_new_ones_keep_their_ends(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4, 2)
    buffer.add([Experience(Trajectory.rollout(SPACE, (5,), (6, end)), 3) for end in (EOS, OTHER)])
    buffer.save(tmp_path / "buffer")
    loaded = ReplayBuffer(4, 2)
    loaded.load(tmp_path / "buffer", SPACE)
    assert loaded.rollouts == buffer.rollouts
