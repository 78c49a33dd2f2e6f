"""An export writes what the policy writes, for every kind of model and vocabulary, in a process that can't import this library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers

from sequencematch.policy import Generation, Policy
from tests import programs
from tests.policy.sweep import small_model
from tests.policy.test_ends import OTHER, chat_model
from tests.policy.tiny_models import character_tokenizer, llama

IDS = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
#: Tied and untied, windows, experts, capped and scaled logits, positions in tables, a bias of the output layer.
TYPES = (
    *("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gptj"),
    *("gpt_neox", "opt", "cohere", "cohere2", "granite", "olmo2", "falcon", "starcoder2", "stablelm", "gpt_oss"),
    *("smollm3", "codegen"),
)


def with_row(model: Any, tokenizer: Any = None) -> Policy:
    policy = Policy(model, tokenizer)
    with torch.no_grad():
        policy.backspace.row.normal_(generator=torch.Generator().manual_seed(1), std=0.2)
    return policy


def deleting_bias(policy: Policy) -> float:
    """The bias with which a policy deletes about as often as not."""
    with torch.no_grad():
        logits = policy.action_logits(policy.base.base_model(input_ids=torch.tensor([IDS[0]])).last_hidden_state[0])
    return round(float((logits[:, :-1].logsumexp(-1) - logits[:, -1]).mean()) - 0.5, 3)


def padded_vocabulary() -> Policy:
    return with_row(llama(vocab_size=64), character_tokenizer())


def larger_tokenizer() -> Policy:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([f"<extra{n}>" for n in range(5)])
    return with_row(llama(), tokenizer)


def holed_tokenizer() -> Policy:
    """A hole in the ids: the tokenizer has fewer tokens than its largest id says, and that id is a real token's."""
    vocabulary = {name: n for name, n in character_tokenizer().get_vocab().items() if n not in (40, 41)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, padding_side="left", **names)
    assert len(tokenizer) == 46
    assert max(tokenizer.get_vocab().values()) == 47
    return with_row(llama(), tokenizer)


def adapted(*modules: str, tied: bool = False) -> Policy:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=list(modules), task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(tie_word_embeddings=tied), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return with_row(model.eval(), character_tokenizer())


POLICIES: dict[str, Callable[[], Policy]] = {
    **{name: (lambda name=name: with_row(small_model(name))) for name in TYPES},  # type: ignore[misc]
    "tied": lambda: with_row(llama(tie_word_embeddings=True), character_tokenizer()),
    "padded vocabulary": padded_vocabulary,
    "larger tokenizer": larger_tokenizer,
    "holed tokenizer": holed_tokenizer,
    "adapter": lambda: adapted("q_proj", "v_proj", "down_proj"),
    "adapter on tied embeddings": lambda: adapted("embed_tokens", "q_proj", tied=True),
    "several ends": lambda: with_row(chat_model(initializer_range=0.3), character_tokenizer()),
}
#: The options of `model.generate`, and the same ones of `policy.generate`.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"do_sample": False}, {"temperature": 0.0, "protect_prompt": True}),
    "sampled": (
        {"do_sample": True, "top_k": 0, "seed": 3},
        {"seed": 3, "protect_prompt": True},
    ),
    "prompt deletable": (
        {"do_sample": True, "top_k": 0, "seed": 4, "protect_prompt": False},
        {"seed": 4},
    ),
    "held back": (
        {"do_sample": True, "top_k": 0, "seed": 5, "hold_back": 1, "min_new_tokens": 4},
        {"seed": 5, "hold_back": 1, "protect_prompt": True, "min_new_tokens": 4},
    ),
    "search": ({"do_sample": False, "search": True}, {"search": True}),
    "sampled search": (
        {"do_sample": True, "top_k": 0, "seed": 6, "min_p": 0.2, "search": True},
        {"temperature": 1.0, "seed": 6, "min_p": 0.2, "search": True},
    ),
}
#: A search takes up to 32 actions a token, other settings 4.
NEW_TOKENS = {setting: 3 if "search" in setting else 6 for setting in SETTINGS}
#: Some kinds of models are enough for what decides beside the model.
SOME = ("llama", "mistral", "gemma3_text", "gpt2", "tied", "adapter", "several ends")
EVERYWHERE = "prompt deletable"
RUNS = [(name, setting) for name in POLICIES for setting in SETTINGS if name in SOME or setting == EVERYWHERE]
ALONE = """
import json, sys
sys.modules["sequencematch"] = None
import torch
from transformers import AutoModelForCausalLM, logging
logging.set_verbosity_error()
torch.set_num_threads(1)
task, answers = json.loads(sys.argv[1]), {}
width = max(map(len, task["ids"]))
ids = torch.tensor([[0] * (width - len(row)) + row for row in task["ids"]])
mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in task["ids"]])
for name, folder in task["folders"].items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    answers[name] = {}
    for setting, options in task["settings"].items():
        if [name, setting] not in task["runs"]:
            continue
        done = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=task["new"][setting],
            pad_token_id=0,
            return_dict_in_generate=True,
            backspace_bias=task["bias"][name],
            **options,
        )
        answers[name][setting] = [done.sequences.tolist(), done.prompt_kept.tolist(), done.actions]
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {name: build() for name, build in POLICIES.items()}


@pytest.fixture(scope="module")
def alone(policies: dict[str, Policy], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all exports write, in a process of their own: a left-padded batch in each setting."""
    root = tmp_path_factory.mktemp("exported")
    folders = {name: str(root / name.replace(" ", "_")) for name in policies}
    for name, policy in policies.items():
        policy.export(folders[name])
    settings = {name: theirs for name, (theirs, _) in SETTINGS.items()}
    bias = {name: deleting_bias(policy) for name, policy in policies.items()}
    task = {"folders": folders, "ids": IDS, "new": NEW_TOKENS, "settings": settings, "bias": bias, "runs": RUNS}
    run = programs.run("-c", ALONE, json.dumps(task), cwd=root)
    assert run.returncode == 0, run.stderr[-3000:]
    answers: dict[str, Any] = json.loads(run.stdout.rpartition("ANSWERS")[2])
    return answers


