"""The docs site: links and anchors lead somewhere, every page is in the navigation, what pages name exists, nothing has drifted."""

import builtins
import importlib.util
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from transformers import GenerationConfig, TrainingArguments

from dev import pages, reference
from sequencematch.experiments.registry import EXPERIMENTS
from sequencematch.training.recipe import documentation

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sequencematch"
PAGES = pages.pages(ROOT)
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
#: Pages that say what was true once, or list what programs printed.
HISTORY = {
    "CHANGELOG.md",
    "dev/log.md",
    "docs/commands.md",
    "docs/models.md",
    "results/README.md",
    "results/bench/h200/profile.md",
}
#: Where a name may be defined.
SOURCES = ("src", "benchmarks", "tests", "examples", "dev", "Makefile", "pyproject.toml", "mkdocs.yml", "compose.yaml")
#: Names of other libraries.
THEIRS = {"pytorch_model", "SHARDED_STATE_DICT"}


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return pages.FENCE.sub("", (ROOT / page).read_text())


def slug(heading: str) -> str:
    """A heading's anchor as MkDocs makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_text).strip().lower())


def github_slug(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\s-]", "", text).strip().lower().replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page that are the same in the repository and on the site."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return frozenset(slug(heading) for heading in headings if slug(heading) == github_slug(heading))


def test_an_anchor_by_hand() -> None:
    assert slug("SequenceMatch or BC?") == github_slug("SequenceMatch or BC?") == "sequencematch-or-bc"
    assert (slug("KL and χ²"), github_slug("KL and χ²")) == ("kl-and-2", "kl-and-χ²")
    assert slug("`output_dir` must not hold another run") == "output_dir-must-not-hold-another-run"
    assert (
        slug("My adapter doesn't load, or loads and never deletes")
        == "my-adapter-doesnt-load-or-loads-and-never-deletes"
    )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target, anchor in pages.links((ROOT / page).read_text()):
        place = (ROOT / page.parent / target).resolve()
        assert place.exists(), target
        assert place.is_relative_to(ROOT), target
        if anchor:
            assert anchor[1:] in anchors(place.relative_to(ROOT)), f"{target}{anchor}"
    for anchor in re.findall(r"\]\(#([^)]*)\)", prose(page)):
        assert anchor in anchors(page), anchor
    for address in re.findall(r"\]\((https?:[^)]*)\)", prose(page)):
        assert re.fullmatch(r"https://[\w.-]+\.[a-z]+(/[\w./#?=&%~+-]*)?", address), address


def in_navigation(entries: object = CONFIG["nav"]) -> Iterator[str]:
    if isinstance(entries, list):
        for entry in entries:
            yield from in_navigation(entry)
    elif isinstance(entries, dict):
        for entry in entries.values():
            yield from in_navigation(entry)
    else:
        yield str(entries)


def test_every_page_of_the_docs_is_in_the_navigation_once() -> None:
    listed = list(in_navigation())
    assert len(listed) == len(set(listed))
    assert {str(page) for page in PAGES if page.parts[0] == "docs"} <= set(listed)
    assert set(listed) <= set(map(str, PAGES))


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    """Written anew by `python dev/reference.py`."""
    assert (ROOT / "docs" / page).read_text() == reference.PAGES[page]()


def test_every_setting_of_training_stands_under_a_heading_and_the_objective_comes_first() -> None:
    before, first, *_ = reference.settings().split("\n## ")
    assert "| `" not in before
    assert first.startswith("Objective")
    assert documentation()["How to train"][0][0] == "objective"


def test_links_to_files_lead_to_pages_that_show_them(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    text = "[a](../a.py) and [`a`](../a.py#x), [b](b.md#there), [c](https://c.org/a.py)\n```python\n[a](../a.py)\n```\n"
    (tmp_path / "docs" / "b.md").write_text(text)
    pages.stage(tmp_path, tmp_path / "out")
    expected = text.replace("../a.py)", "../a.py.md)", 1).replace("../a.py#x", "../a.py.md#x")
    assert (tmp_path / "out" / "docs" / "b.md").read_text() == expected
    assert "x = 1" in (tmp_path / "out" / "a.py.md").read_text()


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install '.[docs]'")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pages.stage(ROOT, tmp_path / "pages")
    config = {**CONFIG, "docs_dir": str(tmp_path / "pages"), "site_dir": str(tmp_path / "site")}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(tmp_path / "mkdocs.yml"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:)?//""", page.read_text())
        assert not loaded, page


@cache
def corpus() -> tuple[frozenset[str], str]:
    """Every word of the sources, and all their text."""
    texts = []
    for source in SOURCES:
        path = ROOT / source
        files = (
            [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in (".py", ".js", ".html", ".yaml")]
        )
        texts += [file.read_text() for file in files if file != Path(__file__)]  # which names what doesn't exist
    text = "\n".join(texts)
    theirs = {*vars(builtins), *vars(GenerationConfig()), *TrainingArguments.__dataclass_fields__, *THEIRS}
    theirs |= {name.partition(".")[0] for name in file_names()}
    return frozenset(re.findall(r"\w+", text)) | theirs, text


@cache
def file_names() -> frozenset[str]:
    """The names of all files of the repository."""
    return frozenset(
        path.name
        for top in ROOT.iterdir()
        if top.name not in (".venv", "build", ".git")
        for path in [top, *top.rglob("*")]
    )


