"""What is said of a request once it has ended: in the log, a line each, and on the status page. Never its texts."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pocketllm.engine.lifecycle.request import FinishReason
from pocketllm.engine.serving.transport.bridge import Generation
from pocketllm.errors import OptionError

log = logging.getLogger("pocketllm.requests")

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics", "/status"})
"""Asked for all the time by machines: logged at the level debug."""


@dataclass(frozen=True)
class Summary:
    """A generation call that has ended. Times are in seconds; None for a phase that was not reached."""

    request_id: str
    id: str
    path: str
    is_streamed: bool
    began_at: float
    """Seconds since 1970."""
    finish_reasons: tuple[str, ...]
    """One for each choice; cancelled where the call was given up before."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None
    ttft_s: float | None
    total_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def summarized(generation: Generation, path: str) -> Summary:
    """A call's summary, from its requests and their last events."""
    times = [request.times for request in generation.requests]
    begun_s = min((one.submitted_s for one in times), default=time.perf_counter())
    scheduled = [one.scheduled_s for one in times if one.scheduled_s is not None]
    first = [one.first_token_s for one in times if one.first_token_s is not None]
    total_s = time.perf_counter() - begun_s
    ends = generation.ends
    # a call that was given up is told of before the engine has ended its requests: they are counted as they stand
    ended = {event.request_id for event in ends}
    left = [request for request in generation.requests if request.request_id not in ended]
    return Summary(
        request_id=generation.request_id,
        id=generation.id,
        path=path,
        is_streamed=generation.is_streamed,
        began_at=time.time() - total_s,
        finish_reasons=(*(event.reason.value for event in ends), *[FinishReason.CANCELLED.value] * len(left)),
        prompt_tokens=sum(len(request.prompt_token_ids) for request in generation.requests),
        cached_tokens=sum(event.num_cached_tokens for event in ends) + sum(one.num_cached_tokens for one in left),
        completion_tokens=sum(event.num_output_tokens for event in ends)
        + sum(len(one.output_token_ids) for one in left),
        queue_s=min(scheduled) - begun_s if scheduled else None,
        ttft_s=min(first) - begun_s if first else None,
        total_s=total_s,
    )


def log_request(scope: Mapping[str, Any], request_id: str, status: int, seconds: float) -> None:
    """One line for one HTTP request; a generation's summary goes with it."""
    path = scope["path"]
    level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
    if not log.isEnabledFor(level):
        return
    summary: Summary | None = scope.get("state", {}).get("summary")
    fields: dict[str, Any] = {} if summary is None else summary.as_dict()
    fields |= {"request_id": request_id, "method": scope["method"], "path": path[:200], "status": status}
    fields["duration_s"] = round(seconds, 6)
    words = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "path", "status"))
    log.log(level, "%s %r %d %s", scope["method"], path[:200], status, words, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON: time, level, logger, message, and a request's fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= getattr(record, "fields", {})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class FileHandler(logging.FileHandler):
    """Writes to a file for as long as that works; when the disk is full it says so once and requests go on."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        error = sys.exc_info()[1]
        if not self.has_failed:
            self.has_failed = True
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            print(f"warning: the log file {self.baseFilename} cannot be written: {reason}", file=sys.stderr, flush=True)

    def close(self) -> None:
        try:
            super().close()
        except OSError:
            self.has_failed = True  # what was buffered does not fit either; that has been said


def set_up_logging(level: str, form: str, path: Path | None) -> None:
    """Send the log of this process to stderr or to a file. Raises OptionError for a file that cannot be opened."""
    for name, value, known in (("--log-level", level, LEVELS), ("--log-format", form, FORMATS)):
        if value not in known:
            raise OptionError(f"{name} {value} is none of {', '.join(known)}")
    try:
        handler: logging.Handler = logging.StreamHandler() if path is None else FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--log-file {path} cannot be opened: {error.strerror}") from error
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(text))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pocketllm").setLevel(level.upper())
