"""No model is accepted and silently wrong: long windows, position schemes that change with a batch, masks thrown away."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sequencematch
from sequencematch.core import Trajectory, encode
from sequencematch.policy import Policy
from sequencematch.policy.attention import max_positions, refuse_what_cannot_delete
from sequencematch.policy.decoding.cache import StackCache
from sequencematch.policy.verdicts import WINDOWED
from tests.policy.sweep import DOCUMENT, TYPES, VERDICTS, Verdict, fresh, listing, small_model, table, try_type
from tests.policy.tiny_models import llama

#: Tried again in every run: windows in one mask and in a dictionary of masks, experts, positions in tables, multimodal configs,
#: and refusals of every kind.
SAMPLE = (
    "mistral",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "opt",
    "gpt_neo",
    "moshi",
    "modernbert-decoder",
    "bart",
    "rwkv",
)
ROWS = dict(re.findall(r"^\| (\S+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE))


def test_the_documentation_has_a_verdict_for_every_type_and_the_list_is_its_exact_ones() -> None:
    is_same_release = f"transformers {transformers.__version__} registers" in DOCUMENT.read_text()
    assert set(ROWS) - {"type"} == set(TYPES) or not is_same_release
    assert {name for name, says in ROWS.items() if says == "exact, with windows"} == WINDOWED
    assert VERDICTS.read_text() == listing({name: Verdict("exact", windowed=True) for name in sorted(WINDOWED)})
    assert sum(says.startswith("exact") for says in ROWS.values()) > 100


@pytest.mark.parametrize("name", SAMPLE)
def test_what_the_documentation_says_of_a_type_is_so(name: str) -> None:
    row = table({name: try_type(name)}).splitlines()[-1]
    assert row == f"| {name} | {ROWS[name]} |"


def test_with_a_window_one_token_off_the_comparison_fails() -> None:
    """Negative control: the rows are longer than the windows, and what lies just outside matters."""
    policy = Policy(small_model("mistral"))
    trajectory = Trajectory.demonstration(policy.space, range(5, 15), range(20, 50))
    hidden = {}
    for window in (24, 25):
        policy.base.config.sliding_window = window
        encoding = encode([trajectory])
        with torch.no_grad():
            hidden[window] = policy.encoded_hidden_states(encoding, encoding.visit[0])
    policy.base.config.sliding_window = 24
    states = [state.tokens for state in trajectory.states()]
    for window, is_right in ((24, True), (25, False)):
        error = float((policy.action_logits(hidden[window][20])[:-1] - fresh(policy, states[20])).norm())
        assert (error < 1e-3) == is_right


class Unlisted(transformers.MistralConfig):
    """A type of model that nobody has tried."""

    model_type = "unlisted"


@pytest.mark.parametrize("window", [4, 4096])
def test_a_window_of_a_type_that_nobody_has_tried_is_refused(window: int) -> None:
    model = small_model("mistral", sliding_window=window)
    model.config.__class__ = Unlisted
    with pytest.raises(ValueError, match=rf"has a window, `sliding_window`={window}, which loading can't test"):
        Policy(model)
    model.config.sliding_window = None
    Policy(model)  # without one the probe sees all there is


def test_gpt_neo_is_refused_at_its_default_window_in_both_ways_to_decode() -> None:
    model = small_model("gpt_neo", window_size=256)
    for load in (Policy, _generate):
        with pytest.raises(ValueError, match="GPTNeoForCausalLM has a window, `window_size`=256"):
            load(model)


def _generate(model: Any) -> Tensor:
    options = {"max_new_tokens": 4, "do_sample": False, "bkspc_token_id": 9}
    return model.generate(torch.tensor([[5, 6, 7]]), custom_generate=sequencematch.generate, **options)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rwkv", "carries a recurrent state"),
        ("recurrent_gemma", "carries a recurrent state"),
        ("modernbert-decoder", "has a window, `local_attention`"),
        ("bert", "computes its logits by more than its output layer"),
        ("mpt", "uses ALiBi"),
    ],
)
def test_as_custom_generate_a_model_that_can_not_delete_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _generate(small_model(name))


def test_as_custom_generate_a_model_is_probed_once() -> None:
    model, calls = small_model("llama"), list[int]()
    hook = model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    _generate(model)
    first = len(calls)
    _generate(model)
    hook.remove()
    assert first > len(calls) - first + 5


def test_the_probe_tries_the_decoder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that keeps a deleted token's keys where the next one should be written is not noticed by an encoded pass."""
    write: Callable[..., None] = StackCache.write

    def keeps_the_first(self: StackCache, stored: Any, new: Any) -> None:
        was_written = [bool(part[self.row, :, self.column].any()) for part in stored]
        if not all(was_written):
            write(self, stored, new)

    model = llama()
    monkeypatch.setattr(StackCache, "write", keeps_the_first)
    with pytest.raises(
        ValueError, match="has other logits when it decodes with deletions than in a plain forward pass"
    ):
        Policy(model)


# Position schemes that look at the whole batch


