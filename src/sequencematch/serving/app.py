"""The HTTP API: OpenAI's routes, the playground's, and those that watch over a server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from sequencematch import __version__
from sequencematch.serving.answers import Answer, sse
from sequencematch.serving.bodies import Body, ChatBody, CompletionBody
from sequencematch.serving.errors import KNOWN, ApiError, as_api_error, validation_error
from sequencematch.serving.examples import examples
from sequencematch.serving.exchange import ClientGoneError, Exchange
from sequencematch.serving.guard import Guard
from sequencematch.serving.metrics import CONTENT_TYPE, Metrics
from sequencematch.serving.plan import plan
from sequencematch.serving.settings import Served, ServerSettings

PAGE = Path(__file__).parent / "page"
#: The status that nginx gives to a client that closed the connection: nobody reads it.
CLIENT_GONE = 499


class ErrorObject(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorObject


#: The errors of every route that decodes.
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "A field is missing or wrong.",
        401: "The key is missing or wrong.",
        404: "No such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "The queue is full. `Retry-After` says when to try again.",
        503: "The server is shutting down.",
        504: "The request took too long.",
    }.items()
}


def create_app(served: Mapping[str, Served], settings: ServerSettings) -> Guard:
    """The server's ASGI application. Its engines must be running; it closes them when it shuts down."""
    if not served:
        raise ValueError("`served` must hold at least one model. Got none.")
    app = FastAPI(
        title="SequenceMatch",
        version=__version__,
        description="OpenAI's API for language models that delete.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        separate_input_output_schemas=False,
    )
    app.state.served, app.state.settings, app.state.metrics = dict(served), settings, Metrics(served)
    for path, route in (("/v1/completions", completions), ("/v1/chat/completions", chat_completions)):
        app.post(path, response_model=None, responses={**_ERRORS, 422: {"model": ErrorBody}})(route)
    app.get("/v1/models", response_model=None)(models)
    app.get("/v1/models/{name:path}", response_model=None, responses={404: _ERRORS[404]})(model)
    app.get("/v1/examples", response_model=None, responses={404: _ERRORS[404]})(list_examples)
    app.get("/health", response_model=None, responses={503: _ERRORS[503]})(health)
    app.get("/ready", response_model=None, responses={503: _ERRORS[503]})(ready)
    app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})(metrics)
    app.mount("/", StaticFiles(directory=PAGE, html=True, check_dir=False))
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_crash)
    return Guard(app, settings)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    for served in app.state.served.values():
        await asyncio.to_thread(served.engine.close, timeout_s=0)  # whoever waited for a row has been answered


async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts."""
    return await _answered(body, request)


async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _answered(body, request)


async def _answered(body: Body, request: Request) -> Response:
    state, began = request.app.state, time.perf_counter()
    try:
        found = _served(request, body.model)
        planned = await run_in_threadpool(plan, body, found, state.settings)
        exchange = Exchange(planned)
    except KNOWN as error:
        raise as_api_error(error) from error
    exchange.watch(request.receive)
    answer = Answer(exchange, state.metrics.hold_back.observe)
    if planned.is_stream:
        state.metrics.requests.labels(request.url.path, 200).inc()
        return StreamingResponse(
            _events(answer, request, began),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
    try:
        whole = await answer.whole()
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except KNOWN as error:
        raise as_api_error(error) from error
    finally:
        exchange.close()
    state.metrics.requests.labels(request.url.path, 200).inc()
    return JSONResponse(whole)


async def _events(answer: Answer, request: Request, began: float) -> AsyncIterator[str]:
    """Server-sent events; an error is the last one."""
    is_first = True
    try:
        async for data in answer.actions() if answer.plan.is_actions else answer.chunks():
            yield sse(data)
            if is_first:
                request.app.state.metrics.first.observe(time.perf_counter() - began)
                is_first = False
        yield sse("[DONE]")
    except ClientGoneError:
        return
    except KNOWN as error:
        yield sse(as_api_error(error).body)
    finally:
        answer.exchange.close()


def _served(request: Request, name: str | None) -> Served:
    known: dict[str, Served] = request.app.state.served
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise ApiError(
            404,
            f"`model` must be one of {', '.join(known)}. Got {name[:100]!r}.",
            param="model",
            code="model_not_found",
        )
    return known[name]


def _card(served: Served) -> dict[str, Any]:
    context = {"context": served.engine.context, "max_model_len": served.engine.context}
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "sequencematch", **context}


async def models(request: Request) -> dict[str, Any]:
    """List the models."""
    return {"object": "list", "data": [_card(served) for served in request.app.state.served.values()]}


async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe a model."""
    return _card(_served(request, name))


async def list_examples(request: Request, model: str | None = None, seed: int = 0) -> dict[str, Any]:
    """Prompts for the playground."""
    found = _served(request, model)
    return {"object": "list", "model": found.name, "data": examples(found, abs(seed) % 2**32)}


async def health(request: Request) -> dict[str, Any]:
    """Whether the engines run. A server that is shutting down is healthy."""
    broken = [name for name, served in request.app.state.served.items() if served.engine.failure is not None]
    if broken:
        raise ApiError(503, f"The engine has failed of {', '.join(broken)}. Restart the server.", code="engine_failed")
    return {"status": "ok"}


async def ready(request: Request) -> dict[str, Any]:
    """Whether requests are taken."""
    if not all(served.engine.is_alive for served in request.app.state.served.values()):
        raise ApiError(503, "The server takes no requests.", code="not_ready")
    return {"status": "ready"}


async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)


def _json(error: ApiError, request: Request) -> JSONResponse:
    request.app.state.metrics.requests.labels(_route(request), error.status).inc()
    return JSONResponse(error.body, error.status, headers=error.headers)


def _route(request: Request) -> str:
    """The route's path: a label for each path that someone tries would fill the memory."""
    return getattr(request.scope.get("route"), "path", "none")


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _json(error, request)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    """What no route answers goes to the page's files: say whether a path of the API is unknown, or its method."""
    assert isinstance(error, HTTPException)
    status, path, headers = error.status_code, request.url.path, error.headers
    if status in (404, 405) and path.startswith("/v1/"):
        routes = [r for r in request.app.routes if isinstance(r, APIRoute) and r.path_regex.match(path)]
        status, headers = 405 if routes else 404, {"Allow": ", ".join(m for r in routes for m in r.methods or ())}
    return _json(
        ApiError(status, f"{HTTPStatus(status).phrase}: {request.method} {path[:100]}.", headers=headers), request
    )


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _json(validation_error(error.errors()[0]), request)


async def _on_crash(request: Request, _: Exception) -> JSONResponse:
    return _json(ApiError(500, "The server has a bug, which it has logged.", code="internal_error"), request)
