"""`sequencematch serve`."""

from pathlib import Path
from typing import Annotated

import typer

from sequencematch.cli.flag_errors import flags_in_errors
from sequencematch.cli.models import Device, Dtype, TrustRemoteCode, load
from sequencematch.extras import require


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Folders, .gguf files, or models on the hub, one or several."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address. 0.0.0.0 lets other machines in: give an API key as well.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 is any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SEQUENCEMATCH_API_KEY", show_envvar=True, help="Key that clients must send.", metavar="KEY"
        ),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Search, unless a request says otherwise.")] = False,
    hold_back: Annotated[int, typer.Option(help="Hold-back window of requests that name none.")] = 16,
    batch_size: Annotated[int, typer.Option(help="Rows decoded at the same time, for each model.")] = 32,
    queue: Annotated[int, typer.Option(help="Rows that may wait; further requests are answered 429.")] = 256,
    context: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together. Default: the model's own, at most 4096.")
    ] = None,
    max_choices: Annotated[int, typer.Option(help="Most answers of one request.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")] = 300.0,
    max_body: Annotated[int, typer.Option(help="Largest body of a request, in bytes.")] = 2**20,
    shutdown_timeout: Annotated[int, typer.Option(help="Seconds that running requests get after SIGTERM.")] = 30,
    device: Device = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve models: an OpenAI-compatible API, and a playground in the browser.

    Without MODEL, sequencematch/path-star is served, which comes with the package. Needs pip install 'sequencematch[serve]'.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require(package, "serve", "The server")
    names = [_name(model) for model in models or ["sequencematch/path-star"]]
    if len(set(names)) < len(names):
        raise ValueError(f"`MODEL` must name models of different names. Got {', '.join(names)}.")
    from sequencematch.serving.engine import Engine
    from sequencematch.serving.server import LOOPBACK, bound_socket, is_loopback
    from sequencematch.serving.server import serve as run
    from sequencematch.serving.settings import Served, ServerSettings

    with flags_in_errors(_flag):
        settings = ServerSettings(
            api_key=api_key,
            search=search,
            hold_back=hold_back,
            max_choices=max_choices,
            timeout_s=timeout,
            max_body_bytes=max_body,
            allowed_hosts=LOOPBACK if is_loopback(host) else frozenset(),
        )
    bound = bound_socket(host, port)
    with bound:
        served = {}
        for name, model in zip(names, models or names, strict=True):
            policy = load(model, trust_remote_code, device, dtype)
            with flags_in_errors(_flag):
                served[name] = Served(name, Engine(policy, slots=batch_size, queue=queue, context=context))
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"Serving {', '.join(names)} at http://{shown}:{bound.getsockname()[1]}  (Ctrl-C ends it)")
        if api_key is None and not is_loopback(host):
            typer.echo("Anyone who can reach this address may use it: there is no --api-key.", err=True)
        try:
            run(served, settings, bound, shutdown_timeout_s=shutdown_timeout)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt


def _name(model: str) -> str:
    """A folder or file goes by its own name, so that no path of this machine is told to clients."""
    return Path(model).name if Path(model).exists() else model


#: Settings whose flags have another name.
_FLAGS = {"slots": "batch-size", "timeout_s": "timeout", "max_body_bytes": "max-body"}


def _flag(setting: str) -> str:
    return f"--{_FLAGS.get(setting, setting.replace('_', '-'))}"
