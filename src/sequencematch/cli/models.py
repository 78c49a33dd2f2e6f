"""Models named on the command line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from sequencematch.policy import Policy


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, or a model on the hub.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, …  Default: cpu.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Dtype of the weights; auto: as saved.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model's repository.")]


def load(model: str, trust_remote_code: bool = False, device: str | None = None, dtype: str = "auto") -> "Policy":
    """Load a policy. Nothing is printed to stdout; progress bars appear only on a terminal."""
    import torch

    from sequencematch.policy import Policy

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"`--device` must be a device of this machine. Got {device!r}: {reason}") from error
    with _reading(model):
        return Policy.from_pretrained(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def load_tokenizer(model: str, trust_remote_code: bool) -> Any:
    """A model's tokenizer alone."""
    from sequencematch.policy import storage

    with _reading(model):
        return storage.load_tokenizer(model, {"trust_remote_code": trust_remote_code})


@contextmanager
def _reading(model: str) -> Iterator[None]:
    """Silence the libraries. The error for a missing model says where it was looked for."""
    quiet()
    try:
        with redirect_stdout(sys.stderr):
            yield
    except OSError as error:
        if Path(model).exists():
            raise ValueError(str(error)) from error
        raise ValueError(
            f"`MODEL` must be a folder, a .gguf file, or a model on the hub. Got {model!r}, which is neither a folder nor "
            f"reachable as a hub id: {str(error).splitlines()[0]}"
        ) from error


def quiet() -> None:
    """Let Hugging Face's libraries log errors only, and show progress bars only if stderr is a terminal."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
