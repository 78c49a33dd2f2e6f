"""Every block of code in the README and the docs runs, or at least parses and names what exists.

Python runs as it stands, page by page, the blocks of a page one after another; a comment behind a `print` is what it prints. Only
numbers of steps and rows are made smaller, and models of the hub are replaced by a tiny one. Recipes are read with all their
settings, rows with the reader of training. Of shell commands the programs, files, flags, extras and experiments must exist; those
of `sequencematch` that need no long training run, in the order of the page.
"""

import ast
import importlib.util
import inspect
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import typer
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.exceptions import TyperException

from dev.pages import pages
from sequencematch import SequenceMatchConfig, SequenceMatchTrainer
from sequencematch.cli import app
from sequencematch.data.examples import Reader
from sequencematch.data.packaged import find_packaged
from sequencematch.evaluation import find_task
from sequencematch.experiments.registry import find
from sequencematch.policy import Policy
from sequencematch.policy.storage import BUNDLED
from sequencematch.training.recipe import read_recipe
from tests.cli.program import run
from tests.policy.tiny_models import tiny
from tests.serving.server import CHAT_TEMPLATE, running

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Models of the hub on the pages: a tiny one takes their place.
HUB = ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M")
#: Numbers that are made smaller → what a test gives them.
SMALLER = {"max_steps": 2, "limit": 4, "per_device_train_batch_size": 8}
#: Pages whose `sequencematch` commands run; those of other pages are parsed.
RUN = ("docs/get_started.md", "docs/train_your_own.md", "docs/recipes.md", "docs/bundled_models.md")
#: Files that commands name and that readers bring along.
THEIRS = ("test.jsonl", "train.en", "train.fr", "test.en", "test.fr", "articles.jsonl.gz", "articles.jsonl")
#: bf16 is refused without a GPU, but for this.
ON_A_CPU = ["--use-cpu"]
#: Programs that are no part of this project, and placeholders for a command of the reader's.
OTHERS = {"curl", "git", "docker", "pre-commit", "pytest", "cd", "echo", "ray"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, its line, and what it holds."""

    page: str
    language: str
    line: int
    text: str


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in some languages."""
    found = list[Block]()
    for page in pages(ROOT):
        text = (ROOT / page).read_text()
        found += [
            Block(str(page), match[1], text.count("\n", 0, match.start()) + 1, match[2])
            for match in FENCE.finditer(text)
            if match[1] in languages
        ]
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block of shell, as words; of a transcript those after `$`. Pipes are taken apart."""
    lines = block.text.splitlines()
    if block.language == "text":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    typed = ""
    for line in lines:
        typed = f"{typed[:-1]} {line.strip()}" if typed.endswith("\\") else f"{typed}\n{line}" if typed else line
        try:
            words = shlex.split(typed, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            continue
        if not typed.endswith("\\"):
            typed = ""
            while words:
                end = next((place for place, word in enumerate(words) if word in ("|", "&&")), len(words))
                command, words = words[:end], words[end + 1 :]
                yield [word for place, word in enumerate(command) if place or not re.match(r"[A-Z_]+=", word)]
    assert not typed, f"{block.page}:{block.line} has a command without an end"


def printed(code: str) -> dict[int, str]:
    """Line of a `print` → the comment behind it, or alone below it: what it prints."""
    lines, found = code.splitlines(), {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            last = node.end_lineno or node.lineno
            behind = re.search(r"  # (.*)$", lines[last - 1])
            below = re.match(r"# (.*)$", lines[last]) if last < len(lines) else None
            if comment := behind or below:
                found[node.lineno] = comment[1]
    return found


def smaller(text: str, folder: Path) -> str:
    """A block with fewer steps and rows, the tiny model in place of those on the hub, and CPUs in place of GPUs."""
    for name, most in SMALLER.items():
        text = re.sub(rf"\b({name}\"?[=:] ?)\d+", rf"\g<1>{most}", text)
    for name in HUB:
        text = text.replace(f'"{name}"', f'"{folder}"')
    return text.replace('init_device_mesh("cuda"', 'init_device_mesh("cpu"')


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, a token for each letter, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    letters = ["<s>", "</s>", *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({letter: place for place, letter in enumerate(letters)}, unk_token="<s>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny("Llama", vocab_size=len(letters), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(code: str, place: str, names: dict[str, Any]) -> None:
    """Run a block, and compare what it prints with the comments."""
    expected, said = printed(code), dict[int, str]()

    def note(*words: object, sep: str = " ", **_: Any) -> None:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        said[frame.f_back.f_lineno] = sep.join(map(str, words))

    names["print"] = note
    exec(compile(code, place, "exec"), names)
    for line, text in expected.items():
        assert said[line].strip() == text, f"{place}, line {line} of the block"


PYTHON = [block for block in blocks("python") if block.page not in ("README.md", "docs/serving.md")]


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: str, here: Path, tiny_model: Path) -> None:
    assert here.is_dir()
    names: dict[str, Any] = {"__name__": "__page__"}
    with alone_in_a_group(here) if page == "docs/scaling.md" else nullcontext():
        for block in PYTHON:
            if block.page == page:
                execute(smaller(block.text, tiny_model), f"{page}:{block.line}", names)


@contextmanager
def alone_in_a_group(folder: Path) -> Iterator[None]:
    """As one process that torchrun has started."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_print_that_says_something_else_is_noticed() -> None:
    execute("print(1 + 1)  # 2\nprint(\n    3,\n    4,\n)\n# 3 4", "page", {})
    with pytest.raises(AssertionError, match="page, line 1 of the block"):
        execute("print(1 + 1)  # 3", "page", {})


def test_what_the_faq_says_of_adapters_happens(here: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}]
    args = SequenceMatchConfig("run", objective="bc", max_steps=1, save_strategy="no", report_to="none")
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SequenceMatchTrainer("sequencematch/arithmetic-base", args, train_dataset=rows, peft_config=lora)
    trainer.train()
    trainer.save_model("whole")

    def without(*names: str) -> str:
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("whole", "copy")
        for name in names:
            (here / "copy" / name).unlink()
        return "copy"

    with pytest.raises(ValueError, match=re.escape("is incomplete: sequencematch.json is missing")):
        Policy.from_pretrained(without("sequencematch.json"))
    edited = here / without() / "adapter_config.json"
    edited.write_text(edited.read_text().replace("sequencematch/arithmetic-base", "elsewhere"))
    with pytest.raises(ValueError, match=r"is damaged: adapter_config.json should have \d+ bytes"):
        Policy.from_pretrained("copy")
    own = ("sequencematch.json", "sequencematch.safetensors")
    with pytest.raises(ValueError, match=re.escape("is a saved policy without its `<bkspc>` row")):
        Policy.from_pretrained(without(*own))
    trainer.model.model.save_pretrained("by_peft", save_embedding_layers=False)
    row = Policy.from_pretrained("whole").backspace.row
    plain = Policy.from_pretrained("by_peft").backspace.row
    assert not torch.equal(row, plain)  # it loads, with an untrained <bkspc>
    trainer.model.export("exported")
    exported = AutoModelForCausalLM.from_pretrained("exported").generation_config
    assert exported.suppress_tokens == [trainer.model.space.bkspc]