def missing(code: str, page: Path) -> str | None:
    """What a name in code font says that doesn't exist, or None."""
    words, text = corpus()
    if re.search(r"\s(?:--[\w-]+)?", code) and code.startswith("sequencematch "):
        commands = re.findall(r"^## (\w+)$", (ROOT / "docs" / "commands.md").read_text(), flags=re.MULTILINE)
        name = code.split()[1]
        if re.fullmatch(r"[a-z]\w*", name) and name not in commands:
            return name
        if name == "reproduce" and len(code.split()) > 2 and code.split()[2] not in {*EXPERIMENTS, "NAME"}:
            return code.split()[2]
    if (
        re.fullmatch(r"[\w./*…-]+\.(?:py|md|yaml|toml|json|jsonl|png|svg|gif|safetensors|txt|lock|js)", code)
        and "/" in code[1:]
    ):
        code = code.replace("…", "*").removeprefix("/")
        if code.split("/")[0] in ("out", "custom_generate"):  # what programs write
            return None
        places = (ROOT, PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "results", ROOT / page.parent)
        return None if any(next(place.glob(code), None) for place in places) else code
    if re.fullmatch(r"[\w-]+\.(?:py|md|yaml|toml)", code):
        return None if code in file_names() or code in text else code
    for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", code):
        if (
            f"--{flag}" not in text
            and flag.replace("-", "_") not in words
            and flag.removeprefix("no-").replace("-", "_") not in words
        ):
            return f"--{flag}"
    code = re.sub(r"https?://\S+|\[[^\]]*\]|'[^']*'|\"[^\"]*\"", "", code)
    for name in re.findall(r"(?<![\w/-])[A-Za-z]\w*(?:_\w+)+(?![\w/])", code):
        parts = name.removeprefix("sequencematch_").removesuffix("_total")  # of a number for Prometheus
        if not {name, parts} & words:
            return name
    for name in re.findall(r"(?<![\w/-])(?:[A-Z][a-z]+){2,}\b", code):
        if name not in words:
            return name
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if str(page) not in HISTORY], ids=str)
def test_what_a_page_names_in_code_font_exists(page: Path) -> None:
    named = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))
    absent = {found for code in named if (found := missing(code, page))}
    assert not absent


@pytest.mark.parametrize(
    "code",
    [
        "sequencematch fly",
        "sequencematch reproduce nothing",
        "docs/nothing.md",
        "core/nothing.py",
        "nothing.yaml",
        "--no-such-flag",
        "noise_ratio=0.2",
        "SequenceMatchFighter",
        "policy.generate_all(prompts)",
    ],
)
def test_a_name_of_nothing_is_noticed(code: str) -> None:
    assert missing(code, Path("README.md"))


#: Row of the README's table → page, a heading before the numbers, and the beginnings of the lines that hold them, in this order.
MEASURED = {
    "paths through graphs, right": ("docs/results/search.md", "## Networks", ["mle | greedy", "bc | search"]),
    "Sudoku 6 × 6, solved": (
        "docs/results/search.md",
        "## Sudoku",
        ["mle | greedy", "bc, corrected | search, 161 actions"],
    ),
    "right although a wrong digit was put in": (
        "docs/bundled_models.md",
        "## The fine-tuned model",
        ["right despite a wrong digit"],
    ),
    "cost of a training step": (
        "docs/performance.md",
        "## H200",
        ["step | SequenceMatch / MLE, sampling amortised, rollouts as long as the data"],
    ),
    "sums, without search, right": (
        "docs/results/arithmetic.md",
        "## Numbers",
        [r"MLE | – | 0 | [^|]*", "BC | digits | 0.1 | [^|]*", "SequenceMatch | digits | 0.1 | [^|]*"],
    ),
    "text, MAUVE": (
        "docs/results/text.md",
        "## Results",
        [
            f"{name} | [^|]*"
            for name in ("MLE", "MLE + `<bkspc>`, own noise", "SequenceMatch, own noise", "MLE, top-p 0.95")
        ],
    ),
    "text, words that no training text has": (
        "docs/results/text.md",
        "## Results",
        [
            f"{name} | [^|]* | [^|]* | [^|]*"
            for name in (
                "MLE",
                "MLE + `<bkspc>`, own noise",
                "MLE, top-p 0.95",
                "MLE + `<bkspc>`, own noise, top-p 0.95",
                "human text",
            )
        ],
    ),
}


def test_the_readme_is_short_and_its_numbers_are_those_of_the_pages_that_it_names() -> None:
    """The pages are compared with the recorded results by other tests."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| \[[^\]]+\]\(([^)#]+)", text, flags=re.MULTILINE)
    assert [what for what, *_ in rows] == list(MEASURED)
    for what, _, here, linked in rows:
        page, heading, beginnings = MEASURED[what]
        assert linked == page
        part = (ROOT / page).read_text().partition(f"{heading}\n")[2]
        lines = [f"{re.escape(b).replace(re.escape('[^|]*'), '[^|]*')} \\| ([\\d.]+)" for b in beginnings]
        found = [match[1] if (match := re.search(rf"^\| {line}", part, re.MULTILINE)) else None for line in lines]
        shown = re.findall(r"(?<![\w.])\d+\.\d+(?= [%×])|(?<![\w.])0\.\d{3}", here)
        assert shown == found, what
