"""Servers for tests: real uvicorn, loopback, a free port, in a thread of this process."""

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pocketllm.engine.serving.app import Server, create_app
from pocketllm.engine.serving.run import bind, http_server, url
from pocketllm.engine.serving.settings import ServerSettings
from tests.served.scripted import ScriptedEngine

WAIT_S = 20.0


class Served:
    """A running server and a client for it."""

    def __init__(self, engine: Any, settings: ServerSettings | None = None, is_loaded: bool = True) -> None:
        self.engine = engine
        socket_taken = bind("127.0.0.1", 0)
        self.port = socket_taken.getsockname()[1]
        settings = settings or ServerSettings()
        self.url = url(socket_taken, has_tls=settings.tls_cert is not None)
        app = create_app(engine if is_loaded else None, settings)
        self.state: Server = app.state.server
        self._http = http_server(app, settings)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._http.serve(sockets=[socket_taken])))
        self._thread.start()
        self.client = httpx.Client(
            base_url=self.url,
            timeout=60,
            trust_env=False,
            verify=ssl.create_default_context(cafile=settings.tls_cert) if settings.tls_cert else True,
        )
        until(lambda: self._http.started)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def metric(self, name: str, **labels: str) -> float:
        """One series of /metrics; KeyError when it is absent."""
        wanted = "".join(f'{key}="{value}"' for key, value in labels.items())
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"pocketllm:{name}{{") and wanted in line:
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def raw(self, data: bytes, timeout_s: float = 10.0) -> socket.socket:
        """A connection of our own, after sending `data`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)
        connection.sendall(data)
        return connection

    def stop(self) -> None:
        self.client.close()
        self.state.close()
        self._http.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for a condition that must come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.005)


def http_request(path: str, body: dict[str, Any], close: bool = False) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    connection = b"connection: close\r\n" if close else b""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    return head + connection + f"content-length: {len(data)}\r\n\r\n".encode() + data


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers that end with the test."""
    started: list[Served] = []

    def start(*args: Any, **keywords: Any) -> Served:
        started.append(Served(*args, **keywords))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def module_server() -> Iterator[Served]:
    """One scripted server for tests that leave its script alone."""
    server = Served(ScriptedEngine())
    yield server
    server.stop()


def load_served(path: Path, **options: Any) -> Served:
    """A server over a real checkpoint."""
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.options import EngineOptions

    return Served(load_engine(EngineOptions(model=str(path), threads=1, **options)))


@pytest.fixture(scope="package")
def tiny_server(tiny_gguf: Path) -> Iterator[Served]:
    """The random checkpoint, served."""
    server = load_served(tiny_gguf)
    yield server
    server.stop()
    server.engine.close()


@pytest.fixture(scope="package")
def smollm2_server(smollm2: Path) -> Iterator[Served]:
    """The default model, served."""
    server = load_served(smollm2)
    yield server
    server.stop()
    server.engine.close()


class Command:
    """`pocketllm serve` in a process of its own."""

    def __init__(self, *words: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POCKETLLM_API")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pocketllm", "serve", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def url(self) -> str:
        until(lambda: any("listening on" in line for line in self.lines) or self.process.poll() is not None)
        return next(line.split()[-1] for line in self.lines if line.startswith("listening on http"))

    def wait_ready(self) -> str:
        url = self.url()
        until(lambda: httpx.get(url + "/ready", trust_env=False).status_code == 200, 60)
        return url

    def end(self, timeout_s: float = 20) -> int:
        """The exit code, once it has ended by itself."""
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code


@pytest.fixture
def run_command() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command(*words))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
        command.end()
