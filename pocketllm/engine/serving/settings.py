"""What a server was told, and what it needs of an engine."""

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pocketllm.engine.lifecycle.request import Event, Request
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import OptionError

API_KEY_VARIABLE = "POCKETLLM_API_KEY"
DEFAULT_PORT = 8000
MAX_BODY_BYTES = 8 * 2**20


class ServedLoop(Protocol):
    """The part of the engine loop that a server drives."""

    def check(self, request: Request) -> None: ...

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def compile(self, constraint: Constraint) -> None: ...

    def on_compile(self, listener: Callable[[float], None]) -> None: ...

    def start(self) -> None: ...

    def step(self) -> bool: ...

    def stop(self, timeout_s: float = ...) -> None: ...

    def stats(self) -> Any: ...

    def reset_prefix_cache(self) -> bool: ...

    def on_step_end(self, listener: Callable[[], None]) -> None: ...


class ServedTokenizer(Protocol):
    """The part of a tokenizer that a server reads."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = ...) -> str: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def is_special(self, token_id: int) -> bool: ...

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]: ...

    def __hash__(self) -> int: ...


class ServedTemplate(Protocol):
    """The part of a chat template that a server uses."""

    @property
    def source(self) -> str: ...

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = ..., **kwargs: Any) -> str: ...

    def render_continued(self, messages: Sequence[Any], **kwargs: Any) -> str: ...


class ServedEngine(Protocol):
    """All a server knows of an engine; `engine.load.Engine` has it."""

    @property
    def model_name(self) -> str: ...

    @property
    def plan(self) -> Any: ...

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    @property
    def chat_template(self) -> ServedTemplate | None: ...

    @property
    def loop(self) -> ServedLoop: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ServerSettings:
    """How a server answers; raises OptionError for what would be unsafe or impossible.

    `served_model_names`: names the model answers to, the first is the one reported; empty: the engine's own name.
    `api_keys`: any of them opens every route; empty: no key is asked for, which only a loopback `host` allows unless
    `allow_unauthenticated`. `allowed_hosts`: names in a Host header that are let in beside the loopback ones;
    `allowed_origins`: web pages that may ask. `max_queued_tokens`: prompt tokens that may wait; None: any number.
    `tls_cert`, `tls_key`: PEM files. `otlp_traces_endpoint`: where OpenTelemetry spans go. `is_warmed_up`: whether the
    model runs once before requests are taken.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_unauthenticated: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 60.0
    max_queued_tokens: int | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    otlp_traces_endpoint: str | None = None
    is_warmed_up: bool = True
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise OptionError("--host is empty: 127.0.0.1 is this machine alone, 0.0.0.0 every address that it has")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port {self.port} must be between 0 (any free port) and 65535")
        if self.max_body_bytes < 1:
            raise OptionError(f"--max-body-bytes {self.max_body_bytes} must be at least 1")
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise OptionError(f"--shutdown-timeout {self.shutdown_timeout_s} must be 0 or more seconds")
        if not 0 < self.body_timeout_s < float("inf"):
            raise OptionError(f"body_timeout_s={self.body_timeout_s} must be more than 0 seconds")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise OptionError(f"--max-queued-tokens {self.max_queued_tokens} must be at least 1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key go together")
        for origin in self.allowed_origins:
            if not re.fullmatch(r"https?://[^/\s*]+", origin):
                raise OptionError(f"--allowed-origin {origin} must be like https://example.org, without a path")
        for name in self.allowed_hosts:
            if not re.fullmatch(r"[^/\s:*]+|[0-9a-f:]+", name):
                raise OptionError(f"--allowed-host {name!r} must be a name like box.lan, without a scheme and a port")
        if any(not name.strip() for name in self.served_model_names):
            raise OptionError("--served-model-name must not be empty")
        if not (self.is_loopback or self.api_keys or self.allow_unauthenticated):
            raise OptionError(
                f"--host {self.host} is reachable from other machines: give --api-key-file (or ${API_KEY_VARIABLE}), "
                "or say --allow-unauthenticated"
            )

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_api_keys(path: Path | None, variable: str | None) -> tuple[str, ...]:
    """Keys of a file (one a line, `#` begins a comment line) and of the environment (several with commas between).

    Raises OptionError for a file that cannot be read or holds none, and for a key with blanks or odd characters.
    """
    keys: list[str] = []
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise OptionError(f"--api-key-file {path} cannot be read: {reason}") from error
        keys += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise OptionError(f"--api-key-file {path} holds no key: write one a line")
    if variable is not None:
        from_variable = [key.strip() for key in variable.split(",") if key.strip()]
        if not from_variable:
            raise OptionError(f"${API_KEY_VARIABLE} is set but holds no key: unset it or give one")
        keys += from_variable
    for number, key in enumerate(keys, 1):
        # the key itself stays out of the message: it would end in a log
        if not key.isascii() or not key.isprintable() or " " in key:
            raise OptionError(f"API key number {number} must be printable ASCII without blanks")
    return tuple(dict.fromkeys(keys))
