"""A server's life: loading, ready, draining, gone; and what it counts on the way."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.serving.app import Phase
from pocketllm.engine.serving.run import bind
from pocketllm.engine.serving.settings import ServerSettings
from pocketllm.errors import MachineError, OptionError
from tests.served.conftest import Command, Served, until
from tests.served.scripted import ScriptedEngine, slow


def test_a_server_answers_health_while_its_model_loads(serve: Callable[..., Served]) -> None:
    server = serve(ScriptedEngine(), is_loaded=False)

    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 503
    for response in (server.client.get("/v1/models"), server.post("/v1/completions", prompt="a")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "loading"
        assert response.headers["retry-after"]

    server.state.attach(server.engine)

    assert server.client.get("/ready").status_code == 200
    assert server.complete("a")["choices"][0]["text"] == "a"


def test_a_draining_server_takes_nothing_new_and_finishes_what_runs(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.01)
    server = serve(engine)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete("a", max_tokens=30)))
    thread.start()
    until(lambda: len(engine.loop.active) == 1)
    server.state.phase = Phase.DRAINING

    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    refused = server.post("/v1/completions", prompt="a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    thread.join()
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    assert server.metric("admission_rejections_total", reason="draining") == 1


def test_metrics_count_what_happened(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    server = serve(engine)
    server.complete("hello")
    server.complete("hello", max_tokens=2, n=2)
    server.post("/v1/completions", prompt="a", temperature="hot")

    assert server.metric("prompt_tokens_total") == 15
    assert server.metric("generation_tokens_total") == 9
    assert server.metric("request_success_total", finished_reason="stop") == 1
    assert server.metric("request_success_total", finished_reason="length") == 2
    assert server.metric("request_success_total", finished_reason="error") == 0
    assert server.metric("admission_rejections_total", reason="invalid") == 1
    assert server.metric("num_requests_running") == 0
    assert server.metric("time_to_first_token_seconds_count") == 3
    assert server.metric("inter_token_latency_seconds_count") == 6
    assert server.metric("e2e_request_latency_seconds_count") == 3
    assert 0 < server.metric("time_to_first_token_seconds_sum") <= server.metric("e2e_request_latency_seconds_sum")
    assert server.metric("request_queue_time_seconds_sum") + server.metric("request_prefill_time_seconds_sum") == (
        pytest.approx(server.metric("time_to_first_token_seconds_sum"), abs=1e-6)
    )


STEMS = """
num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total num_compiles_total
prompt_tokens_total generation_tokens_total request_success_total cancellations_total admission_rejections_total
time_to_first_token_seconds_count inter_token_latency_seconds_count request_time_per_output_token_seconds_count
e2e_request_latency_seconds_count request_queue_time_seconds_count request_prefill_time_seconds_count
request_decode_time_seconds_count
"""


def test_every_series_is_there_from_the_start_and_what_is_not_measured_is_absent(module_server: Served) -> None:
    for stem in STEMS.split():
        module_server.metric(stem)
    with pytest.raises(KeyError):
        module_server.metric("prefix_cache_queries_total")


def test_the_running_gauge_is_read_at_the_scrape(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    engine.loop.script = slow(0.01)
    server = serve(engine)
    thread = threading.Thread(target=lambda: server.complete("a", max_tokens=50, n=2))
    thread.start()
    until(lambda: len(engine.loop.active) == 2)

    assert server.metric("num_requests_running") == 2
    thread.join()
    assert server.metric("num_requests_running") == 0


def test_a_bug_of_ours_is_a_500_without_a_traceback_and_the_server_lives_on(serve: Callable[..., Served]) -> None:
    engine = ScriptedEngine()
    server = serve(engine)
    engine.loop.refusal = RuntimeError("at /home/somebody/code.py line 3")

    response = server.post("/v1/completions", prompt="a")
    assert response.status_code == 500
    assert "somebody" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    engine.loop.refusal = None
    assert server.complete("a")["choices"][0]["text"] == "a"


def test_a_port_in_use_is_refused_in_one_sentence() -> None:
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(MachineError, match=rf"^cannot listen on 127\.0\.0\.1 port {port}: it is in use"):
        bind("127.0.0.1", port)
    taken.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(MachineError):
        bind("192.0.2.1", 0)
    with pytest.raises(MachineError, match="not an address"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    "values", [{"port": -1}, {"port": 65536}, {"shutdown_timeout_s": -1}, {"shutdown_timeout_s": float("nan")}]
)
def test_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServerSettings(**values)


# -- the command, as a process ---------------------------------------------------------------------------------------
def test_the_command_serves_and_drains_at_sigterm(run_command: Callable[..., Command], tiny_gguf: Path) -> None:
    command = run_command("--model", str(tiny_gguf), "--port", "0", "--threads", "1")
    url = command.wait_ready()
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        rest = list(lines)

    assert "data: [DONE]" in rest
    assert sum('"finish_reason":"length"' in line for line in rest) == 1
    assert command.end() == 0
    assert command.process.stdout.read() == ""
    assert not [line for line in command.lines if "Traceback" in line or "uvicorn" in line.lower()], command.lines
    assert any(line.startswith("plan: llama on ") for line in command.lines)


LOADING = """
import sys, time, weakref
import pocketllm.engine.load as load
from pocketllm.cli.main import app

