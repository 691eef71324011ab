"""A server's life as a process: bind, answer while loading, serve, drain on the first signal, end on the second."""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.serving.app import create_app
from pocketllm.engine.serving.server import Phase, Server
from pocketllm.engine.serving.settings import ServedEngine, ServerSettings
from pocketllm.engine.serving.transport.aside import share_one_heap
from pocketllm.engine.serving.transport.malformed import ReadableRefusals
from pocketllm.errors import MachineError, OptionError

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
BACKLOG = 128
FLUSH_S = 2.0
"""What answers may take to leave once their requests have ended."""
SWITCH_S = 0.001
"""How long reading a request may keep the engine's thread from its next step, before Python has it yield."""
KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than clients keep theirs (httpx 5 s): who closes first must be the one that
sends, or a request meets a closing connection and fails."""
ECHO_S = 0.3
"""Launchers forward a signal that the whole process group got as well: so soon after the first it is the same one."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, taken before any weight is read. Raises MachineError when it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MachineError(f"--host {host} is not an address of this machine: {error.strerror}") from error
    taken = socket.socket(family, kind, proto)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
    except OSError as error:
        taken.close()
        raise MachineError(f"cannot listen on {host} port {port}: {bind_advice(error)}") from error
    taken.setblocking(False)
    return taken


def bind_advice(error: OSError) -> str:
    """Why a port was refused and what to do."""
    if error.errno == errno.EADDRINUSE:
        return "it is in use; choose another --port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return "this user may not; choose a --port above 1023"
    return error.strerror or str(error)


