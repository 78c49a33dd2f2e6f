"""OpenAI's error objects, for everything that can go wrong."""

import re
from collections.abc import Mapping
from typing import Any

from sequencematch.serving.jobs import ClosedError, QueueFullError, RowFailedError

#: Seconds after which a client that found the queue full may try again.
RETRY_AFTER_S = 1
#: Status → OpenAI's type of error.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error: its status, what is wrong, and the field and the code that OpenAI's objects name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` are added to the answer."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


#: The library's names of settings that have another name in OpenAI's API.
_API_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "prompts": "prompt"}


#: The errors that a request may end in. Any other is a bug: it is logged, and answered with 500.
KNOWN = (ApiError, QueueFullError, ClosedError, RowFailedError, TimeoutError, ValueError)


def as_api_error(error: Exception) -> ApiError:
    """The answer to one of the `KNOWN` errors. A `ValueError` is the caller's, and names the field first."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(429, f"The server is busy: {error} Try again later.", code="queue_full", headers=headers)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, TimeoutError):
        return ApiError(504, f"The request took too long. {error}", code="timeout")
    if isinstance(error, RowFailedError):
        return ApiError(500, str(error), code="row_failed")
    message = re.sub(r"\b(\w+)\b", lambda word: _API_NAMES.get(word[1], word[1]), str(error))
    named = re.match(r"`(\w+)`", message)
    return ApiError(400, message, param=named[1] if named else None)


def validation_error(found: Mapping[str, Any]) -> ApiError:
    """The answer to a body that pydantic refused: one of its errors."""
    place = [str(part) for part in found.get("loc", ()) if part != "body"]
    if found.get("type") == "json_invalid":
        return ApiError(
            400, f"The body must be JSON. Got text that is not: {found['ctx']['error']}.", code="invalid_json"
        )
    name = place[0] if place else None
    if found.get("type") == "extra_forbidden":
        return ApiError(
            400,
            f"`{name}` is not a setting of this server. Leave it out; docs/serving.md lists what there is.",
            param=name,
            code="unknown_parameter",
        )
    rule = str(found.get("msg", "is wrong"))
    what = f"`{name}` is wrong" if name else "The body is wrong"
    received = repr(found.get("input"))
    received = received if len(received) <= 100 else received[:100] + "…"
    return ApiError(400, f"{what}: {rule}. Got {received}.", param=name)
