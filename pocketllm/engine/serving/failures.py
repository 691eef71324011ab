"""Refusals in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, never a traceback, never a path."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from pocketllm.errors import PocketLLMError, QueueFullError, RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
MAX_MESSAGE = 2000


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Failure:
    """One refusal: an HTTP status and the four fields clients read."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The error document."""
        message = printable(self.message)
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error document of Anthropic's API."""
        kind = ANTHROPIC_KINDS.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": printable(self.message)}}

    def response(self, path: str = "") -> Response:
        """The error as a whole HTTP answer, in the shape that clients of `path` read."""
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return json_response(body, self.status, self.headers)


class RefusedError(Exception):
    """Stops an endpoint with a `Failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def printable(text: str) -> str:
    """Text that JSON and UTF-8 can carry, of bounded length: a message may quote what a client sent."""
    text = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; ASCII on the wire, so that no reader trips over a line separator inside a string."""
    content = json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Response(content, status, headers, media_type="application/json")


def unavailable(message: str, code: str) -> Failure:
    """503 with Retry-After: the same request may succeed later."""
    return Failure(503, message, "server_error", code=code, headers={"retry-after": str(RETRY_AFTER_S)})


def from_error(error: PocketLLMError) -> Failure:
    """The refusal for an error made on purpose; anything that is not the client's doing stays vague about itself."""
    if isinstance(error, RequestError):
        return Failure(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return unavailable(str(error), "queue_full")
    return Failure(500, "the server cannot serve this request; its log says why", "server_error", code="internal_error")


def crash(request_id: str, error: Exception) -> Failure:
    """Our own bug: logged with its traceback under the request's id, told to the client without it."""
    log.error("request %s failed on a bug of pocketllm", request_id, exc_info=error)
    return Failure(500, f"internal error; the server's log has it under request id {request_id}", "server_error")


def engine_failure(request_id: str) -> Failure:
    """The engine gave up on a request: the reason is in the log, under the id."""
    return Failure(500, f"the engine failed on request {request_id}", "server_error", code="engine_error")


def unanswerable(message: str) -> Failure:
    """The answer had begun and could not go on as its grammar demands; never is it let loose instead."""
    return Failure(422, message, code="structured_output_failed")


def model_not_found(name: str, served: Sequence[str]) -> Failure:
    """404 for a model that is not served, with those that are; the name is quoted, never opened."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    message = f"the model {shown!r} is not served here; served: {', '.join(served)}"
    return Failure(404, message, param="model", code="model_not_found")
