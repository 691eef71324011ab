"""The two targets: a stream cut anywhere, peers' dialects over a real socket, and the engine on a tiny checkpoint."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.bench.arm import make_arms
from pocketllm.bench.latency import slot_values, ttft_s
from pocketllm.bench.scenarios.prompts import prompt_text
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget, StreamReader
from pocketllm.bench.targets.rig import api_key, has_tensors_of, open_rig
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import histogram
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import NotJudgedError, OptionError
from tests.asks import make_ask

ASK = Ask("x", (1, 2, 3, 4), "one two three four", 3)


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def choice(text: Any, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def usage(prompt: int = 4, out: int = 3, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": out, **more}}


OURS = [
    event(choice("", token_ids=[], prompt_token_ids=[1, 2, 3, 4])),
    event(choice("a", token_ids=[11])),
    b": keep-alive\n\n",
    event(choice("", token_ids=[12])),
    event(choice("bé", token_ids=[13])),
    event(choice("", finish_reason="length")),
    event(usage(prompt_tokens_details={"cached_tokens": 0})),
    event(b"[DONE]"),
]
LLAMA = [
    event(choice("a") | {"timings": {"predicted_n": 1, "prompt_ms": 5.0, "predicted_ms": 0.1, "cache_n": 0}}),
    event(choice("bc") | {"timings": {"predicted_n": 3, "prompt_ms": 5.0, "predicted_ms": 9.0, "cache_n": 0}}),
    event(choice("", finish_reason="length") | {"timings": {"predicted_n": 3, "predicted_ms": 9.5, "cache_n": 0}}),
    event(usage()),
    event(b"[DONE]"),
]
PLAIN = [event(choice(text)) for text in "abc"] + [event(choice("", finish_reason="length")), event(usage())]


class Server:
    """Answers `/v1/models` and scripted streams; `refuse_ids` answers 400 to prompts of token ids."""

    def __init__(self, owned_by: str, stream: list[bytes], refuse_ids: bool = False, status: int = 200) -> None:
        self.owned_by, self.stream, self.refuse_ids, self.status = owned_by, stream, refuse_ids, status
        self.bodies: list[dict[str, Any]] = []
        self.created = 0
        self.models: Any = None
        self.models_status = 200
        self.resets = (200, "")
        self.metrics: str | None = None
        self.key: str | None = None
        self.posted: list[str] = []
        self.clients: list[Any] = []

    def entry(self) -> dict[str, Any]:
        self.created += 1
        return {"id": "tiny", "object": "model", "created": self.created, "owned_by": self.owned_by}

    def post(self, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        self.bodies.append(body)
        if self.refuse_ids and isinstance(body["prompt"], list):
            return 400, [json.dumps({"error": {"message": "prompt must be a string"}}).encode()]
        return self.status, self.stream


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                return self.reply(404 if server.metrics is None else 200, [(server.metrics or "").encode()])
            if server.key and self.headers["authorization"] != f"Bearer {server.key}":
                return self.reply(401, [b"{}"])
            models = {"data": [server.entry()]} if server.models is None else server.models
            return self.reply(server.models_status, [json.dumps(models).encode()])

        def do_POST(self) -> None:
            if "cache" in self.path:
                server.posted.append(self.path)
                return self.reply(server.resets[0], [server.resets[1].encode()])
            server.clients.append(self)
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            return self.reply(*server.post(body))

        def reply(self, status: int, pieces: list[bytes]) -> None:
            self.send_response(status)
            self.send_header("content-length", str(sum(map(len, pieces))))
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def read_cut(stream: bytes, cuts: list[int]) -> Sample:
    """A stream as the reader sees it when the transport cuts it at `cuts`; stamps are piece numbers."""
    sample = Sample(0, 0, 0)
    reader = StreamReader(sample)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for stamp, (start, stop) in enumerate(pairwise(edges)):
        for item in reader.events(stream[start:stop]):
            reader.read_shape(reader.take, item, stamp)
    reader.read_shape(reader.close)
    return sample


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("width", [0, 1, 2, 7])
def test_a_stream_reads_the_same_wherever_the_transport_cuts_it(width: int, newline: bytes) -> None:
    stream = b"".join(OURS).replace(b"\n", newline)
    for cut in range(len(stream)):
        sample = read_cut(stream, [cut, cut + width])

        assert (sample.out_text, sample.out_ids) == ("abé", (11, 12, 13))
        assert (sample.n_prompt, sample.n_out, sample.n_cached, sample.finish) == (4, 3, 0, "length")
        assert (sample.chunk_ntok, sample.error) == ([1, 1, 1], None)
        assert sample.chunk_t_ns == sorted(sample.chunk_t_ns)


def test_tokens_of_a_chunk_come_from_a_running_count_where_there_are_no_ids() -> None:
    sample = read_cut(b"".join(LLAMA), [])

    assert sample.chunk_ntok == [1, 2]
    assert (sample.n_cached, sample.srv_decode_s) == (0, pytest.approx(0.0095))


def test_counts_that_do_not_add_up_to_the_bill_are_dropped() -> None:
    stream = [event(choice("a")), event(choice("bc")), event(choice("", finish_reason="length")), event(usage(out=3))]
    sample = read_cut(b"".join(stream), [])

    assert (sample.chunk_ntok, sample.n_out, sample.error) == ([], 3, None)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ([event(choice("a")), event({"error": {"message": "out of memory"}})], "out of memory"),
        ([event(choice("a")), event(usage(out=1))], "without a finish reason"),
        ([event(b"{broken")], "not JSON"),
        ([event({"choices": "x"})], "has not the OpenAI shape"),
        ([event({"choices": 7})], "has not the OpenAI shape"),
        ([event({"choices": [7]})], "has not the OpenAI shape"),
        ([event(choice(7))], "has not the OpenAI shape"),
        ([event(choice("a", finish_reason=["x"]))], "has not the OpenAI shape"),
        ([event(choice("a", token_ids=["x"]))], "has not the OpenAI shape"),
        ([event(choice("a", finish_reason="stop")), event({"usage": "x"})], "has not the OpenAI shape"),
        ([event(choice("a", finish_reason="stop")), event({"usage": {"prompt_tokens": "4"}})], "usage counts"),
        ([event(choice("a", finish_reason="stop")), event({"timings": "x"})], "has not the OpenAI shape"),
    ],
)
def test_a_stream_that_fails_in_band_is_an_error_not_a_short_answer(stream: list[bytes], error: str) -> None:
    assert error in (read_cut(b"".join(stream), []).error or "")


@pytest.mark.parametrize(
    ("owned_by", "stream", "name", "counts"),
    [
        ("pocketllm", OURS, "pocketllm", [1, 1, 1]),
        ("llamacpp", LLAMA, "llama-server", [1, 2]),
        ("somebody", PLAIN, "openai-compatible", [1, 1, 1]),
    ],
)
def test_each_kind_of_server_is_recognized_and_asked_in_its_dialect(
    owned_by: str, stream: list[bytes], name: str, counts: list[int]
) -> None:
    server = Server(owned_by, stream)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        sample = target.probe(ASK)
        facts, idle = target.describe(), target.in_flight()
        target.close()

    assert (facts["served_by"], facts["model"], target.is_ours) == (name, "tiny", owned_by == "pocketllm")
    assert (sample.error, sample.n_out, sample.chunk_ntok) == (None, 3, counts)
    (body,) = server.bodies
    assert body["prompt"] == [1, 2, 3, 4]
    assert (body["max_tokens"], body["temperature"], body["stream_options"]) == (3, 0, {"include_usage": True})
    assert ("ignore_eos" in body) == (name != "openai-compatible")
    assert sample.t_sched_ns < sample.t_send_ns < sample.chunk_t_ns[0] <= sample.chunk_t_ns[-1]
    assert sample.t_start_ns == sample.t_send_ns
    assert idle == 0


def test_a_server_that_takes_no_token_ids_gets_text() -> None:
    server = Server("somebody", PLAIN, refuse_ids=True)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        target.probe(ASK)
        target.ask(ASK)
        target.close()

    assert [type(body["prompt"]) for body in server.bodies] == [list, str, str]
    assert target.describe()["prompt_as"] == "text"


def test_a_prompt_of_another_length_than_asked_is_not_judged() -> None:
    server = Server("somebody", [*PLAIN[:-1], event(usage(prompt=5))])
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        with pytest.raises(NotJudgedError, match="made 5 prompt tokens of 4"):
            target.probe(ASK)
        target.close()


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server("somebody", PLAIN, status=503), "first request failed: HTTP 503"),
        (Server("somebody", PLAIN, status=400), "refuses a completion"),
        (Server("somebody", PLAIN[:-1]), "sends no usage"),
    ],
    ids=["busy", "refused", "no usage"],
)
def test_a_server_that_cannot_be_measured_says_why(server: Server, reason: str) -> None:
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        with pytest.raises(NotJudgedError, match=reason):
            target.probe(ASK)
        target.close()


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": "x"}, [1], {"data": [{"name": "no id"}]}])
def test_something_that_is_no_openai_server_is_not_judged(models: Any) -> None:
    server = Server("somebody", PLAIN)
    server.models = models
    with serving(server) as url, pytest.raises(NotJudgedError, match="lists no model"):
        OpenAIHTTPTarget(url)


def test_a_server_that_wants_a_key_is_not_judged() -> None:
    server = Server("somebody", PLAIN)
    server.models_status = 401
    with serving(server) as url, pytest.raises(NotJudgedError, match="key_env=VARIABLE"):
        OpenAIHTTPTarget(url)


def test_a_server_that_is_not_there_is_not_judged() -> None:
    with pytest.raises(NotJudgedError, match="does not answer"):
        OpenAIHTTPTarget("http://127.0.0.1:9")


def test_a_server_that_dies_in_the_middle_is_a_request_error() -> None:
    server = Server("somebody", PLAIN)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
    sample = target.ask(ASK)
    target.close()

    assert sample.error is not None
    assert slot_values([sample]) == {}


def test_each_request_has_a_connection_of_its_own() -> None:
    # llama-server closes a kept connection just as the next request leaves on it: that is no failed request
    server = Server("somebody", PLAIN)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        errors = [target.ask(ASK).error for _ in range(4)]
        target.close()

    assert errors == [None] * 4
    assert len(set(server.clients)) == 4


def test_a_fingerprint_ignores_the_time_and_sees_another_model() -> None:
    server = Server("somebody", PLAIN)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        before, again = target.fingerprint(), target.fingerprint()
        server.owned_by = "another"
        after = target.fingerprint()
        target.close()

    assert before == again != after


@pytest.mark.parametrize(
    ("owned_by", "status", "text", "path", "expected"),
    [
        ("pocketllm", 200, '{"reset": true}', "/reset_prefix_cache", True),
        ("pocketllm", 200, '{"reset": false}', "/reset_prefix_cache", None),
        ("vllm", 200, '{"success": false}', "/reset_prefix_cache", False),
        ("vllm", 200, "", "/reset_prefix_cache", True),
        ("vllm", 404, "", "/reset_prefix_cache", None),
        ("sglang", 200, "Cache flushed.", "/flush_cache", True),
        ("sglang", 400, "requests are running", "/flush_cache", False),
        ("llamacpp", 200, "", None, None),
    ],
)
def test_a_cache_reset_counts_only_when_its_answer_says_that_it_happened(
    owned_by: str, status: int, text: str, path: str | None, expected: bool | None
) -> None:
    server = Server(owned_by, OURS)
    server.resets = (status, text)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        answer = target.reset_cache()
        target.close()

    assert answer is expected
    assert server.posted == ([path] if path else [])


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ('pocketllm:num_requests_running{model_name="m"} 2.0\npocketllm:num_requests_waiting{model_name="m"} 1.0\n', 3),
        ('# HELP vllm:num_requests_running n\nvllm:num_requests_running{a="b"} 0.0\n', 0),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 4\n", 5),
        ("something_else 9\n", None),
        (None, None),
    ],
)
def test_requests_in_flight_are_read_from_the_servers_own_metrics(metrics: str | None, expected: int | None) -> None:
    server = Server("somebody", OURS)
    server.metrics = metrics
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        found, total = target.server_in_flight(), target.in_flight()
        target.close()

    assert found == expected
    assert total == (expected or 0)


def test_a_key_is_sent_to_its_own_server_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("somebody", PLAIN)
    server.key = "sesame"
    monkeypatch.setenv("DOOR", "sesame")
    with serving(server) as url:
        with pytest.raises(NotJudgedError, match="asks for an API key: name the environment variable"):
            OpenAIHTTPTarget(url)
        with pytest.raises(NotJudgedError, match="refuses the API key"):
            OpenAIHTTPTarget(url, api_key="wrong")
        arm = make_arms([f"x:key_env=DOOR,url={url}"], EngineOptions()).baseline
        target = OpenAIHTTPTarget(url, api_key=api_key(arm))
        sample = target.probe(ASK)
        told = json.dumps([target.describe(), arm.difference()])
        target.close()

    assert sample.error is None
    assert "sesame" not in told


def test_a_schema_goes_out_as_a_response_format() -> None:
    server = Server("vllm", OURS)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        target.ask(replace(ASK, json_schema={"type": "object"}))
        target.close()

    assert server.bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }


def test_several_requests_are_in_flight_at_once_over_connections_of_their_own() -> None:
    server = Server("somebody", PLAIN)
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        samples = target.load([ASK] * 6, 3)
        idle = target.in_flight()
        target.close()

    assert [sample.error for sample in samples] == [None] * 6
    assert (idle, len(set(server.clients))) == (0, 6)
    assert all(sample.loop_lag_ms is not None for sample in samples if sample.t_last_ns)


# -- prompts -----------------------------------------------------------------------------------------------------------
@given(n=st.integers(1, 400), salt=st.text(max_size=20))
def test_a_prompt_has_exactly_the_tokens_asked_for(n: int, salt: str) -> None:
    ask = make_ask(salt, n, 7, lambda text: [len(word) for word in text.split()], lambda ids: str(list(ids)))

    assert (len(ask.prompt_token_ids), ask.max_tokens) == (n, 7)


def test_prompts_are_the_same_everywhere_and_differ_from_the_first_word() -> None:
    assert prompt_text("1-0", 12) == prompt_text("1-0", 12)
    assert prompt_text("1-0", 12).startswith("a302 da32 94ef.\n'You may not have lived"), (
        "a change here breaks the histories of records"
    )
    assert len({prompt_text(str(n), 12).split()[0] for n in range(300)}) > 290


def test_a_tokenizer_that_makes_no_tokens_is_refused() -> None:
    encode: Callable[[str], list[int]] = lambda text: []  # noqa: E731  # a function of one line

    with pytest.raises(OptionError, match="makes no 4 tokens"):
        make_ask("x", 4, 1, encode, str)


# -- the engine --------------------------------------------------------------------------------------------------------
def test_the_engine_is_timed_in_process_from_first_scheduled_to_each_token(tiny_gguf: Path) -> None:
    options = EngineOptions(model=str(tiny_gguf), threads=1, backend="reference")
    arms = make_arms(["base", "chunk:prefill_chunk=8"], options)
    rig = open_rig(arms, options, lambda line: None)
    try:
        assert rig.device_class == "cpu-reference"
        ask = make_ask("x", 20, 4, rig.encode, rig.decode)
        samples = {name: target.probe(ask) for name, target in rig.targets.items()}
        steps = {name: target.engine.loop.stats().num_steps for name, target in rig.targets.items()}  # type: ignore[attr-defined]  # EngineTargets
        idle = [target.in_flight() for target in rig.targets.values()]
    finally:
        rig.close()

    assert {name: sample.error for name, sample in samples.items()} == dict.fromkeys(samples)
    assert steps == {"base": 4, "chunk": 6, "null": 4}
    assert idle == [0, 0, 0]
    for sample in samples.values():
        assert (sample.n_prompt, sample.n_out, sample.finish, sample.n_cached) == (20, 4, "length", 0)
        assert sample.t_send_ns < sample.t_start_ns < sample.chunk_t_ns[0] < sample.chunk_t_ns[-1]
        assert set(slot_values([sample])) >= {"prefill", "first_decode", "decode"}
        assert sample.out_ids == samples["base"].out_ids


def test_a_request_that_is_due_while_a_step_runs_has_waited_from_then_on(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(model=str(tiny_gguf), threads=1, backend="reference")
    rig = open_rig(make_arms(["base", "again:prefill_chunk=8"], options), options, lambda line: None)
    try:
        target = rig.targets["base"]
        loop = target.engine.loop  # type: ignore[attr-defined]  # an EngineTarget
        step = loop.step
        monkeypatch.setattr(loop, "step", lambda: time.sleep(0.2) or step())
        asks = [replace(make_ask(name, 8, 2, rig.encode, rig.decode), offset_s=s) for name, s in (("a", 0), ("b", 0.1))]
        _, late = target.load(asks, 1)
    finally:
        rig.close()

    # it came 100 ms into a step of 200 ms, which a busy machine too has begun by then: the rest of it and
    # the next one are its time to the first token
    assert late.t_send_ns == late.t_sched_ns
    assert ttft_s(late) >= 0.29
    assert late.srv_queue_s is not None
    assert late.srv_queue_s >= 0.09


def test_a_prompt_that_does_not_fit_the_context_is_a_request_error(tiny_gguf: Path) -> None:
    options = EngineOptions(model=str(tiny_gguf), threads=1, max_model_len=32)
    rig = open_rig(make_arms(["base"], options), options, lambda line: None)
    try:
        sample = rig.targets["base"].ask(make_ask("x", 40, 1, rig.encode, rig.decode))
    finally:
        rig.close()

    assert sample.error is not None
    assert "32" in sample.error


def test_a_server_with_other_tensors_than_the_named_file_is_no_proof_of_that_file(tiny_gguf: Path) -> None:
    with open_checkpoint(tiny_gguf) as checkpoint:
        told = json.loads(json.dumps(histogram(checkpoint)))
        other = {name: {**entry, "bytes": entry["bytes"] + 1} for name, entry in told.items()}

        assert has_tensors_of(checkpoint, {"quant_types": told})
        assert not has_tensors_of(checkpoint, {"quant_types": other})
        assert not has_tensors_of(checkpoint, {})
