"""Launching and stopping a server: a subprocess on loopback, its log kept, its process group ended and no other."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from pocketllm.errors import MachineError, NotJudgedError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 1 << 16
PROGRAM = "from pocketllm.cli.main import app; app(prog_name='pocketllm')"
PROGRAM_AT = f"import sys; sys.path.insert(0, sys.argv.pop(1)); {PROGRAM}"
"""The same of another checkout, whose folder is the first argument."""
URL = re.compile(r"https?://(?:127\.0\.0\.1|localhost|\[::1\]):[0-9]+")


def pocketllm_command(*words: str) -> list[str]:
    """This very package under this very interpreter, as an argument list."""
    return [sys.executable, "-c", PROGRAM, *words]


def serve_command(options: Sequence[str] = ()) -> list[str]:
    """`pocketllm serve` with these options on a free loopback port."""
    return pocketllm_command("serve", *options, "--port=0")


class Server:
    """A server that was launched and has said it is ready; a context manager that stops it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str = "",
        ready_path: str = "/ready",
        log_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float | None = None,
    ) -> None:
        """Start `command` in a process group of its own.

        url: where it will listen; without one, its address is read from its own log. ready_path: answers 200 once it
        can be asked. log_path: where what it prints is kept; without one, in a file that `stop` deletes. environment:
        instead of this process's own. ready_timeout_s: None is READY_TIMEOUT_S.
        """
        self._keeps_log = log_path is not None
        if log_path is None:
            log = tempfile.NamedTemporaryFile(prefix="pocketllm-serve-", suffix=".log", delete=False)  # noqa: SIM115  # open as long as the server
            self.log_path = Path(log.name)
        else:
            log = log_path.open("wb")  # type: ignore[assignment]  # both are binary files
            self.log_path = log_path
        self.url = url
        self._ready_path = ready_path
        self._ready_timeout_s = ready_timeout_s
        try:
            # its own group: ctrl-C is for us, and stopping it takes its workers too
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as error:
            self._delete_log()
            raise MachineError(f"cannot start {Path(command[0]).name}: {error.strerror}") from error
        finally:
            log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_ready(self) -> "Server":
        """Block until it answers 200; NotJudgedError with the end of its log when it dies or takes too long."""
        allowed_s = READY_TIMEOUT_S if self._ready_timeout_s is None else self._ready_timeout_s
        deadline = time.monotonic() + allowed_s
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise NotJudgedError(
                    f"the server ended with code {self.exit_code} before it was ready{self.log_tail()}"
                )
            self.url = self.url or self._announced_url()
            if self.url and self._is_ready():
                return self
            time.sleep(POLL_S)
        raise NotJudgedError(f"the server was not ready after {allowed_s:g} s{self.log_tail()}")

    def _announced_url(self) -> str:
        found = URL.search(self.log())
        return found.group() if found else ""

    def _is_ready(self) -> bool:
        import httpx

        try:
            return httpx.get(self.url + self._ready_path, timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        """All that it has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last lines of the log, ready to follow a sentence."""
        lines = self.log()[-LOG_TAIL_BYTES:].splitlines()[-LOG_TAIL_LINES:]
        return "; the end of its log:\n  " + "\n  ".join(lines) if lines else "; it printed nothing"

    def terminate(self) -> None:
        """Ask it to drain and end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, which is named after the process that we started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """Its exit code, None when it still runs after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """End it, kindly first, and whatever its group still holds; returns its exit code."""
        if self.exit_code is None:
            self.terminate()
        code = self.wait(timeout_s)
        # also after a clean end: a worker that outlived its parent would go on using the machine
        self._signal(signal.SIGKILL)
        if code is None:
            code = self._process.wait()
        self._delete_log()
        return code

    def _delete_log(self) -> None:
        if not self._keeps_log:
            self.log_path.unlink(missing_ok=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def launch(command: Sequence[str]) -> Server:
    """Start a server and wait until it is ready; one that never becomes so is stopped, and NotJudgedError says why."""
    return ready_or_stopped(Server(command))


def ready_or_stopped(server: Server) -> Server:
    """The server once it is ready; one that never becomes so is stopped before NotJudgedError says why."""
    try:
        return server.wait_ready()
    except BaseException:
        server.stop(timeout_s=5)
        raise
