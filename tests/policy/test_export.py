"""An exported folder is a plain Hugging Face checkpoint that deletes by itself, in a process that can't import this library."""

import ast
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from sequencematch.policy import Generation, Policy
from sequencematch.policy import export as export_module
from tests import programs
from tests.policy.tiny_models import character_tokenizer

HIDDEN, TOKENS, EOS = 32, 48, 2
NEW_TOKENS = 12
PROMPTS = [
    "a cat",
    "the dog sat on",
    "x",
    "one, two",
    "why not?",
    "(a) b; c",
    "what is 12",
    "go",
]
#: float32 through two layers, summed in another order: logits here are of size 10 and agree to six digits.
FLOAT32 = 1e-4


def llama(*, rows: int = TOKENS, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    config = transformers.LlamaConfig(
        vocab_size=rows, initializer_range=0.5, max_position_embeddings=64, tie_word_embeddings=tied, **sizes, **ids
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapted() -> Any:
    """LoRA whose second matrices are not zero, as they would be before training."""
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def deleting(model: Any, tokenizer: Any = None, *, seed: int = 1) -> Policy:
    """A policy with a <bkspc> row as large as the others, so that greedy decoding deletes now and then."""
    policy = Policy(model, tokenizer)
    with torch.no_grad():
        policy.backspace.row.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.8)
    return policy


@dataclass(frozen=True)
class Exported:
    """A policy and the folder it was exported to; `suppressed` are ids that are never chosen."""

    policy: Policy
    folder: Path
    suppressed: tuple[int, ...] = ()

    def generate(self, **options: Any) -> Generation:
        """The policy's own greedy decoding, with the prompt protected as it is by default in the exported model."""
        suppress = transformers.SuppressTokensLogitsProcessor(list(self.suppressed)) if self.suppressed else None
        options = {"temperature": 0.0, "protect_prompt": True, "max_new_tokens": NEW_TOKENS} | options
        return self.policy.generate(PROMPTS, logits_processor=suppress, **options)


POLICIES: dict[str, Callable[[], Policy]] = {
    "untied": lambda: deleting(llama(), character_tokenizer()),
    "tied": lambda: deleting(llama(tied=True), character_tokenizer()),
    "padded": lambda: deleting(llama(rows=64), character_tokenizer()),
    "padded and tied": lambda: deleting(llama(rows=64, tied=True), character_tokenizer()),
    "adapter": lambda: deleting(adapted(), character_tokenizer()),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    root = tmp_path_factory.mktemp("exported")
    made = {}
    for name, build in POLICIES.items():
        policy = build()
        made[name] = Exported(policy, root / name.replace(" ", "_"))
        policy.export(made[name].folder)
    return made


#: Runs without this library: `sys.modules[...] = None` makes every import of it fail.
ALONE = """
import io, json, re, sys, contextlib
sys.modules["sequencematch"] = None
try:
    import sequencematch
except ImportError:
    pass
else:
    raise SystemExit("the library could be imported")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
task = json.loads(sys.argv[1])
answers = {}


def attempt(function):
    try:
        return function()
    except TypeError as error:
        return f"TypeError: {error}"


for name, folder in task["folders"].items():
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    bkspc = model.config.bkspc_token_id
    options = {"max_new_tokens": task["max_new_tokens"], "do_sample": False}

    def texts(prompts, **more):
        written = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            written.append(model.generate(input_ids=ids, **options, **more)[0, ids.shape[1] :].tolist())
        return written

    def batch():
        inputs = tokenizer(task["prompts"], return_tensors="pt", padding=True)
        return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()

    def positional():
        ids = tokenizer(task["prompts"][0], return_tensors="pt")["input_ids"]
        return model.generate(ids, **options)[0, ids.shape[1] :].tolist()

    def sampled():
        ids = tokenizer(task["prompts"][0], return_tensors="pt")["input_ids"]
        more = {"do_sample": True, "seed": 3, "top_k": 0, "backspace_bias": 8.0}
        return model.generate(input_ids=ids, **(options | more))[0, ids.shape[1] :].tolist()

    answers[name] = {
        "id": [bkspc, tokenizer.get_vocab().get("<bkspc>"), model.config.vocab_size],
        "greedy": texts(task["prompts"]),
        "banned": texts(task["prompts"], ban_deleted=True),
        "batch": attempt(batch),
        "positional": attempt(positional),
        "sampled": sampled(),
    }
    rows = answers[name]["banned"]
    favourite = max(set(sum(rows, [])) - {model.config.eos_token_id}, key=sum(rows, []).count)
    model.generation_config.suppress_tokens = [favourite, bkspc]
    answers[name] |= {"favourite": favourite, "without": texts(task["prompts"], ban_deleted=True)}

card = open(f"{task['card']}/README.md").read()
(code,) = re.findall("```python\\n(.*?)```", card, re.DOTALL)
said = io.StringIO()
with contextlib.redirect_stdout(said):
    error = attempt(lambda: exec(code, {}))
answers["card"] = {"error": error, "said": said.getvalue()}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def alone(exported: dict[str, Exported]) -> dict[str, Any]:
    """What the exported folders write in a process of their own."""
    folders = {name: str(made.folder) for name, made in exported.items()}
    root = exported["untied"].folder.parent
    task = {"folders": folders, "prompts": PROMPTS, "max_new_tokens": NEW_TOKENS, "card": "untied"}
    run = programs.run("-c", ALONE, json.dumps(task), cwd=root)
    assert run.returncode == 0, run.stderr[-3000:]
    answers: dict[str, Any] = json.loads(run.stdout.rpartition("ANSWERS")[2])
    return answers


def kept(result: Generation) -> list[list[int]]:
    """What stands behind each prompt; with the <eos> that was chosen, as Hugging Face returns it."""
    behind = []
    for trajectory in result.trajectories:
        tokens = list(trajectory.final_state.tokens[len(trajectory.initial) :])
        behind.append(tokens[:-1] if trajectory.truncated else tokens[:NEW_TOKENS])
    return behind


def padded(rows: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows]


# Without the library


@every_policy
def test_without_the_library_it_writes_and_deletes_as_the_policy_does(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    made = exported[name]
    result, banning = made.generate(), made.generate(ban_deleted=True)
    bkspc = made.policy.space.bkspc
    for one in (result, banning):
        deleted = sum(trajectory.executed.count(bkspc) for trajectory in one.trajectories)
        assert deleted >= 5, "nothing was put to the test"
    assert alone[name]["greedy"] == kept(result)
    assert alone[name]["banned"] == kept(banning)
    assert made.policy.tokenizer is not None
    decoded = [made.policy.tokenizer.decode(ids, skip_special_tokens=True) for ids in alone[name]["banned"]]
    assert decoded == banning.texts


@every_policy
def test_if_the_row_were_another_it_would_write_something_else(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    made = exported[name]
    other = Exported(deleting(made.policy.model, made.policy.tokenizer, seed=2), made.folder)
    assert kept(other.generate(ban_deleted=True)) != alone[name]["banned"]


@every_policy
def test_without_the_library_a_left_padded_batch_is_its_rows(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    assert alone[name]["batch"] == padded(kept(exported[name].generate()))


@every_policy
def test_the_prompt_may_be_passed_by_position(exported: dict[str, Exported], alone: dict[str, Any], name: str) -> None:
    assert alone[name]["positional"] == kept(exported[name].generate())[0]


@every_policy
def test_without_the_library_it_samples_as_the_policy_does(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    result = exported[name].generate(temperature=1.0, seed=3, backspace_bias=8.0)
    assert exported[name].policy.space.bkspc in result.trajectories[0].executed
    assert alone[name]["sampled"] == kept(result)[0]


@every_policy
def test_what_else_the_generation_config_suppresses_stays_suppressed(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    made, favourite = exported[name], alone[name]["favourite"]
    assert any(favourite in row for row in alone[name]["banned"])
    without = Exported(made.policy, made.folder, suppressed=(favourite,)).generate(ban_deleted=True)
    bkspc = made.policy.space.bkspc
    assert sum(trajectory.executed.count(bkspc) for trajectory in without.trajectories) >= 5
    assert alone[name]["without"] == kept(without)


def test_the_example_on_the_model_card_runs(alone: dict[str, Any]) -> None:
    assert alone["card"]["error"] is None
    assert alone["card"]["said"].strip()


@every_policy
def test_backspace_is_the_row_after_all_others_and_the_tokenizers_last_token_where_that_is_the_same(
    exported: dict[str, Exported], alone: dict[str, Any], name: str
) -> None:
    rows = exported[name].policy.space.vocab_size
    assert alone[name]["id"] == [rows, rows if rows == TOKENS else None, rows + 1]


# Without the code beside the checkpoint


def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def plain_rows(model: Any, tokenizer: Any, **options: Any) -> list[list[int]]:
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, **options)
        rows.append(written[0, ids.shape[1] :].tolist())
    return rows


@every_policy
def test_without_remote_code_it_writes_greedily_and_never_emits_backspace(
    exported: dict[str, Exported], name: str
) -> None:
    made = exported[name]
    model, tokenizer = plain(made.folder), made.policy.tokenizer
    bkspc = made.policy.space.bkspc
    # The negative control: it would, if the generation config didn't forbid it.
    assert any(bkspc in row for row in plain_rows(model, tokenizer, suppress_tokens=None))
    written = plain_rows(model, tokenizer)
    assert not any(bkspc in row for row in written)
    assert written == kept(made.generate(backspace_bias=-torch.inf))


def same_logits(policy: Policy, folder: Path, bkspc: int) -> None:
    """The loaded model's logits are the policy's, `<bkspc>` under its new id."""
    model = plain(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        loaded = model(input_ids=ids).logits[0]
        hidden = policy.base.base_model(input_ids=ids).last_hidden_state[0]
        expected = policy.action_logits(hidden)
    size = policy.space.vocab_size
    is_same = [token for token in range(size) if token != bkspc]
    torch.testing.assert_close(loaded[:, is_same], expected[:, is_same], atol=FLOAT32, rtol=0)
    torch.testing.assert_close(loaded[:, bkspc], expected[:, size], atol=FLOAT32, rtol=0)


@every_policy
def test_its_logits_are_the_policys(exported: dict[str, Exported], name: str) -> None:
    same_logits(exported[name].policy, exported[name].folder, exported[name].policy.space.bkspc)


def test_without_a_tokenizer_backspace_is_the_id_behind_the_vocabulary(tmp_path: Path) -> None:
    policy = deleting(llama())
    policy.export(tmp_path / "plain")
    same_logits(policy, tmp_path / "plain", TOKENS)
    assert plain(tmp_path / "plain").config.bkspc_token_id == TOKENS


def test_a_bias_of_the_output_layer_leaves_backspace_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "initializer_range": 0.5}
    config = transformers.GPTJConfig(vocab_size=TOKENS, bos_token_id=1, eos_token_id=EOS, **sizes)
    model = transformers.GPTJForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.bias.normal_()
    policy = deleting(model)
    policy.export(tmp_path / "biased")
    same_logits(policy, tmp_path / "biased", TOKENS)
    loaded, tokens = Policy.from_pretrained(tmp_path / "biased"), [5, 6, 7, 8]
    torch.testing.assert_close(next_log_probs(loaded, tokens), next_log_probs(policy, tokens), atol=FLOAT32, rtol=0)


# As a policy again


def next_log_probs(policy: Policy, tokens: list[int]) -> Tensor:
    """log p(a|s) of the tokens that text has, and of <bkspc>, given that it is one of them."""
    with torch.no_grad():
        logits = policy.action_logits(policy.base.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1])
    return logits[[*range(TOKENS), policy.space.bkspc]].log_softmax(-1)


@every_policy
def test_loaded_again_it_is_the_policy_and_has_one_backspace(exported: dict[str, Exported], name: str) -> None:
    made = exported[name]
    loaded = Policy.from_pretrained(made.folder)
    assert loaded.space == made.policy.space  # the row that deletes is no token
    assert torch.equal(loaded.backspace.row, made.policy.backspace.row)
    for tokens in ([5, 6, 7, 8], [9], [TOKENS - 1, 4, 4]):
        expected = next_log_probs(made.policy, tokens)
        torch.testing.assert_close(next_log_probs(loaded, tokens), expected, atol=FLOAT32, rtol=0)
    options: dict[str, Any] = {"temperature": 0.0, "protect_prompt": True, "max_new_tokens": NEW_TOKENS}
    result, own = loaded.generate(PROMPTS, **options), made.generate()
    assert result.texts == own.texts
    assert kept(result) == kept(own)
    deletions = [[t.executed.count(t.space.bkspc) for t in one.trajectories] for one in (result, own)]
    assert deletions[0] == deletions[1]
    assert sum(deletions[0]) >= 5


def test_loaded_without_its_mark_it_would_have_a_second_backspace(exported: dict[str, Exported]) -> None:
    model = plain(exported["untied"].folder)
    del model.config.bkspc_token_id
    assert Policy(model).space.vocab_size == TOKENS + 1


def test_loaded_again_it_refuses_a_prompt_with_backspace_in_it(exported: dict[str, Exported]) -> None:
    with pytest.raises(ValueError, match=r"`prompts` must hold token ids in \[0, 48\)\. Got \d+ to 48"):
        Policy.from_pretrained(exported["untied"].folder).generate("a cat<bkspc>", max_new_tokens=4)


@every_policy
def test_loaded_again_it_can_be_trained_saved_and_exported(
    exported: dict[str, Exported], name: str, tmp_path: Path
) -> None:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trained = Policy.from_pretrained(exported[name].folder, peft_config=adapter)
    with torch.no_grad():
        for parameter in (parameter for parameter in trained.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    trained.save_pretrained(tmp_path / "saved")
    trained.export(tmp_path / "plain")
    assert plain(tmp_path / "plain").config.vocab_size == plain(exported[name].folder).config.vocab_size
    expected = next_log_probs(trained, [5, 6, 7, 8])
    assert float((next_log_probs(exported[name].policy, [5, 6, 7, 8]) - expected).abs().max()) > 0.1
    for folder in (tmp_path / "saved", tmp_path / "plain"):
        loaded = Policy.from_pretrained(folder)
        assert loaded.space == trained.space
        torch.testing.assert_close(next_log_probs(loaded, [5, 6, 7, 8]), expected, atol=FLOAT32, rtol=0)


def test_a_tokenizer_that_knows_a_backspace_which_the_model_does_not_is_refused(
    exported: dict[str, Exported], tmp_path: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported["untied"].folder)
    with pytest.raises(ValueError, match="`tokenizer` must not have <bkspc>, which the model has no row for"):
        deleting(llama(rows=64), tokenizer).export(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


# Adapters


def test_an_adapter_is_merged_into_the_exported_weights(exported: dict[str, Exported]) -> None:
    made = exported["adapter"]
    assert not list(made.folder.glob("adapter*"))
    query = plain(made.folder).model.layers[0].self_attn.q_proj.weight
    adapter = made.policy.base.model.layers[0].self_attn.q_proj
    low_rank = adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight * adapter.scaling["default"]
    assert float(low_rank.detach().abs().max()) > 100 * FLOAT32  # without it this would be the base model
    torch.testing.assert_close(query, adapter.base_layer.weight + low_rank, atol=FLOAT32, rtol=0)
    assert hasattr(made.policy.model, "peft_config")  # the policy still wears it


# The policy and the folder


def snapshot(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


@every_policy
def test_exporting_leaves_the_policy_as_it_was(tmp_path: Path, name: str) -> None:
    policy = POLICIES[name]()
    weights = snapshot(policy)
    config, decoding = policy.base.config.to_dict(), policy.base.generation_config.to_dict()
    written = policy.generate(PROMPTS, temperature=0.0, max_new_tokens=NEW_TOKENS)
    policy.export(tmp_path / "folder")
    after = snapshot(policy)
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[key], weights[key]) for key in weights)
    assert policy.base.config.to_dict() == config
    assert policy.base.generation_config.to_dict() == decoding
    assert policy.tokenizer is not None
    assert len(policy.tokenizer) == TOKENS
    assert policy.generate(PROMPTS, temperature=0.0, max_new_tokens=NEW_TOKENS).texts == written.texts


def test_exporting_again_replaces_the_folder_whole(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    deleting(llama(), character_tokenizer()).export(folder)
    (folder / "stale.safetensors").write_text("of an earlier export")
    second = deleting(llama(tied=True), seed=2)
    second.export(folder)
    same_logits(second, folder, TOKENS)
    assert not (folder / "stale.safetensors").exists()
    assert not (folder / "tokenizer.json").exists()  # the second has none
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]  # and nothing is left beside it


def test_an_export_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, policy = tmp_path / "folder", deleting(llama(), character_tokenizer())
    policy.export(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full(_: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(export_module, "write_decoder", full)
    with pytest.raises(OSError, match="no space left"):
        deleting(llama(), character_tokenizer(), seed=2).export(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_export_carries_every_file_its_decoder_imports_and_none_needs_this_library(tmp_path: Path) -> None:
    """transformers takes siblings only: a subfolder or a missing file makes it use its own `generate` without a word."""
    export_module.write_decoder(tmp_path / "custom_generate")
    files = {path.stem: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert set(files) == {
        *("generate", "decoder", "decoder_probe", "search", "cache", "choice", "attention", "changes", "verdicts")
    }
    allowed = {"torch", "transformers", "numpy", *sys.stdlib_module_names}
    for source in files.values():
        found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        siblings = {node.module for node in found if isinstance(node, ast.ImportFrom) and node.level == 1}
        others = {str(node.module) for node in found if isinstance(node, ast.ImportFrom) and node.level == 0}
        others |= {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
        assert siblings <= set(files)
        assert {name.split(".")[0] for name in others} <= allowed


def test_an_export_without_one_of_its_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def loses_the_cache(path: Path, text: str) -> int:
        return 0 if path.name == "cache.py" else write_text(path, text)

    monkeypatch.setattr(Path, "write_text", loses_the_cache)
    with pytest.raises((AssertionError, FileNotFoundError), match=r"cache\.py"):
        export_module.write_decoder(tmp_path / "custom_generate")
