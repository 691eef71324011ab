"""The routes, and what they share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pocketllm.engine.serving.answers.structured import may_compile
from pocketllm.engine.serving.apis.calls import READERS, Call, streamed, whole
from pocketllm.engine.serving.apis.openapi import openapi_document
from pocketllm.engine.serving.apis.status_page import page_response, status_document
from pocketllm.engine.serving.apis.text_routes import ALSO_AT_ROOT, NOT_SERVED, TEXT_ROUTES, not_served
from pocketllm.engine.serving.failures import (
    Failure,
    RefusedError,
    crash,
    from_error,
    json_response,
)
from pocketllm.engine.serving.prompts import Choice
from pocketllm.engine.serving.server import Phase, Server
from pocketllm.engine.serving.settings import ServedEngine, ServerSettings
from pocketllm.engine.serving.stream import EventStream
from pocketllm.engine.serving.transport.body import parse_object, read_body
from pocketllm.engine.serving.transport.bridge import DisconnectWatch
from pocketllm.engine.serving.transport.security import Gatekeeper, RequestIds
from pocketllm.engine.serving.watching import metrics
from pocketllm.errors import PocketLLMError, RequestError

log = logging.getLogger(__name__)

LARGE_BODY = 16 * 2**10
"""Bodies above this many bytes are read on a thread, so that other streams keep flowing."""


async def read_document(server: Server, request: Request) -> tuple[dict[str, Any], bool]:
    """The JSON object of a body, and whether it is large. Raises RequestError, or RefusedError (413)."""
    data = await read_body(request, server.settings.max_body_bytes, server.settings.body_timeout_s)
    is_large = len(data) > LARGE_BODY
    return (await server.aside.run(lambda: parse_object(data)) if is_large else parse_object(data)), is_large


async def answer(server: Server, request: Request, read: Callable[[Mapping[str, Any]], Call]) -> Response:
    """One generation call, from its bytes to its answer or its stream."""
    engine, _ = server.serving()
    document, is_large = await read_document(server, request)
    name = server.named(document)

    def prepare() -> tuple[Call, list[Choice]]:
        call = read(document)
        return call, call.choices(engine)

    may_take_long = is_large or may_compile(document)
    call, choices = await server.aside.run(prepare) if may_take_long else prepare()
    writer = call.make_writer(name, choices) if call.make_writer else None
    generation, reply = server.begin(call.body, choices, name, request.state.request_id)

    def on_end() -> None:
        request.state.summary = server.end(generation, request.url.path, request.headers)

    def on_crash(error: Exception) -> Failure:
        return crash(request.state.request_id, error)

    if call.body.stream:
        return EventStream(generation, streamed(generation, reply, writer, on_crash), on_end)
    try:
        async with DisconnectWatch(generation, request.receive):
            answered = await whole(generation, reply, writer)
            is_answered = not generation.is_abandoned
    finally:
        on_end()
    return json_response(answered) if is_answered else Response(status_code=499)


def create_app(engine: ServedEngine | None, settings: ServerSettings) -> FastAPI:
    """The application; `app.state.server` is its Server.

    engine None: the model is still loading, and `app.state.server.attach(engine)`, on the server's own event loop,
    opens the routes later.
    """
    # no schema pages: they would load scripts from elsewhere
    app = FastAPI(title="pocketllm", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    server = Server(settings)
    app.state.server = server
    add_failures(app, server)
    add_probes(app, server)
    add_models(app, server)
    add_pages(app, server)
    add_generation(app, server)
    add_texts(app, server)
    app.add_middleware(Gatekeeper, settings=settings)
    app.add_middleware(RequestIds)
    if engine is not None:
        server.attach(engine)
    return app


def add_generation(app: FastAPI, server: Server) -> None:
    """The endpoints that generate, and how a request is ended from elsewhere."""
    for path, read in READERS.items():
        app.add_api_route(path, generation_route(server, read), methods=["POST"], response_model=None)

    @app.post("/v1/requests/{name:path}/cancel", response_model=None)
    async def cancel(name: str) -> Response:
        num_cancelled = server.cancel(name)
        if not num_cancelled:
            message = f"no request {name[:100]!r} is running: give the X-Request-Id or the id of an answer that is"
            return Failure(404, message, code="request_not_found").response()
        return json_response({"id": name, "cancelled": num_cancelled})


def generation_route(
    server: Server, read: Callable[[Mapping[str, Any]], Call]
) -> Callable[[Request], Awaitable[Response]]:
    """What answers one of READERS' addresses."""

    async def route(request: Request) -> Response:
        return await answer(server, request, read)

    return route


