"""One thread per process, shapes checked at run time in the package and the benchmarks, randomness seeded and printed."""

import contextlib
import gc
import importlib.util
import os
import signal
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

#: Set before torch is imported, and inherited by every process that a test starts: tests run side by side, and threads
#: that outnumber the cores wait for each other. Without a network the hub's client would ask again for minutes.
gc.disable()  # until everything is imported
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import hypothesis
import jaxtyping
import pytest
import torch

import tests.programs


def run_instrumented(loader: SourceFileLoader, module: ModuleType) -> None:
    """Run a module of the package with its annotations checked.

    jaxtyping's own loader caches the instrumented code under a tag of its own. While the module runs, the tag also applies to
    modules it imports: torch and transformers would be compiled again, in every process (15 s).
    """
    exec(loader.source_to_code(loader.get_data(loader.path), loader.path), vars(module))


if not os.environ.get("JAXTYPING_DISABLE"):  # as on a GPU, where beartype is not needed either
    import tests.shape_checker  # jaxtyping looks the checker up by name

    jaxtyping.install_import_hook(["sequencematch", "benchmarks"], "tests.shape_checker.check")
    spec = importlib.util.find_spec("sequencematch")
    assert spec is not None
    type(spec.loader).exec_module = run_instrumented  # type: ignore[method-assign, union-attr]
    jaxtyping.jaxtyped = tests.shape_checker.checked  # type: ignore[assignment]

hypothesis.settings.register_profile("default", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("default")
# A job in the background is started with Ctrl-C ignored. So are the programs that it starts, also those that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files and tests of more than about two seconds, by the start of their ids: `make test-fast` leaves them out.
SLOW = (
    "tests/benchmarks/",
    "tests/cli/test_evaluate.py",
    "tests/cli/test_generate.py",
    "tests/cli/test_train.py",
    "tests/core/test_encoding.py",
    "tests/core/test_optimum.py",
    "tests/core/test_metric_optimum.py",
    "tests/core/test_divergences.py::test_phi_and_the_loss_compile_into_one_graph",
    "tests/data/test_packaged.py",
    "tests/doctor/",
    "tests/evaluation/test_evaluate.py",
    "tests/evaluation/test_harness.py",
    "tests/experiments/",
    "tests/metrics/test_bleu.py",
    "tests/metrics/test_mauve.py",
    "tests/policy/test_architectures.py",
    "tests/policy/test_bundled.py",
    "tests/policy/test_card.py",
    "tests/policy/test_custom_generate.py",
    "tests/policy/test_export.py",
    "tests/policy/test_export_everywhere.py",
    "tests/policy/test_generation.py",
    "tests/policy/test_graph_decoder.py",
    "tests/policy/test_kernels.py",
    "tests/policy/test_head.py::test_gradcheck_passes",
    "tests/policy/test_policy.py::test_a_compiled_policy_has_the_same_loss_and_gradients",
    "tests/policy/test_quantized.py",
    "tests/policy/test_prompts.py::test_bad_input",
    "tests/policy/test_search.py",
    "tests/policy/test_storage.py",
    "tests/policy/test_threads.py",
    "tests/policy/test_verdicts.py",
    "tests/serving/test_api.py",
    "tests/serving/test_captured.py",
    "tests/serving/test_command.py",
    "tests/serving/test_engine.py",
    "tests/serving/test_faults.py",
    "tests/serving/test_playground.py",
    "tests/serving/test_streams.py",
    "tests/tasks/test_arithmetic.py::test_the_sizes_are_the_papers_by_default",
    "tests/tasks/test_generator.py",
    "tests/tasks/test_sudoku.py",
    "tests/test_code_blocks.py",
    "tests/test_site.py::test_the_site_builds",
    "tests/test_examples.py",
    "tests/test_public_names.py::test_the_page_of_public_names",
    "tests/training/test_deepspeed.py",
    "tests/training/test_defaults.py",
    "tests/training/test_distributed.py",
    "tests/training/test_losses.py",
    "tests/training/test_hub.py",
    "tests/training/test_integral_metrics.py",
    "tests/training/test_finite.py",
    "tests/training/test_overfitting.py",
    "tests/training/test_recipe.py",
    "tests/training/test_replay.py",
    "tests/training/test_processes.py",
    "tests/training/test_resume.py",
    "tests/training/test_rollouts_asynchronous.py",
    "tests/training/test_rollouts_distributed.py",
    "tests/training/test_rollouts_process.py",
    "tests/training/test_rollouts_ray.py",
    "tests/training/test_sft_curve.py",
    "tests/training/test_stopping.py",
    "tests/training/test_streams.py",
    "tests/training/test_trackers.py",
    "tests/training/test_trainer.py",
)


#: The longest files, the longest first. They start in this order: the last one to start decides when all are done.
LONGEST = (
    "tests/training/test_resume.py",
    "tests/training/test_distributed.py",
    "tests/training/test_processes.py",
    "tests/training/test_rollouts_ray.py",
    "tests/training/test_rollouts_process.py",
    "tests/serving/test_playground.py",
    "tests/policy/test_generation.py",
    "tests/test_code_blocks.py",
    "tests/benchmarks/test_suites.py",
    "tests/policy/test_export_everywhere.py",
    "tests/policy/test_export.py",
    "tests/experiments/",
    "tests/training/test_trainer.py",
    "tests/core/test_encoding.py",
    "tests/policy/test_policy.py",
    "tests/core/test_optimum.py",
    "tests/policy/test_search.py",
    "tests/data/test_packaged.py",
    "tests/serving/",
    "tests/training/",
    "tests/tasks/test_generator.py",
    "tests/cli/",
    "tests/policy/",
    "tests/benchmarks/",
)


def pytest_configure(config: pytest.Config) -> None:
    """One server of programs for all workers."""
    if not hasattr(config, "workerinput"):
        stack = contextlib.ExitStack()
        stack.enter_context(tests.programs.server())
        config.add_cleanup(stack.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests, and begin with the longest files."""
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker("slow")
    items.sort(
        key=lambda item: next((n for n, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
    )


def pytest_collection_finish() -> None:
    """Leave what was imported, millions of objects, out of garbage collection: each trainer collects garbage when it starts."""
    if "sequencematch.policy.policy" in sys.modules:
        importlib.import_module("tests.remembered_probe").remember_probes()
    gc.freeze()
    gc.enable()


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator whose seed is printed when a test fails."""
    seed = getattr(request, "param", 0)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