class Mapping:
    "What a model's file is read through."

def load_engine(*_):
    mapping = Mapping()
    weakref.finalize(mapping, print, "unmapped under the load", file=sys.stderr)
    print("reading", file=sys.stderr, flush=True)
    while mapping:
        time.sleep(0.01)

load.load_engine = load_engine
app(["serve", "--port", "0"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_with_0_and_unmaps_nothing_under_the_load(number: signal.Signals) -> None:
    """The end of the interpreter did: the load, which reads in native code, then died of SIGSEGV now and then."""
    with subprocess.Popen([sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line == "reading\n":
                break
        process.send_signal(number)
        rest = process.stderr.read()

    assert (process.returncode, rest) == (0, "")


def test_a_second_signal_ends_the_command_at_once(run_command: Callable[..., Command], tiny_gguf: Path) -> None:
    command = run_command("--model", str(tiny_gguf), "--port", "0", "--threads", "1", "--max-num-seqs", "1")
    url = command.wait_ready()
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 16}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()  # kept: an iterator that is dropped closes the connection
        next(lines)
        command.process.send_signal(signal.SIGINT)
        until(lambda: any("draining" in line for line in command.lines))
        command.process.send_signal(signal.SIGINT)  # an echo of the first, as launchers make them
        time.sleep(0.4)
        assert command.process.poll() is None
        command.process.send_signal(signal.SIGINT)

        assert command.end() == 130
    assert any("ending now" in line for line in command.lines)
    assert not any("Traceback" in line for line in command.lines)


def test_requests_unfinished_at_the_timeout_are_cancelled(run_command: Callable[..., Command], tiny_gguf: Path) -> None:
    command = run_command(
        "--model", str(tiny_gguf), "--port=0", "--threads=1", "--max-num-seqs=1", "--shutdown-timeout=0"
    )
    url = command.wait_ready()
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 16}
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        command.process.send_signal(signal.SIGTERM)
        rest = list(lines)

    assert any('"code":"cancelled"' in line for line in rest)
    assert command.end() == 0


def test_a_port_in_use_ends_the_command_with_2_before_it_loads(
    run_command: Callable[..., Command], tiny_gguf: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = run_command("--model", str(tiny_gguf), "--port", str(port))

        assert command.end() == 2
    assert command.lines == [
        f"error: cannot listen on 127.0.0.1 port {port}: it is in use; choose another --port, or 0 for any free one"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--host", "0.0.0.0"), "--allow-unauthenticated"),
        (("--port", "70000"), "65535"),
        (("--api-key-file", "no-such-file"), "cannot be read"),
        (("--model", "no-such-model-at-all"), "no-such-model-at-all"),
        (("--model", "."), ""),
        (("--max-num-seqs", "0"), "--max-num-seqs 0"),
        (("--backend", "abacus"), "abacus"),
    ],
)
def test_what_cannot_be_done_ends_the_command_with_2_in_one_sentence(
    run_command: Callable[..., Command], words: tuple[str, ...], sentence: str
) -> None:
    command = run_command(*words, *([] if "--port" in words else ["--port", "0"]))

    assert command.end() == 2
    errors = [line for line in command.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not any("Traceback" in line for line in command.lines)


def test_a_script_may_block_a_request(serve: Callable[..., Served]) -> None:
    gate = threading.Event()

    def script(request: Request) -> Iterator[tuple[int, str]]:
        gate.wait(10)
        yield 97, "a"

    engine = ScriptedEngine()
    engine.loop.script = script
    server = serve(engine)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.complete("x")))
    thread.start()
    until(lambda: len(engine.loop.active) == 1)
    assert server.client.get("/health").status_code == 200
    gate.set()
    thread.join()

    assert answers[0]["choices"][0]["text"] == "a"
