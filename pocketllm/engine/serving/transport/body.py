"""From the bytes of a request body to a JSON object, bounded at every step."""

import asyncio
import json
import re
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from pocketllm.engine.serving.failures import Failure, RefusedError
from pocketllm.errors import RequestError

MAX_DEPTH = 32
DISCARD_FACTOR = 8
"""A refused body is still read up to this many times the limit, so that the client gets to see the answer."""

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body; raises RefusedError past `limit` bytes (413), when it has not come after `timeout_s` (408), and
    for one that is compressed (415).
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the body has Content-Encoding {encoding[:100]!r}: send it as it is"
        raise RefusedError(Failure(415, message, code="unsupported_content_encoding"))
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError as error:
        message = f"the body did not come within {timeout_s:g} seconds"
        headers = {"connection": "close"}
        raise RefusedError(Failure(408, message, code="request_timeout", headers=headers)) from error


async def _read(request: Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > DISCARD_FACTOR * limit:
            break
    if size > limit:
        message = f"the body is larger than the limit of {limit} bytes"
        raise RefusedError(Failure(413, message, code="request_too_large"))
    return b"".join(parts)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no NaN or Infinity, no key twice, at most MAX_DEPTH deep. Raises RequestError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: byte {error.start} cannot be decoded") from error
    try:
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise too_deep() from error
    except ValueError as error:
        # an integer of thousands of digits
        raise RequestError("the body holds a number that is too long") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    check_depth(value)
    if SURROGATE.search(text):
        check_text(value)
    return value


def check_text(value: Any) -> None:
    """Raise RequestError for half a surrogate pair: JSON can spell it, UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the body holds half of a surrogate pair, which is no character") from error


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the body; RequestError for a key that is there twice: readers differ in which of the two counts."""
    values = dict(pairs)
    if len(values) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise RequestError(f"the body has the key {twice[:80]!r} twice in one object: give it once")
    return values


def refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are not JSON, although Python reads them."""
    raise RequestError(f"the body is not JSON: {name} is not a number")


def check_depth(value: Any) -> None:
    """Raise RequestError when lists and objects nest deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in children(parent) if isinstance(child, (dict, list))]
        if not level:
            return
    raise too_deep()


def children(value: Any) -> Any:
    """What an object or a list holds."""
    return value.values() if isinstance(value, dict) else value


def too_deep() -> RequestError:
    """The refusal of a body that nests too deep."""
    return RequestError(f"the body nests deeper than {MAX_DEPTH} levels")
