"""`sequencematch plan` prints a table or JSON, and one line for what it can't plan."""

import json
import re
from pathlib import Path

import pytest

from sequencematch.training.planning import HARDWARE, SHAPES, Workload
from sequencematch.training.planning import plan as make
from tests.cli.program import check_error, run

SEVEN = ("plan", "--shape", "Llama-2-7b", "--adapter", "64")


def test_a_plan_is_a_table_with_both_ways_to_use_the_gpus() -> None:
    result = run(*SEVEN, "--gpus", "64")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "Llama-2-7b, 6.74 billion weights, LoRA of rank 64; 64 × H200; modelled"
    assert lines[2].split() == ["rollouts", "in", "turn", "rollouts", "apart"]
    table = dict(line.rsplit(maxsplit=2)[::2] for line in lines[3:12])
    found = make(Workload(SHAPES["Llama-2-7b"], 1024, 64, 960, 8, rank=64), 64, HARDWARE["H200"])
    assert found.apart is not None
    assert table["GPUs that train"] == str(found.apart.train_gpus)
    assert table["seconds of a step"] == f"{found.apart.step_s:.2f}"
    assert "keep pace" in result.stdout


def test_a_plan_for_one_gpu_has_one_way() -> None:
    result = run(*SEVEN)
    assert result.exit_code == 0
    assert "rollouts apart" not in result.stdout
    assert "Apart, " not in result.stdout


def test_json_holds_every_number_and_where_constants_were_measured() -> None:
    found = json.loads(run(*SEVEN, "--gpus", "8", "--json").stdout)
    assert found["gpus"] == found["apart"]["train_gpus"] + found["apart"]["rollout_gpus"] == 8
    assert found["hardware"]["sources"]["train_flops"].startswith("results/bench/h200/")
    assert found["work"]["shape"]["name"] == "Llama-2-7b"


def test_a_bundled_model_is_planned_by_its_config() -> None:
    result = run("plan", "sequencematch/arithmetic", "--context", "128", "--prompt", "32", "--completion", "16")
    assert result.exit_code == 0
    assert result.stdout.startswith("sequencematch/arithmetic, 0.000866 billion weights, all weights; 1 × H200")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Give either `MODEL` or `--shape`"),
        (("no/such/model", "--shape", "Llama-2-7b"), "Give either `MODEL` or `--shape`"),
        (("no/such/model",), "`MODEL` must be a folder with a config, or a model on the hub. Got 'no/such/model'"),
        (("--shape", "1,2"), "`shape` must be a name, or six whole numbers"),
        (("--shape", "Llama-2-7b", "--gpus", "0"), "`gpus` must be at least 1. Got 0."),
        (("--shape", "Llama-2-7b", "--hardware", "H20"), "`hardware` must be one of H200. Got 'H20'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments: tuple[str, ...], text: str) -> None:
    check_error(run("plan", *arguments), text)


def test_plans_in_the_document_are_what_the_command_prints() -> None:
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    shown = re.findall(r"```text\n\$ sequencematch (plan .*)\n((?:.*\n)*?)```", text)
    assert len(shown) == 3
    for command, output in shown:
        assert run(*command.split()).stdout == output
