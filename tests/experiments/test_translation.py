"""The study of translations: its file of pairs, its sizes, and a whole run at the smallest one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sequencematch.experiments import registry
from sequencematch.experiments.fine_tuning.cells import METHODS, Budget, Cell
from sequencematch.experiments.fine_tuning.translation import PAIR_BUDGETS, STUDY, PairStudy, files_of, pairs

TINY = replace(PAIR_BUDGETS["cpu"], steps=4, batch_size=4, test_rows=3)


def write_pairs(path: Path, *french: str) -> Path:
    rows = ({"en": f"It is {number}.", "fr": sentence} for number, sentence in enumerate(french))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_registry_finds_the_study_which_takes_a_file() -> None:
    experiment = registry.find("translation")
    assert isinstance(experiment, registry.Experiment)
    assert isinstance(experiment, PairStudy)
    for preset, budget in PAIR_BUDGETS.items():
        models = STUDY.cells(preset, budget)
        assert {cell.method for cell in models} == set(METHODS)
        assert {(cell.noise, cell.rate) for cell in models} == {("none", 0.0), ("uniform", 0.02), ("uniform", 0.2)}


def test_sentences_are_read_from_json_lines_or_from_two_files_side_by_side(tmp_path: Path) -> None:
    one, english, french = write_pairs(tmp_path / "pairs.jsonl", "a"), tmp_path / "a.en", tmp_path / "a.fr"
    english.touch()
    french.touch()
    assert files_of(one) == (one, None)
    assert files_of(english) == (english, french)


def test_a_missing_or_another_file_is_refused_with_an_example(tmp_path: Path) -> None:
    example = r"`--data` must name a file of sentence pairs: JSON lines such as {\"en\": \"A dog runs.\", .*"
    with pytest.raises(ValueError, match=example + r"Got none\."):
        STUDY.run(tmp_path, "sequencematch reproduce translation")
    (tmp_path / "a.en").touch()
    with pytest.raises(ValueError, match=example + r"Got .*a\.en, and there is no file .*a\.fr\."):
        files_of(tmp_path / "a.en")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=example + r"Got .*a\.csv\."):
        files_of(tmp_path / "a.csv")
    (tmp_path / "other.jsonl").write_text('{"text": "A dog runs."}\n')
    with pytest.raises(ValueError, match=example + r"Got .*other\.jsonl: .*Got the fields 'text' in .*line 1\."):
        pairs("translation", "gpu", TINY, tmp_path / "other.jsonl")


def test_only_the_bundled_model_gets_plain_letters_and_shorter_sentences(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", "été", "né")
    small, large = (pairs("translation", preset, TINY, path) for preset in ("cpu", "gpu"))

    def characters(text: str) -> dict[str, list[str]]:
        return {"input_ids": list(text)}

    assert small.task.train(characters)[0]["completion"] in (" ete", " ne")
    assert large.task.train(characters)[0]["completion"] in (" été", " né")
    assert (small.task.max_new_tokens, large.task.max_new_tokens) == (48, 64)
    # Two sides of 63 tokens, a few for "Translation:" and <bos>, and a wrong token at every other place of an answer.
    assert large.max_length >= 2 * 63 + 8 + 32
    assert small.max_length == 128


class MleAndSequenceMatch(PairStudy):
    """The first and the last model of the study."""

    def cells(self, preset: str, budget: Budget) -> list[Cell]:
        every = super().cells(preset, budget)
        return [every[0], every[-1]]


def test_a_study_of_pairs_measures_bleu_and_refuses_models_of_another_file(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl", *(f"C'est {number}." for number in range(20)))
    folder = tmp_path / "out"
    study = MleAndSequenceMatch(**vars(STUDY) | {"budgets": {"cpu": TINY}})
    study.run(folder, "sequencematch reproduce translation", data=data)
    record = json.loads((folder / "results.json").read_text())
    assert [cell["cell"]["method"] for cell in record["cells"]] == ["mle", "sequencematch"]
    assert [len(cell["decodings"]) for cell in record["cells"]] == [2, 3]
    for cell in record["cells"]:
        for measures in cell["decodings"].values():
            (bleu,) = (measure for measure in measures if measure["name"] == "BLEU")
            assert bleu["count"] == 2
            assert "|tok:13a|" in bleu["signature"]
    study.draw(folder)
    heading, _, mle, matched = (folder / "table.md").read_text().splitlines()
    assert heading.startswith(
        "| trained by | noise | rate | BLEU, greedy | BLEU, temperature 1 | BLEU, temperature 1, <bkspc>"
    )
    assert mle.endswith("| 31 ± 2 |")
    assert matched.startswith("| SequenceMatch | any token | 0.2 |")
    assert matched.endswith("| 36 ± 4 |")
    assert (folder / "bleu.png").stat().st_size > 10_000
    write_pairs(data, *(f"Voici {number}." for number in range(20)))
    with pytest.raises(ValueError, match="was trained with another budget"):
        study.run(folder, "again", data=data)
