"""Who may ask: API keys on every route but two, Host and Origin checks, request ids that are safe to log."""

import base64
import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pocketllm.engine.serving.failures import Failure, crash
from pocketllm.engine.serving.settings import ServerSettings, is_loopback
from pocketllm.engine.serving.transport.request_log import log_request

OPEN_PATHS = frozenset({"/health", "/ready"})
REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID = 128

NO_KEY = Failure(
    401,
    "this server asks for an API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`",
    "authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)
ASK_KEY = replace(NO_KEY, headers={"www-authenticate": 'Basic realm="pocketllm: any name, an API key as password"'})
"""For the status page: a browser then asks its user for the key."""
WRONG_HOST = Failure(
    403,
    "the Host header names a host this server does not answer to: use 127.0.0.1, or start it with --allowed-host",
    "permission_error",
    code="host_not_allowed",
)
WRONG_ORIGIN = Failure(
    403, "requests from other web pages are not served", "permission_error", code="origin_not_allowed"
)
TWO_LENGTHS = Failure(
    400,
    "a body has a Content-Length or is sent in chunks, not both: servers in a row could differ in where it ends",
    code="ambiguous_body_length",
    headers={"connection": "close"},
)

PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type, x-api-key, x-request-id",
    "access-control-max-age": "600",
}
"""What a page that may ask at all may ask with."""


class Gatekeeper:
    """ASGI middleware: nothing reaches a route, known or not, before it has passed here; deny is the default.

    A path opens without a key only when it is exactly one of OPEN_PATHS; `//health` or `/health/` is not.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._digests = [digest(key) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        origin = self._allowed_origin(scope)
        if origin is not None:
            send = with_cors(send, origin)
            if scope["method"] == "OPTIONS":
                await Response(status_code=204, headers=PREFLIGHT)(scope, receive, send)
                return
        failure = self.refusal(scope)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            if failure is NO_KEY and scope["path"] == "/":
                failure = ASK_KEY
            await failure.response(scope["path"])(scope, receive, send)

    def _allowed_origin(self, scope: Scope) -> str | None:
        """The one web page that a request comes from, if it is one of those that may ask."""
        origins = Headers(scope=scope).getlist("origin")
        return origins[0] if len(origins) == 1 and origins[0] in self._settings.allowed_origins else None

    def refusal(self, scope: Scope) -> Failure | None:
        """Why this request goes no further; None: it may."""
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            return TWO_LENGTHS
        hosts = headers.getlist("host")
        if self._settings.is_loopback and not all(self._knows_host(host) for host in hosts):
            return WRONG_HOST  # a name rebound to 127.0.0.1 would let any web page in
        is_reading = scope.get("method") in ("GET", "HEAD", "OPTIONS")
        if not is_reading and self._allowed_origin(scope) is None and not own_origin(headers.getlist("origin"), hosts):
            return (
                WRONG_ORIGIN  # a page can post without a preflight; it could not read the answer, but would get it run
            )
        if self._digests and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return NO_KEY
        return None

    def _knows_host(self, host: str) -> bool:
        name = host_name(host)
        return is_loopback(name) or name in self._settings.allowed_hosts

    def _has_key(self, headers: Headers) -> bool:
        """Whether every key that is shown is one of ours, and there is one."""
        keys = [shown_key(value) for value in headers.getlist("authorization")]
        keys += headers.getlist("x-api-key")  # Anthropic's way
        return bool(keys) and all(map(self._is_key, keys))

    def _is_key(self, key: str) -> bool:
        given = digest(key)
        # every known key is compared, in constant time: the time tells neither which one nor how much of it was right
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches)


def shown_key(value: str) -> str:
    """The key in an Authorization header, which is a browser's password; "" in one that holds none."""
    scheme, _, rest = value.partition(" ")
    match scheme.lower():
        case "bearer":
            return rest.strip()
        case "basic":
            try:
                return base64.b64decode(rest.strip(), validate=True).decode("utf-8").partition(":")[2]
            except ValueError:
                return ""
        case _:
            return ""


def with_cors(send: Send, origin: str) -> Send:
    """Tells the browser that a page of `origin` may read the answer."""

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("origin")
        await send(message)

    return send_with_cors


def digest(key: str) -> bytes:
    """A key as bytes of one length, for a comparison in constant time."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("[::1]:8000"), host_name("localhost:80"), host_name("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def own_origin(origins: Iterable[str], hosts: list[str]) -> bool:
    """Whether a request comes from no web page, or from one this very host served."""
    return all(origin.partition("://")[2] in hosts for origin in origins)


class RequestIds:
    """ASGI middleware: every answer carries X-Request-Id, the client's own where it is harmless.

    It stands outermost, so a bug that no handler knows is answered here, as a 500 in OpenAI's shape.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id

        status, begun_s = 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status:
                raise
            await crash(request_id, error).response(scope["path"])(scope, receive, send_with_id)
        finally:
            log_request(scope, request_id, status, time.perf_counter() - begun_s)


def clean_request_id(given: str | None) -> str:
    """A client's id without what could forge a log line; a fresh one when nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given or "")[:MAX_REQUEST_ID] or uuid.uuid4().hex
