"""Start a server: the socket first, then the models, then requests."""

import contextlib
import socket
from collections.abc import Iterator, Mapping

import uvicorn

from sequencematch.serving.app import create_app
from sequencematch.serving.settings import Served, ServerSettings

#: Names under which a server on a loopback address may be asked.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on an address, before anything slow is done."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise ValueError(f"`--host` and `--port` must be an address of this machine. Got {host} and {port}.") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ValueError(
            f"`--port` must be free on {host}. Got {port}: {error.strerror}. Name another one, or 0 for any."
        ) from error
    return bound


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def serve(
    served: Mapping[str, Served], settings: ServerSettings, bound: socket.socket, *, shutdown_timeout_s: int = 30
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish the running requests, for at most `shutdown_timeout_s` seconds."""
    app = create_app(served, settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=shutdown_timeout_s,
        timeout_keep_alive=30,
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
    )
    with _running(served):
        uvicorn.Server(config).run(sockets=[bound])


@contextlib.contextmanager
def _running(served: Mapping[str, Served]) -> Iterator[None]:
    for found in served.values():
        found.engine.start()
    try:
        yield
    finally:
        for found in served.values():
            found.engine.close(timeout_s=0)