def longrope(**changes: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors, **changes}


SCHEMES: dict[str, tuple[dict[str, Any], int]] = {
    "longrope": (longrope(), 32),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 128),
    "yarn": ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}, 128),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 128),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_up_to_the_context_a_batch_is_decoded_as_its_rows_are_alone(name: str) -> None:
    parameters, context = SCHEMES[name]
    policy = Policy(small_model("llama", rope_parameters=parameters))
    assert policy.max_positions == context
    prompts = [[5 + n for n in range(context - 12)], [7, 8]]
    done = policy.generate(prompts, max_new_tokens=11, seed=0)
    for trajectory, log_probs in zip(done.trajectories, done.log_probs, strict=True):
        for step, state in list(enumerate(trajectory.states()))[:-1]:
            offered = fresh(policy, state.tokens)
            expected = float(offered.log_softmax(-1)[trajectory.chosen[step]])
            assert abs(float(log_probs[step]) - expected) < 0.02  # <bkspc> is left out here: below 1/160
    with pytest.raises(ValueError, match=f"must fit the model's context of {context} tokens"):
        policy.generate(prompts, max_new_tokens=12)


def test_past_its_original_length_longrope_would_be_wrong() -> None:
    """Negative control: what was written before is turned by other angles then."""
    policy = Policy(small_model("llama", rope_parameters=longrope()))
    policy.base.config.rope_parameters["original_max_position_embeddings"] = 128  # as nobody should
    done = policy.generate([[5 + n for n in range(28)]], max_new_tokens=8, seed=0, min_new_tokens=8)
    policy.base.config.rope_parameters["original_max_position_embeddings"] = 32
    (trajectory,), (log_probs,) = done.trajectories, done.log_probs
    states = list(trajectory.states())
    errors = [
        abs(float(log_probs[step]) - float(fresh(policy, states[step].tokens).log_softmax(-1)[trajectory.chosen[step]]))
        for step in range(len(trajectory))
    ]
    assert max(errors[:4]) < 0.02 < max(errors[5:])


def test_as_custom_generate_longrope_ends_there_too() -> None:
    model = small_model("llama", rope_parameters=longrope())
    ids = torch.arange(5, 25)[None]
    options = {"custom_generate": sequencematch.generate, "do_sample": False, "bkspc_token_id": 9}
    assert model.generate(ids, max_new_tokens=12, **options).shape[1] <= 32
    with pytest.raises(ValueError, match="`max_length` must be at most 32: the model's rotary embeddings change there"):
        model.generate(ids, max_new_tokens=13, **options)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("phi3", {"original_max_position_embeddings": 32}), ("minicpm3", {})]
)
def test_other_models_with_longrope_have_the_same_limit(model_type: str, changes: dict[str, Any]) -> None:
    model = small_model(model_type, rope_parameters=longrope(), **changes)
    assert Policy(model).max_positions == 32


def test_a_position_scheme_that_nobody_has_tried_is_refused() -> None:
    model = small_model("llama")
    model.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"has rotary embeddings of type 'spiral'\. Only these were tried"):
        refuse_what_cannot_delete(model)
    assert max_positions(transformers.GPT2Config(n_positions=77)) == 77


# What can't be shifted


@pytest.mark.parametrize("shift", [0.0, -30.0, -300.0])
@pytest.mark.parametrize("is_careless", [True, False])
def test_in_bfloat16_a_model_that_throws_its_mask_away_is_refused_however_its_logits_are_shifted(
    shift: float, is_careless: bool
) -> None:
    """Adding −30 to all logits made a wrong mask a small relative error. A right one passes with any shift."""
    torch.manual_seed(0)
    config = transformers.GPTJConfig(
        vocab_size=160, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, eos_token_id=2, bos_token_id=1
    )
    model = transformers.GPTJForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        model.lm_head.bias.fill_(shift)
    model = model.to(torch.bfloat16)
    forward = type(model.base_model).forward

    class Careless(type(model.base_model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            return forward(self, *args, **{**kwargs, "attention_mask": None})

    if not is_careless:
        Policy(model)
        return
    model.base_model.__class__ = Careless
    with pytest.raises(ValueError, match="has other logits after tokens are deleted than in a plain forward pass"):
        Policy(model)


def test_a_window_that_the_models_code_ignores_is_not_applied_but_refused() -> None:
    """Llama knows no window. A config converted from another type may still name one."""
    model = small_model("llama")
    model.config.sliding_window = 24
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has a window, `sliding_window`=24, which loading can't test"
    ):
        Policy(model)


def test_code_from_elsewhere_that_calls_itself_mistral_is_not_trusted_with_its_window() -> None:
    model = small_model("mistral")
    model.__class__ = type("Remote", (type(model),), {"__module__": "transformers_modules.somebody.modeling"})
    with pytest.raises(ValueError, match="Remote has a window"):
        Policy(model)


def test_under_autocast_a_good_model_is_not_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _generate(small_model("llama", num_hidden_layers=8))
