"""What is no HTTP request is refused in the API's words too: uvicorn's own answer to it is a line of plain text."""

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from pocketllm.engine.serving.failures import Failure

MALFORMED = Failure(
    400,
    "no HTTP request can be read from this: its first line and headers must be well formed, name a Host, and be short "
    "(64 KiB together are too long), a Content-Length is one whole number, chunks are well formed, and there is no "
    "other Transfer-Encoding",
    code="malformed_request",
    headers={"connection": "close"},
)


def as_bytes(failure: Failure) -> bytes:
    """A refusal as it goes over the wire."""
    answer = failure.response()
    headers = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
    return b"HTTP/1.1 %d Bad Request\r\n%s\r\n%s" % (failure.status, headers, answer.body)


class ReadableRefusals(H11Protocol):
    """uvicorn's protocol over h11, except for the words of its refusal.

    Never over httptools, which uvicorn would take where it is installed: that bounds neither line nor headers.
    """

    def send_400_response(self, msg: str) -> None:
        """Refuse and close; an answer that has begun is cut instead, for nothing else may stand inside it."""
        cycle: RequestResponseCycle | None = self.cycle  # declared as always there, and None before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(as_bytes(MALFORMED))
        self.transport.close()