def add_texts(app: FastAPI, server: Server) -> None:
    """What is answered without generating, and what is not served at all."""
    for path, make in TEXT_ROUTES.items():
        app.add_api_route(path, text_route(server, make), methods=["POST"], response_model=None)
    for first, what in NOT_SERVED.items():
        refuse = not_served_route(what)
        for path in (f"/v1/{first}", f"/v1/{first}/{{rest:path}}", *([f"/{first}"] if first in ALSO_AT_ROOT else [])):
            app.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], response_model=None)


def text_route(
    server: Server, make: Callable[[ServedEngine, dict[str, Any]], dict[str, Any]]
) -> Callable[[Request], Awaitable[Response]]:
    """What answers one of TEXT_ROUTES' addresses."""

    async def route(request: Request) -> Response:
        engine, _ = server.serving()
        document, is_large = await read_document(server, request)
        server.named(document)
        if is_large:
            return await server.aside.run(lambda: json_response(make(engine, document)))
        return json_response(make(engine, document))

    return route


def not_served_route(what: str) -> Callable[[Request], Awaitable[Response]]:
    """What answers an address of an API that is not served."""

    async def route(request: Request) -> Response:
        return not_served(what).response()

    return route


def add_models(app: FastAPI, server: Server) -> None:
    """The model list; an id may hold slashes."""

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        engine, _ = server.serving()
        return json_response({"object": "list", "data": [server.card(name, engine) for name in server.names]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        engine, _ = server.serving()
        return json_response(server.card(server.check_model(name), engine))


def add_pages(app: FastAPI, server: Server) -> None:
    """What people look at."""

    @app.get("/", response_model=None)
    async def page() -> Response:
        return page_response()

    @app.get("/status", response_model=None)
    async def status() -> Response:
        return json_response(status_document(server))

    @app.get("/openapi.json", response_model=None)
    async def openapi() -> Response:
        return json_response(openapi_document())


def add_probes(app: FastAPI, server: Server) -> None:
    """What tells whether the server lives, is ready, and how it does."""

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        return json_response({"status": "alive"})

    @app.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
    async def ready() -> Response:
        is_ready = server.phase is Phase.READY
        return json_response({"status": server.phase.value}, 200 if is_ready else 503)

    @app.get("/metrics", response_model=None)
    async def scrape() -> Response:
        server.postbox.deliver()  # so that what is counted is what has happened
        content = b"" if server.metrics is None else server.metrics.exposition()
        return Response(content, headers={"content-type": metrics.CONTENT_TYPE})

    @app.post("/reset_prefix_cache", response_model=None)
    async def reset() -> Response:
        engine, _ = server.serving()
        # on a thread: it waits for the step in progress
        return json_response({"reset": await asyncio.to_thread(engine.loop.reset_prefix_cache)})


def add_failures(app: FastAPI, server: Server) -> None:
    """Every refusal in one shape, the framework's own included."""

    def refuse(request: Request, error: Exception) -> Response:
        match error:
            case RefusedError(failure=failure):
                return failure.response(request.url.path)
            case HTTPException(status_code=status):
                kind = "invalid_request_error"
                message = f"{request.method[:20]} {request.url.path[:200]!r} is not served here"
                code = "method_not_allowed" if status == 405 else "not_found" if status == 404 else None
                return Failure(status, message, kind, code=code, headers=error.headers or {}).response(request.url.path)
            case ClientDisconnect():
                return Response(status_code=499)
            case PocketLLMError():
                failure = from_error(error)
                if failure.status == 500:
                    log.error("a request was refused by the server's own state: %s", error)
                if isinstance(error, RequestError) and server.metrics is not None:
                    server.metrics.reject("invalid")
                return failure.response(request.url.path)
            case _:
                raise error

    handled: list[type[Exception]] = [RefusedError, HTTPException, ClientDisconnect, PocketLLMError]
    for kind in handled:
        app.add_exception_handler(kind, as_handler(refuse))


def as_handler(refuse: Callable[[Request, Exception], Response]) -> Callable[[Request, Exception], Response]:
    """A handler that runs on the event loop: the framework sends plain functions to a thread."""

    async def handler(request: Request, error: Exception) -> Response:
        return refuse(request, error)

    return handler  # type: ignore[return-value]  # an awaitable is what the framework expects of a coroutine function