def url(taken: socket.socket, has_tls: bool = False) -> str:
    """Where a listening socket is reached."""
    host, port = taken.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handling: draining is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: "FastAPI", settings: ServerSettings | None = None) -> QuietServer:
    """The HTTP server for an application; only warnings and errors are logged. Raises OptionError for TLS files that
    cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=ReadableRefusals,
        log_level="warning",
        access_log=False,
        log_config=None,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,  # type: ignore[arg-type]  # declared int, used as seconds of any kind
        ssl_certfile=settings.tls_cert if settings else None,
        ssl_keyfile=settings.tls_key if settings else None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise OptionError(f"--tls-cert and --tls-key cannot be used: {tls_fault(config, error)}") from error
    return QuietServer(config)


def tls_fault(config: uvicorn.Config, refused: OSError) -> str:
    """Which of the two files was refused, and why: OpenSSL names neither."""
    files = (("--tls-cert", config.ssl_certfile, "CERTIFICATE"), ("--tls-key", config.ssl_keyfile, "PRIVATE KEY"))
    for flag, path, kind in files:
        try:
            content = Path(path or "").read_bytes()
        except OSError as error:
            return f"{flag} {path}: {error.strerror}"
        if f"{kind}-----".encode() not in content:
            return f"{flag} {path} holds no PEM block of a {kind.lower()}"
    reason = getattr(refused, "reason", None) or refused.strerror or refused
    if reason == "KEY_VALUES_MISMATCH":
        return f"the key in {config.ssl_keyfile} does not belong to the certificate in {config.ssl_certfile}"
    return f"a PEM block in {config.ssl_certfile} or {config.ssl_keyfile} is damaged ({reason}): copy both again"


WARM_UP_TOKENS = 4
"""What draws tokens is captured once logits have come from the same place twice."""
WARM_UP_KINDS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.0}, {"top_p": 0.95})
"""Each is drawn by steps of its own, where a backend captures them: by temperature alone, the likeliest, sorted."""


def warm_up(engine: ServedEngine) -> None:
    """Run short requests before any other, as many at once as there are sizes of steps: what the first ones have to
    touch, compile or capture is there then.

    The prefix cache does not keep them.
    """
    for width in engine.plan.step_widths:
        for how in WARM_UP_KINDS:
            run_at_once(engine, width, how)
            if not engine.loop.stats().num_compiles:
                break  # what is the same for all kinds has run
    engine.loop.reset_prefix_cache()


def run_at_once(engine: ServedEngine, width: int, how: dict[str, Any]) -> None:
    """So many requests of their own. how: their sampling. Raises MachineError when the model does not run."""
    ends: list[Event] = []
    longest = engine.plan.limits.max_model_len
    params = SamplingParams(max_tokens=max(min(WARM_UP_TOKENS, longest - 1), 1), ignore_eos=True, seed=0, **how)
    for number in range(width):
        name = f"warm-up {number} of {width}"
        prompt = [0] * max(min(16, longest - WARM_UP_TOKENS), 1)
        engine.loop.submit(Request(name, prompt, params, cache_salt=name), ends.append)
    while engine.loop.step():
        pass
    for end in ends:
        if isinstance(end, FinishEvent) and end.reason is FinishReason.ERROR:
            raise MachineError(f"the model was loaded but does not run: {end.error}")


def ready(engine: ServedEngine, warm_up_s: float) -> str:
    """What was made before the first request, and how long that took."""
    widths = ", ".join(map(str, engine.plan.step_widths))
    return f"made steps of {widths} requests ready in {warm_up_s:.1f} s: {engine.loop.stats().num_compiles} graphs"


class Process:
    """One served model, from the bound socket to the exit code."""

    def __init__(
        self,
        taken: socket.socket,
        settings: ServerSettings,
        load: Callable[[], ServedEngine],
        say: Callable[[str], None],
    ) -> None:
        self._taken = taken
        self._settings = settings
        self._load = load
        self._say = say
        self._app = create_app(None, settings)
        self._server: Server = self._app.state.server
        self._http = http_server(self._app, settings)
        self._signals = 0
        self._signaled_s = -ECHO_S
        self._drain: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def run(self) -> int:
        """Serve until a signal; the exit code. What loading raises is raised here, once the socket is closed."""
        sys.setswitchinterval(SWITCH_S)
        share_one_heap()
        asyncio.run(self._main())
        self._server.close()
        engine = self._server.engine
        if engine is not None:
            engine.loop.stop(0.0)
            engine.close()
        if self._failure is not None:
            raise self._failure
        return EXIT_INTERRUPTED if self._signals > 1 else 0

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        # two are as fast as more on the machines this is for
        loop.set_default_executor(ThreadPoolExecutor(2, "pocketllm-read"))

        def on_signal(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the process is ending already
                loop.call_soon_threadsafe(self._on_signal)

        # not the loop's own handlers: those are gone once it closes, and a late signal would cut the ending short
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        # a daemon thread, because a load that hangs must not keep a told process from ending
        threading.Thread(target=self._load_engine, args=(loop,), name="pocketllm-load", daemon=True).start()
        await self._http.serve(sockets=[self._taken])

    def _load_engine(self, loop: asyncio.AbstractEventLoop) -> None:
        engine: ServedEngine | None
        try:
            engine = self._load()
            if self._settings.is_warmed_up:
                self._warm_up(engine)
            # what a model is made of lives to the end: a full collection that walks it stops every stream for 50 ms
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self._failure = error
            engine = None
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(self._loaded, engine)

    def _warm_up(self, engine: ServedEngine) -> None:
        start_s = time.perf_counter()
        warm_up(engine)
        if len(engine.plan.step_widths) > 1:
            self._say(ready(engine, time.perf_counter() - start_s))

    def _loaded(self, engine: ServedEngine | None) -> None:
        if engine is None:
            self._stop()
            return
        self._server.attach(engine)
        self._say(f"serving {', '.join(self._server.names)}")

    def _stop(self) -> None:
        self._http.should_exit = True

    def _on_signal(self) -> None:
        now_s = time.monotonic()
        if now_s - self._signaled_s < ECHO_S:
            return
        self._signaled_s = now_s
        self._signals += 1
        if self._signals > 1:
            self._say("ending now")
            self._abandon()
            self._http.force_exit = True
            self._stop()
            return
        self._server.phase = Phase.DRAINING
        num_open = len(self._server.in_flight)
        if num_open:
            self._say(f"draining {num_open} request{'s' * (num_open > 1)}; once more to end now")
        self._drain = asyncio.get_running_loop().create_task(self._drain_then_stop())

    async def _drain_then_stop(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._settings.shutdown_timeout_s
        while self._server.in_flight and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.05)
        if self._server.in_flight:
            self._say(
                f"{len(self._server.in_flight)} unfinished after {self._settings.shutdown_timeout_s:g} s: cancelled"
            )
            for generation in list(self._server.in_flight):
                generation.cancel()
        self._stop()

    def _abandon(self) -> None:
        for generation in list(self._server.in_flight):
            generation.abandon()
