"""What stands before every route: host and key, the size of bodies, and headers for browsers."""

import asyncio
import hmac
import json
from collections.abc import Mapping
from typing import Any

from sequencematch.serving.errors import ApiError
from sequencematch.serving.settings import ServerSettings

#: The page is made of files of this server alone, without inline scripts or styles. It may draw images that it made itself.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class Guard:
    """An ASGI application in front of another."""

    def __init__(self, app: Any, settings: ServerSettings) -> None:
        """`settings` has the key, the allowed hosts and the limits."""
        self.app, self.settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer what is refused; pass on the rest."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *_HEADERS]}
            await send(message)

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await _answer(error, send_with_headers)
            return
        replay: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Any:
            return replay.pop() if replay else await receive()

        await self.app(scope, receive_again, send_with_headers)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        allowed, host = self.settings.allowed_hosts, headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if allowed and name.lower() not in allowed:
            raise ApiError(
                421, f"The host must be one of {', '.join(sorted(allowed))}. Got {host[:100]!r}.", code="wrong_host"
            )

    def _check_key(self, path: str, headers: Mapping[str, str]) -> None:
        key = self.settings.api_key
        if key is None or not (path.startswith("/v1/") or path == "/metrics"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(
                401,
                "The key is missing or wrong. Send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, headers: Mapping[str, str], receive: Any) -> bytes:
        """The whole body. It is read before anything else happens, so its size and its time can be limited."""
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"The body must be at most {limit} bytes. Got more.", code="body_too_large")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "The client has closed the connection.")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(408, "The body did not arrive in time.", code="timeout") from error


async def _answer(error: ApiError, send: Any) -> None:
    body = json.dumps(error.body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    } | error.headers
    listed = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": listed})
    await send({"type": "http.response.body", "body": body})
