"""Launching and stopping a server: a subprocess on loopback, its log kept, ended by its own process id."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pocketllm.errors import MachineError, NotJudgedError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 12
PROGRAM = "from pocketllm.cli.main import app; app(prog_name='pocketllm')"
URL = re.compile(r"https?://(?:127\.0\.0\.1|localhost|\[::1\]):[0-9]+")


def pocketllm_command(*words: str) -> list[str]:
    """This very package under this very interpreter, as an argument list."""
    return [sys.executable, "-c", PROGRAM, *words]


def serve_command(options: Sequence[str] = ()) -> list[str]:
    """`pocketllm serve` with these options on a free loopback port."""
    return pocketllm_command("serve", *options, "--port=0")


class Server:
    """A server that was launched and has said it is ready; a context manager that stops it."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start `command`; its address is read from its own log."""
        self._log = tempfile.NamedTemporaryFile(prefix="pocketllm-serve-", suffix=".log", delete=False)  # noqa: SIM115
        self.url = ""
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise MachineError(f"cannot start {Path(command[0]).name}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_ready(self) -> "Server":
        """Block until it answers 200; NotJudgedError with the end of its log when it dies or takes too long."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise NotJudgedError(
                    f"the server ended with code {self.exit_code} before it was ready{self.log_tail()}"
                )
            self.url = self.url or self._announced_url()
            if self.url and self._is_ready():
                return self
            time.sleep(0.05)
        raise NotJudgedError(f"the server was not ready after {READY_TIMEOUT_S:g} s{self.log_tail()}")

    def _announced_url(self) -> str:
        found = URL.search(self.log())
        return found.group() if found else ""

    def _is_ready(self) -> bool:
        import httpx

        try:
            return httpx.get(self.url + "/ready", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        """All that it has printed so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, ready to follow a sentence."""
        lines = self.log().splitlines()[-LOG_TAIL_LINES:]
        return "; the end of its log:\n  " + "\n  ".join(lines) if lines else "; it printed nothing"

    def terminate(self) -> None:
        """Ask it to drain and end (SIGTERM)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Its exit code, None when it still runs after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End it, kindly first; returns its exit code and deletes the log."""
        if self.exit_code is None:
            self.terminate()
        code = self.wait(timeout_s)
        if code is None:
            self._process.kill()
            code = self._process.wait()
        self._log.close()
        with contextlib.suppress(OSError):
            os.unlink(self._log.name)
        return code

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch(command: Sequence[str]) -> Server:
    """Start a server and wait until it is ready; one that never becomes so is stopped, and NotJudgedError says why."""
    server = Server(command)
    try:
        return server.wait_ready()
    except BaseException:
        server.stop(timeout_s=5)
        raise
