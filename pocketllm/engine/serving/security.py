"""Who may ask: API keys on every route but two, Host and Origin checks, request ids that are safe to log."""

import hashlib
import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pocketllm.engine.serving.failures import Failure, crash
from pocketllm.engine.serving.settings import ServerSettings, is_loopback

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
WRONG_HOST = Failure(
    403,
    "the Host header names a host this server does not answer to: use 127.0.0.1, or start it with --allowed-host",
    "permission_error",
    code="host_not_allowed",
)
WRONG_ORIGIN = Failure(
    403, "requests from other web pages are not served", "permission_error", code="origin_not_allowed"
)


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
        failure = self.refusal(scope)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await failure.response(scope["path"])(scope, receive, send)

    def refusal(self, scope: Scope) -> Failure | None:
        """Why this request goes no further; None: it may."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if self._settings.is_loopback and not all(self._knows_host(host) for host in hosts):
            return WRONG_HOST  # a name rebound to 127.0.0.1 would let any web page in
        if scope.get("method") not in ("GET", "HEAD", "OPTIONS") and not own_origin(headers.getlist("origin"), hosts):
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
        shown = [value.partition(" ") for value in headers.getlist("authorization")]
        keys = [key.strip() if scheme.lower() == "bearer" else "" for scheme, _, key in shown]
        keys += headers.getlist("x-api-key")  # Anthropic's way
        return bool(keys) and all(map(self._is_key, keys))

    def _is_key(self, key: str) -> bool:
        given = digest(key)
        # every known key is compared, in constant time: the time tells neither which one nor how much of it was right
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return any(matches)


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

        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if is_started:
                raise
            await crash(request_id, error).response(scope["path"])(scope, receive, send_with_id)


def clean_request_id(given: str | None) -> str:
    """A client's id without what could forge a log line; a fresh one when nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "", given or "")[:MAX_REQUEST_ID] or uuid.uuid4().hex