def as_rows(done: Generation, new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """A policy's results as transformers returns them: padding, what is left of the prompt, the completion, padding."""
    width, rows, kept = max(map(len, IDS)), list[list[int]](), list[int]()
    for trajectory in done.trajectories:
        prompt, completion = map(list, trajectory.final_parts)
        if not trajectory.truncated:
            completion.append(trajectory.executed[-1])
        rows.append(
            [0] * (width - len(prompt)) + prompt + completion[: new_tokens + len(trajectory.initial) - len(prompt)]
        )
        kept.append(len(prompt))
    longest = max(map(len, rows))
    return [row + [0] * (longest - len(row)) for row in rows], kept


@pytest.mark.parametrize(("name", "setting"), RUNS)
def test_without_the_library_an_export_writes_what_the_policy_writes(
    policies: dict[str, Policy], alone: dict[str, Any], name: str, setting: str
) -> None:
    policy, new_tokens = policies[name], NEW_TOKENS[setting]
    bias = deleting_bias(policy)
    done = policy.generate(IDS, max_new_tokens=new_tokens, backspace_bias=bias, **SETTINGS[setting][1])
    rows, kept = as_rows(done, new_tokens)
    found_rows, found_kept, found_actions = alone[name][setting]
    assert found_actions == [list(trajectory.chosen) for trajectory in done.trajectories]
    assert found_rows == rows
    assert found_kept == kept


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_comparison_deletes_in_most_models(
    alone: dict[str, Any], policies: dict[str, Policy], setting: str
) -> None:
    found = {name: answers[setting] for name, answers in alone.items() if setting in answers}
    deletes = [any(policies[name].space.bkspc in row for row in answer[2]) for name, answer in found.items()]
    assert sum(deletes) >= 0.6 * len(deletes)
    if setting == "prompt deletable":
        assert sum(answers[setting][1] != [len(row) for row in IDS] for answers in alone.values()) >= 10


def test_several_ends_were_reached(alone: dict[str, Any]) -> None:
    last = {row[-1] for rows in alone["several ends"].values() for row in rows[2]}
    assert {2, OTHER} & last


# What a vocabulary does to the row


def test_a_tokenizer_larger_than_the_model_adds_no_rows(tmp_path: Path) -> None:
    """The tokenizer's extra tokens would have had random rows, which were sampled."""
    policy = larger_tokenizer()
    policy.export(tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["vocab_size"], config["bkspc_token_id"]) == (49, 48)


def test_a_hole_in_the_ids_costs_no_token_its_row(tmp_path: Path) -> None:
    policy = holed_tokenizer()
    policy.export(tmp_path / "folder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    rows = loaded.get_output_embeddings().weight
    assert torch.equal(rows[:48], policy.base.get_output_embeddings().weight)
    assert torch.equal(rows[48], policy.backspace.row)


def test_a_padded_vocabulary_comes_back_as_large_as_it_was(tmp_path: Path) -> None:
    policy = padded_vocabulary()
    policy.export(tmp_path / "first")
    again = Policy.from_pretrained(tmp_path / "first")
    again.export(tmp_path / "second")
    assert policy.space == again.space == Policy.from_pretrained(tmp_path / "second").space


def test_merging_an_adapter_of_tied_embeddings_leaves_the_output_layer_alone(tmp_path: Path) -> None:
    policy = adapted("embed_tokens", tied=True)
    policy.export(tmp_path / "folder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    ids = torch.tensor([IDS[0]])
    with torch.no_grad():
        found, expected = loaded(input_ids=ids).logits[..., :48], policy.model(input_ids=ids).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert float((policy.base.get_input_embeddings()(ids) - loaded.get_output_embeddings().weight[ids]).norm()) > 0.1