#: Behind the README's code: how many of all wrong first digits its model corrects.
CORRECTED = """
wrong = [(f"{q}{d}", a) for q, a in sums for d in "0123456789" if d != a[0]]
found = trainer.model.generate([prompt for prompt, _ in wrong], max_new_tokens=4, temperature=0).trajectories
texts = [trainer.model.tokenizer.decode(trajectory.final_state.tokens[:-1]) for trajectory in found]
print(sum(text.endswith(f"={answer}") for text, (_, answer) in zip(texts, wrong)) / len(wrong))
"""


def test_the_readmes_python_runs_as_it_stands(here: Path) -> None:
    """In a process of its own and an empty folder, as a reader would run it."""
    (block,) = [block for block in blocks("python") if block.page == "README.md"]
    assert len(block.text.strip().splitlines()) <= 16
    command = [sys.executable, "-c", block.text + CORRECTED]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    *said, corrected = (line.strip() for line in done.stdout.splitlines())
    assert said == list(printed(block.text).values()), done.stderr
    assert 0.8 < float(corrected) < 0.97  # about nine of ten


def test_no_block_escapes_the_tests() -> None:
    """Every fence is one of those that are found, and its language is one that is tested or is no code."""
    for page in pages(ROOT):
        text = (ROOT / page).read_text()
        found = FENCE.findall(text)
        assert len(re.findall(r"^\s*(?:```|~~~)", text, flags=re.MULTILINE)) == 2 * len(found), page
        assert {language for language, _ in found} <= {"python", "bash", "yaml", "json", "text", "bibtex", ""}, page


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: f"{block.page}:{block.line}")
def test_every_recipe_is_one(block: Block, here: Path) -> None:
    (here / "recipe.yaml").write_text(block.text)
    assert read_recipe(here / "recipe.yaml", ON_A_CPU).config.objective in block.text


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: f"{block.page}:{block.line}")
def test_every_row_can_be_read(block: Block, tiny_model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    for line in block.text.splitlines():
        row = json.loads(line)
        reader = Reader(tokenizer, frozenset({1}), 256, needs_noise="noise_tokens" in row)
        example = reader(row)
        assert example.completion
        assert bool(example.noise_tokens) == ("noise_tokens" in row)


SHELL = [block for block in blocks("bash", "text") if block.page not in ("docs/commands.md", "dev/log.md")]


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}))
def test_the_commands_of_a_page_exist(page: str, here: Path) -> None:
    for name in THEIRS:
        (here / name).write_text("")
    for block in SHELL:
        for words in commands(block) if block.page == page else ():
            check(words, f"{page}:{block.line}: {shlex.join(words)}")


