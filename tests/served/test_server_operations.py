"""Running a server: who may ask from where, bounds, logs, traces, the status page, and what happens when it fails."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from pocketllm.engine.lifecycle.request import FinishReason
from pocketllm.engine.serving.apis.openapi import openapi_document
from pocketllm.engine.serving.app import create_app
from pocketllm.engine.serving.protocol import ChatBody, CompletionBody
from pocketllm.engine.serving.run import http_server, warm_up
from pocketllm.engine.serving.settings import ServerSettings
from pocketllm.engine.serving.transport import request_log
from pocketllm.engine.serving.watching.tracing import check_tracing
from pocketllm.errors import MachineError, OptionError
from tests.served.conftest import Command, Served, http_request, load_served, until
from tests.served.scripted import ScriptedEngine, slow

COMPLETIONS = "/v1/completions"
PAGE = "https://page.example"
DISK_FULL = Path("/dev/full")


# -- who may ask
def test_a_page_that_was_named_may_ask_and_read_and_no_other(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine(), ServerSettings(allowed_origins=(PAGE,), api_keys=("key",)))
    key = {"authorization": "Bearer key"}

    preflight = server.client.options(COMPLETIONS, headers={"origin": PAGE, "access-control-request-method": "POST"})
    answer = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=key | {"origin": PAGE})
    refused = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=key | {"origin": "https://evil.example"})

    assert preflight.status_code == 204
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert [one.headers["access-control-allow-origin"] for one in (preflight, answer)] == [PAGE, PAGE]
    assert answer.headers["vary"] == "origin"
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"origin": PAGE}).status_code == 401


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl-missing")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_with_a_certificate_https_is_served(serve: Callable[..., Served], tls: tuple[Path, Path]) -> None:
    server = serve(ScriptedEngine(), ServerSettings(tls_cert=tls[0], tls_key=tls[1]))

    assert server.url.startswith("https://")
    assert server.complete("hello")["choices"][0]["text"] == "hello"


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path, tls: tuple[Path, Path]) -> None:
    with pytest.raises(OptionError, match="go together"):
        ServerSettings(tls_cert=tls[0])
    empty, other, damaged = (tmp_path / name for name in ("empty", "other", "damaged"))
    empty.touch()
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", other],
        check=True,
        capture_output=True,
    )
    damaged.write_text(tls[0].read_text().replace("M", "N"))
    for cert, key, fault in (
        (tls[1], tls[1], f"--tls-cert {tls[1]} holds no PEM block of a certificate"),
        (empty, tls[1], f"--tls-cert {empty} holds no"),
        (tmp_path / "none", tls[1], f"--tls-cert {tmp_path / 'none'}: No such file"),
        (tls[0], tls[0], f"--tls-key {tls[0]} holds no PEM block of a private key"),
        (tls[0], other, f"the key in {other} does not belong to"),
        (damaged, tls[1], f"a PEM block in {damaged} or"),
    ):
        with pytest.raises(OptionError, match=re.escape(f"cannot be used: {fault}")):
            http_server(None, ServerSettings(tls_cert=cert, tls_key=key))  # type: ignore[arg-type]  # not reached


@pytest.mark.parametrize("origin", ["*", "https://a/b", "page.example", "", "null"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(OptionError, match="allowed-origin"):
        ServerSettings(allowed_origins=(origin,))


# -- bounds
def test_an_idle_connection_is_kept_longer_than_clients_keep_it() -> None:
    clients_s = httpx.Limits().keepalive_expiry

    assert clients_s is not None
    assert http_server(create_app(None, ServerSettings())).config.timeout_keep_alive > 2 * clients_s


def test_a_body_that_does_not_come_is_408(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine(), ServerSettings(body_timeout_s=0.05))
    whole = http_request(COMPLETIONS, {"prompt": "hello"})
    with server.raw(whole[:-5]) as connection:
        answer = connection.recv(65536)

    assert answer.split()[1] == b"408"
    assert server.complete("a")["choices"][0]["text"] == "a"


def test_prompt_tokens_that_wait_are_bounded_and_an_empty_queue_takes_any_prompt(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    gate = threading.Event()
    engine.loop.submit = waiting_until(gate, engine.loop.submit)  # type: ignore[method-assign]  # replaced for this test
    server = serve(engine, ServerSettings(max_queued_tokens=20))
    first = threading.Thread(target=lambda: server.complete("x" * 100))
    first.start()
    until(lambda: len(server.state.in_flight) == 1)

    refused = server.post(COMPLETIONS, prompt="abc")
    gate.set()
    first.join()

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert refused.headers["retry-after"]
    assert "max_queued_tokens=20" in refused.json()["error"]["message"]
    assert server.complete("y" * 50)["choices"][0]["text"] == "y" * 16


def waiting_until(gate: threading.Event, submit: Callable[..., None]) -> Callable[..., None]:
    """Submits once the gate is open."""

    def late(request: Any, sink: Any) -> None:
        threading.Thread(target=lambda: (gate.wait(10), submit(request, sink)), daemon=True).start()

    return late


# -- warm-up
def test_the_model_runs_once_before_it_is_ready_and_leaves_nothing_behind(tiny_gguf: Path) -> None:
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.options import EngineOptions

    with load_engine(EngineOptions(model=str(tiny_gguf), threads=1)) as engine:
        warm_up(engine)
        stats = engine.loop.stats()

        assert stats.num_steps >= 2
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_running == stats.num_waiting == 0


def test_every_number_of_requests_that_steps_are_made_for_runs_once_and_leaves_nothing_behind(tiny_gguf: Path) -> None:
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.options import EngineOptions

    with load_engine(EngineOptions(model=str(tiny_gguf), threads=1, max_num_seqs=4)) as engine:
        engine.plan = replace(engine.plan, step_widths=(1, 2, 4))
        widths: list[int] = []
        step = engine.loop.step

        def watched() -> bool:
            widths.append(engine.loop.stats().num_running)
            return step()

        engine.loop.step = watched  # type: ignore[method-assign]  # watched in this test
        warm_up(engine)
        stats = engine.loop.stats()

    assert {1, 2, 4} <= set(widths)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0


def test_a_backend_that_captures_steps_is_warmed_up_for_every_kind_of_draw(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.options import EngineOptions

    with load_engine(EngineOptions(model=str(tiny_gguf), threads=1)) as engine:
        asked: list[Any] = []
        submit, stats = engine.loop.submit, engine.loop.stats

        def watched(request: Any, sink: Any) -> None:
            asked.append(request.params)
            submit(request, sink)

        monkeypatch.setattr(engine.loop, "submit", watched)
        monkeypatch.setattr(engine.loop, "stats", lambda: replace(stats(), num_compiles=1))  # as of a GPU
        warm_up(engine)

    assert [(params.is_greedy, params.top_p < 1) for params in asked] == [(False, False), (True, False), (False, True)]


def test_a_model_that_does_not_run_is_told_instead_of_served() -> None:
    class Broken:
        def submit(self, request: Any, sink: Any) -> None:
            from pocketllm.engine.lifecycle.request import FinishEvent

            sink(FinishEvent("r", FinishReason.ERROR, "", 1, 0, 0, request.times, 0, "the forward pass failed"))

        def step(self) -> bool:
            return False

        def reset_prefix_cache(self) -> bool:
            return True

    engine = ScriptedEngine()
    engine.loop = Broken()  # type: ignore[assignment]  # replaced for this test
    with pytest.raises(MachineError, match="does not run: the forward pass failed"):
        warm_up(engine)


# -- logs
@pytest.fixture
def logging_kept() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pocketllm")
    before = root.handlers[:], root.level, own.level
    yield
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before[0], before[1]
    own.setLevel(before[2])


def test_a_log_line_names_a_request_and_its_counts_and_never_its_texts(
    serve: Callable[..., Served], tmp_path: Path, logging_kept: None
) -> None:
    request_log.set_up_logging("info", "json", tmp_path / "log")
    server = serve(ScriptedEngine())
    server.client.post(COMPLETIONS, json={"prompt": "very secret", "max_tokens": 5}, headers={"x-request-id": "r 1!"})
    server.stream(COMPLETIONS, prompt="very secret")
    server.post(COMPLETIONS, prompt="very secret", temperature="very secret")
    server.client.get("/health")
    until(lambda: len((tmp_path / "log").read_text().splitlines()) == 3)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    assert [line["status"] for line in lines] == [200, 200, 400]
    assert lines[0]["request_id"] == "r1"
    assert [lines[0][name] for name in ("prompt_tokens", "completion_tokens", "finish_reasons")] == [11, 5, ["length"]]
    assert lines[1]["is_streamed"]
    assert 0 < lines[1]["ttft_s"] <= lines[1]["total_s"]
    assert "secret" not in (tmp_path / "log").read_text()


def test_a_full_disk_is_said_once_and_requests_go_on(
    serve: Callable[..., Served], logging_kept: None, capfd: pytest.CaptureFixture[str]
) -> None:
    if not DISK_FULL.exists():
        pytest.skip("dev-full-missing")
    request_log.set_up_logging("info", "text", DISK_FULL)
    server = serve(ScriptedEngine())
    for _ in range(3):
        server.complete("a")
    until(lambda: not server.state.in_flight)

    said = capfd.readouterr().err
    assert said.count("cannot be written: No space left on device") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [("loud", "text", None), ("info", "xml", None), ("info", "text", "no/such/folder")])
def test_a_log_that_cannot_be_set_up_is_refused(words: Any, logging_kept: None) -> None:
    with pytest.raises(OptionError, match="--log-"):
        request_log.set_up_logging(words[0], words[1], words[2] and Path(words[2]))


# -- traces
def test_a_span_is_sent_for_a_request_in_the_clients_trace(serve: Callable[..., Served]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="otel-missing: the otel extra")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    server = serve(ScriptedEngine(), ServerSettings(otlp_traces_endpoint=address))
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "traced"}
    server.client.post(COMPLETIONS, json={"prompt": "very secret"}, headers=headers)
    until(lambda: bool(bodies))
    collector.shutdown()

    assert bytes.fromhex(trace) in bodies[0]
    assert b"traced" in bodies[0]
    assert b"POST /v1/completions" in bodies[0]
    assert b"secret" not in bodies[0]


def test_traces_that_cannot_be_sent_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="not an http address"):
        check_tracing("somewhere")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OptionError, match=r"pocketllm\[otel\]"):
        check_tracing("http://127.0.0.1:4318/v1/traces")


# -- the page and the description
def test_the_status_page_runs_its_own_script_and_no_other(module_server: Served) -> None:
    page = module_server.client.get("/")

    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "")  # nothing is loaded from elsewhere


def test_the_status_tells_what_ran_without_texts(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine())
    server.complete("very secret", max_tokens=4)
    server.chat("very secret")
    status = server.client.get("/status")

    assert "secret" not in status.text
    assert [one["path"] for one in status.json()["recent"]] == [COMPLETIONS, "/v1/chat/completions"]
    assert status.json()["recent"][0]["completion_tokens"] == 4
    assert status.json()["stats"]["generation_tokens"] == 4 + len("user: very secret\n")
    assert status.json()["plan"] == server.engine.plan.as_dict()


def test_the_description_names_every_route_and_field(module_server: Served) -> None:
    document = module_server.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    assert document == json.loads(json.dumps(openapi_document()))
    for model in (ChatBody, CompletionBody):
        assert set(model.model_fields) <= set(schemas[model.__name__]["properties"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            response = module_server.client.request(method, path.replace("{id}", "scripted"), json={"nothing": None})
            assert str(response.status_code) in operation["responses"], (path, response.text)


FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
DESCRIBED: list[tuple[str, dict[str, Any]]] = [
    *(
        (COMPLETIONS, {"prompt": prompt})
        for prompt in ("a", "", [97], [], [[97], "b"], [[]], [-1], 5, None, ["a"] * 129, [True])
    ),
    *(
        (COMPLETIONS, {"prompt": "a", name: value})
        for name, value in (
            ("n", 16),
            ("n", 17),
            ("stop", "x"),
            ("stop", ["x"] * 17),
            ("stop", [""]),
            ("temperature", 101),
            ("top_p", 0),
            ("repetition_penalty", 1e-300),
            ("logit_bias", {"5": 100}),
            ("logit_bias", {"x": 1}),
            ("logprobs", 21),
            ("mirostat", 1),
            ("mirostat", 2),
            ("best_of", 1),
            ("best_of", 2),
            ("user", {"any": "thing"}),
            ("whatever", None),
            ("whatever", 0),
            ("min_tokens", -1),
            ("response_format", {"type": "text"}),
            ("response_format", {"type": "xml"}),
            ("structured_outputs", {"regex": "a+"}),
            ("structured_outputs", {"regex": "a+", "choice": ["a"]}),
        )
    ),
    *(
        ("/v1/chat/completions", {"messages": [message]})
        for message in (
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": [{"type": "text"}]},
            {"role": "user"},
            {"role": "wizard", "content": "a"},
            {"role": "user", "content": "a", "tool_calls": [FUNCTION]},
            {"role": "tool", "content": "a", "tool_call_id": "x"},
            {"role": "user", "content": "a", "tool_call_id": "x"},
            {"role": "user", "content": "a", "whatever": 1},
        )
    ),
    *(
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION]} | more)
        for more in (
            {},
            {"tool_choice": "required"},
            {"tool_choice": "perhaps"},
            {"tools": [{"type": "function"}]},
            {"tools": [{"type": "function", "function": {"name": "no blank"}}]},
        )
    ),
]


@pytest.mark.parametrize(("path", "body"), DESCRIBED, ids=lambda value: str(value)[:70])
def test_a_body_is_right_by_the_description_where_it_is_served(
    module_server: Served, path: str, body: dict[str, Any]
) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="package-missing: jsonschema")
    document = openapi_document()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    status = module_server.post(path, **body).status_code

    assert status == (200 if jsonschema.Draft202012Validator(whole).is_valid(body) else 400)


# -- the command
def test_a_file_says_what_flags_would_and_flags_win(
    run_command: Callable[..., Command], tiny_gguf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        f'model = "{tiny_gguf}"\nport = 0\nthreads = 1\nserved-model-name = ["a", "b"]\nmax_model_len = 64\n'
    )
    command = run_command("--config", str(file), "--max-model-len", "128", "--log-level", "info")
    url = command.wait_ready()
    cards = httpx.get(url + "/v1/models", trust_env=False).json()["data"]
    command.process.send_signal(signal.SIGTERM)

    assert [(card["id"], card["max_model_len"]) for card in cards] == [("a", 128), ("b", 128)]
    assert command.end() == 0
    assert any("GET '/v1/models' 200" in line for line in command.lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot = 5", "'prot' is no option"),
        ("= 5", "is not TOML"),
        ("[port]\nx = 1", "port is a table"),
        ('port = "x"', "serve.toml: port cannot be 'x'"),
        (None, "cannot be read"),
        ('served-model-name = ""', "--served-model-name must not be empty"),  # one text is a list of it
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    from typer.testing import CliRunner

    from pocketllm.cli.main import app

    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])

    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_model_file_cut_short_while_it_is_served_changes_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_gguf, path)
    server = load_served(path)
    try:
        before = server.complete("Hello", temperature=0)["choices"][0]["text"]
        os.truncate(path, 100)

        assert server.complete("Hello", temperature=0)["choices"][0]["text"] == before
        assert server.complete("Zebra Ωmega", temperature=0)["choices"][0]["finish_reason"] in ("stop", "length")
    finally:
        server.stop()
        server.engine.close()


def test_a_client_that_is_killed_frees_the_engine(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.005)
    server = serve(engine)
    code = (
        "import socket, sys\n"
        f"connection = socket.create_connection(('127.0.0.1', {server.port}))\n"
        f"connection.sendall({http_request(COMPLETIONS, {'prompt': 'a', 'max_tokens': 4000, 'stream': True})!r})\n"
        "connection.recv(1)\nprint('reading', flush=True)\n"
        "while True: connection.recv(65536)\n"
    )
    client = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == b"reading\n"
    assert engine.loop.active
    client.kill()
    client.wait()

    until(lambda: not engine.loop.active, 5)
    assert server.state.in_flight == set()
    assert server.metric("cancellations_total") == 1


def test_metrics_add_up_under_load(tiny_server: Served) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    before = {name: tiny_server.metric(name) for name in names}
    seen: list[float] = []
    answers: list[dict[str, Any]] = []

    def ask(number: int) -> None:
        with httpx.Client(base_url=tiny_server.url, timeout=60, trust_env=False) as client:
            body = {"prompt": [40 + number, 41, 42], "max_tokens": 30, "ignore_eos": True, "n": 1 + number % 3}
            answers.append(client.post(COMPLETIONS, json=body).json())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(tiny_server.metric("num_requests_running") + tiny_server.metric("num_requests_waiting"))
        time.sleep(0.002)
    usage = [answer["usage"] for answer in answers]
    choices = sum(len(answer["choices"]) for answer in answers)

    assert max(seen) > 1
    assert tiny_server.metric(names[1]) - before[names[1]] == sum(one["completion_tokens"] for one in usage)
    assert tiny_server.metric(names[0]) - before[names[0]] == 3 * choices
    assert tiny_server.metric(names[2]) - before[names[2]] == choices
    assert [tiny_server.metric(name) for name in ("num_requests_running", "num_requests_waiting")] == [0, 0]
    assert tiny_server.metric("kv_cache_usage_perc") == 0


def test_connections_that_say_nothing_keep_nobody_out(module_server: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", module_server.port)) for _ in range(64)]

    assert module_server.complete("a")["choices"][0]["text"] == "a"
    for connection in idle:
        connection.close()


def test_the_dashboard_asks_for_series_that_exist(tiny_server: Served) -> None:
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"pocketllm:(\w+)", target["expr"])
    }
    told = set(re.findall(r"^pocketllm:(\w+)\{", tiny_server.client.get("/metrics").text, re.MULTILINE))

    assert len(asked) > 15
    assert asked <= told