@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run(page: str, here: Path, tiny_model: Path) -> None:
    recipes = [block for block in blocks("yaml") if block.page == page]
    ran = 0
    for number, block in enumerate(recipes):
        (here / ("first.yaml" if number == 0 else f"recipe{number}.yaml")).write_text(block.text)
    for block in SHELL:
        for words in commands(block) if block.page == page else ():
            ran += execute_command(words, tiny_model)
    assert ran >= 2


def execute_command(words: list[str], tiny_model: Path) -> bool:
    """Run a command that is cheap, with fewer steps and rows; False for others."""
    if words[0] == "python" and words[1].startswith("examples/"):
        script, *arguments = words[1:]
        before, sys.argv = sys.argv, [script, *arguments]
        try:
            runpy.run_path(str(find_packaged(Path(script))), run_name="__main__")
        finally:
            sys.argv = before
        return True
    # A model that the page trained earlier, or a bundled one; a long training or one of another model is left to its reader.
    known = [word for word in words[2:] if word in BUNDLED or Path(word).exists() or word.startswith("examples/")]
    if words[0] != "sequencematch" or words[1] in ("serve", "demo", "reproduce") or "out/wide" in words:
        return False
    if words[1] in ("train", "evaluate", "export") and not known:
        return False
    if words[1] == "train" and "bundled_arithmetic" in words[2]:
        return False
    few = {"train": ["--max-steps", "2"], "evaluate": ["--limit", "4", "--metrics", "accuracy"]}.get(words[1], [])
    given = [str(tiny_model) if word in HUB else word for word in words[1:]]
    result = run(*given, *(few if few[:1] != [word for word in words if word == "--limit"] else []))
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}{result.stderr}"
    return True


def check(words: list[str], place: str) -> None:
    """Whether a command and everything that it names exists."""
    program, *rest = words
    if program == "sequencematch":
        check_own(rest, place)
    elif program in ("pip", "pip3"):
        for name in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(name.split(",")) <= EXTRAS.keys(), place
        for flag, name in itertools.pairwise(rest):
            assert flag != "--requirement" or (ROOT / name).is_file(), place
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert rest[0].partition("=")[0] in [*targets, "PYTHON"], place
    elif program in ("accelerate", "torchrun"):
        assert all((ROOT / name).is_file() for flag, name in itertools.pairwise(rest) if flag == "--config_file"), place
        if "train.py" not in rest:  # the reader's own program
            check_own(rest[rest.index("sequencematch.cli") + 1 :], place)
    elif program == "sbatch":
        assert (ROOT / rest[0]).is_file(), place
    elif program.startswith("python"):
        check_python(rest, place)
    else:
        assert program in OTHERS, place


def check_python(rest: list[str], place: str) -> None:
    """A module or a script: it is there, and its folder knows the flags."""
    if rest[0] == "-m":
        spec = importlib.util.find_spec(rest[1])
        assert spec is not None, place
        assert spec.origin is not None, place
        path, flags = Path(spec.origin), rest[2:]
    else:
        path, flags = find_packaged(Path(rest[0])) if rest[0].startswith("examples/") else ROOT / rest[0], rest[1:]
    assert path.is_file(), place
    source = "".join(file.read_text() for file in path.parent.glob("*.py"))
    for flag in flags:
        if flag.startswith("--"):
            name = flag.removeprefix("--").partition("=")[0]
            assert flag in source or re.search(rf"\b{name.replace('-', '_')}\b", source), f"{place}: {flag}"


def check_own(rest: list[str], place: str) -> None:
    """One of our commands: its flags, and those of a recipe, a task or an experiment."""
    name, *arguments = [word for word in rest if word not in ("…", "[…]")]
    group: Any = typer.main.get_command(app)
    assert name in group.commands, place
    if "--help" in arguments:
        return
    context = group.commands[name].make_context(name, list(arguments))  # fails where a flag doesn't exist
    flags = context.params.get("flags") or []
    if name == "train":
        recipe = find_packaged(context.params["recipe"])
        if not recipe.is_file():  # the reader's own
            assert str(recipe) in ("RECIPE", "first.yaml", "recipe.yaml"), place
            recipe = ROOT / "examples" / "train_small.yaml"
        read_recipe(recipe, [*flags, *ON_A_CPU])
    elif name in ("evaluate", "data"):
        task = context.params["task"]
        if task.endswith(".jsonl"):  # the reader's own
            Path(task).parent.mkdir(parents=True, exist_ok=True)
            Path(task).touch()
        find_task(str(ROOT / task) if task.startswith("examples/") else task, flags)
    elif name == "reproduce":
        options = {word.removeprefix("--") for word in arguments if word.startswith("--")} - {"out", "redraw"}
        assert options <= inspect.signature(find(context.params["name"]).run).parameters.keys(), place
        if preset := context.params["preset"]:
            experiment = find(context.params["name"])
            module = inspect.getmodule(experiment.run)
            assert module is not None
            folder = Path(cast(str, module.__file__)).parent
            assert any(f'"{preset}"' in file.read_text() for file in folder.glob("*.py")), f"{place}: {preset}"


@pytest.mark.parametrize(
    "line",
    [
        "sequencematch trian examples/dates.yaml",
        "sequencematch train examples/dates.yaml --learning-rat 1e-3",
        "sequencematch evaluate MODEL --task arithmetic --modul mul",
        "sequencematch generate --beams 4",
        "sequencematch reproduce arithmetics",
        "sequencematch reproduce chain --jobs 2",
        "sequencematch reproduce arithmetic --preset tpu",
        "pip install '.[plots]'",
        "make documentation",
        "python -m benchmarks.nothing",
        "python -m benchmarks --devices cuda",
        "python examples/nothing.py",
        "serve MODEL",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str, here: Path) -> None:
    assert here.is_dir()
    with pytest.raises((AssertionError, ValueError, TyperException)):
        check(shlex.split(line), line)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page calls curl")
def test_the_page_about_serving_holds_with_a_real_server(here: Path) -> None:
    assert here.is_dir()
    name = "sequencematch/path-star"
    curl, _ = next(block for block in blocks("bash") if block.page == "docs/serving.md" and "curl" in block.text), None
    (python,) = [block for block in blocks("python") if block.page == "docs/serving.md"]
    with running({name: Policy.from_pretrained(name)}) as address:
        asked = curl.text.replace("http://127.0.0.1:8000", address)
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
        assert json.loads(done.stdout)["choices"][0]["text"].strip() == "13 21 27 26"
        execute(python.text.replace("http://127.0.0.1:8000", address), "docs/serving.md", {})
