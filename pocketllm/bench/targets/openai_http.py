"""Any OpenAI-compatible server by URL: ours, llama-server, vLLM, … asked through `/v1/completions`, streamed.

A dialect holds the few extensions that make an answer's length fixed and its tokens countable; a server that is not
known is asked in plain OpenAI, and what it cannot show is absent from the sample.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pocketllm.bench.targets.contract import Ask, Need, Sample
from pocketllm.bench.targets.gauges import GaugeWatch, Reading, parse_metrics, parse_slots
from pocketllm.bench.targets.streams import run_load
from pocketllm.errors import NotJudgedError
from pocketllm.golden.entry_points.answers import error_text

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
READ_S = 300.0
MAX_ERROR_TEXT = 300
SENDING = "http11.send_request_headers.started"
"""httpcore's name for the moment that a request begins to leave."""


@dataclass(frozen=True)
class Dialect:
    """What a kind of server understands besides plain OpenAI, recognized by `owned_by` in its model list."""

    name: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    reset_path: str | None = None
    """Where a POST makes the server forget computed prompts."""
    has: frozenset[Need] = frozenset()


STRUCTURED = frozenset({Need.STRUCTURED})
PLAIN = Dialect("openai-compatible")
DIALECTS = {
    "pocketllm": Dialect(
        "pocketllm", {"ignore_eos": True, "return_token_ids": True}, "/reset_prefix_cache", STRUCTURED
    ),
    # cache_prompt off: its slots otherwise keep the last prompt; timings_per_token counts the tokens of each chunk
    "llamacpp": Dialect(
        "llama-server", {"ignore_eos": True, "cache_prompt": False, "timings_per_token": True}, has=STRUCTURED
    ),
    "vllm": Dialect("vllm", {"ignore_eos": True, "return_token_ids": True}, "/reset_prefix_cache", STRUCTURED),
    "sglang": Dialect("sglang", {"ignore_eos": True}, "/flush_cache", STRUCTURED),
}


class OpenAIHTTPTarget:
    """One endpoint. Raises NotJudgedError when it cannot be reached or lists no model.

    model: its name there; None: the first one listed. pid: of the server, where we started it.
    """

    kind = "openai_http"

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, pid: int | None = None) -> None:
        import httpx

        self.url = url
        self.pid = pid
        self.api_key = api_key
        loopback = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        # a proxy of the environment has no business between us and our own machine
        self.client = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            trust_env=not loopback,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            # a connection a request: servers close kept ones just as the next request leaves
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.sends_token_ids = True
        self._in_flight = 0
        self._lock = threading.Lock()
        self.wanted_model = model
        self.entry = self.model_entry()
        self.model = str(self.entry["id"])
        self.dialect = DIALECTS.get(str(self.entry.get("owned_by", "")).lower(), PLAIN)

    def model_entry(self) -> dict[str, Any]:
        """The wanted entry of the server's model list, or its first."""
        import httpx

        try:
            answer = self.client.get("/v1/models")
            if answer.status_code in (401, 403):
                wrong = "refuses the API key" if self.api_key else "asks for an API key"
                raise NotJudgedError(
                    f"{self.url} {wrong}: name the environment variable that holds it, "
                    "--arms NAME:key_env=VARIABLE,url=…"
                )
            models = answer.json()["data"] if answer.status_code == 200 else None
        except httpx.HTTPError as error:
            raise NotJudgedError(f"{self.url} does not answer: {error}; is the server running?") from error
        except (ValueError, KeyError, TypeError):
            models = None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise NotJudgedError(
                f"{self.url}/v1/models lists no model: this is no OpenAI-compatible server, or not ready"
            )
        named = [entry for entry in models if isinstance(entry, dict) and entry.get("id") == self.wanted_model]
        if self.wanted_model is not None and not named:
            listed = ", ".join(str(entry.get("id")) for entry in models if isinstance(entry, dict))
            raise NotJudgedError(f"{self.url} does not list the model {self.wanted_model!r}; it lists {listed}")
        return dict(named[0] if named else models[0])

    @property
    def has(self) -> frozenset[Need]:
        return self.dialect.has

    @property
    def is_ours(self) -> bool:
        return self.dialect.name == "pocketllm"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request as it is sent."""
        return {
            "model": self.model,
            "prompt": list(ask.prompt_token_ids) if self.sends_token_ids else ask.prompt_text,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.dialect.extra,
            **({"response_format": schema_format(ask.json_schema)} if ask.json_schema else {}),
        }

    def ask(self, ask: Ask) -> Sample:
        """One request, alone."""
        return self.load([ask], 1)[0]

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Sample]:
        """A thread for each request in flight, and what the server says of itself meanwhile."""
        is_closed = all(ask.offset_s is None for ask in asks)
        with GaugeWatch(self.read_gauges, concurrency if is_closed else 1) as watch:
            samples = run_load(self.send, asks, concurrency)
        watch.fill(samples)
        return samples

    def send(self, ask: Ask, due_ns: int) -> Sample:
        """Stream one completion. Sent: its head leaves over a connection that is made. Reads are stamped unparsed."""
        import httpx

        def trace(name: str, info: Any) -> None:
            if name == SENDING:
                sample.t_send_ns = sample.t_start_ns = time.perf_counter_ns()

        content = json.dumps(self.body(ask)).encode()
        sample = Sample(t_sched_ns=due_ns, t_send_ns=due_ns, t_start_ns=due_ns)
        reader = StreamReader(sample)
        self._count(1)
        try:
            request = self.client.build_request(
                "POST",
                "/v1/completions",
                content=content,
                headers={"content-type": "application/json"},
                extensions={"trace": trace},
            )
            answer = self.client.send(request, stream=True)
            try:
                reader.read(answer)
            finally:
                answer.close()
        except httpx.HTTPError as error:
            sample.error = f"{type(error).__name__}: {error}"
        finally:
            self._count(-1)
        return sample

    def _count(self, change: int) -> None:
        with self._lock:
            self._in_flight += change

    def probe(self, ask: Ask) -> Sample:
        """A first request: token ids, and text where the server refuses those. NotJudgedError when it has neither."""
        sample = self.ask(ask)
        if sample.error is not None and sample.http_status in (400, 415, 422, 500, 501):
            self.sends_token_ids = False
            refusal = sample.error
            sample = self.ask(ask)
            if sample.error is not None:
                raise NotJudgedError(f"{self.url} refuses a completion: {refusal}")
        if sample.error is not None:
            raise NotJudgedError(f"{self.url}: the first request failed: {sample.error}")
        if sample.n_prompt is None:
            raise NotJudgedError(f"{self.url} sends no usage in its stream: prompt and answer cannot be counted")
        if sample.n_prompt != len(ask.prompt_token_ids):
            raise NotJudgedError(
                f"{self.url} made {sample.n_prompt} prompt tokens of {len(ask.prompt_token_ids)}: does it serve the "
                "model that --model names?"
            )
        return sample

    def in_flight(self) -> int:
        """Ours, and the server's where its /metrics tell."""
        return self._in_flight + (self.server_in_flight() or 0)

    def server_in_flight(self) -> int | None:
        """Requests running and waiting as the server counts them; None where it does not say."""
        reading = self.read_gauges()
        return None if reading is None else reading.in_flight

    def read_gauges(self) -> Reading | None:
        """What the server says of itself now; None where it does not say."""
        import httpx

        asked_ns = time.perf_counter_ns()
        try:
            answer = self.client.get("/metrics")
            counts = parse_metrics(answer.text) if answer.status_code == 200 else {}
            if all(count is None for count in counts.values()) and self.dialect.name == "llama-server":
                answer = self.client.get("/slots")
                counts = {"running": parse_slots(answer.json()) if answer.status_code == 200 else None}
        except (httpx.HTTPError, ValueError):
            return None
        if all(count is None for count in counts.values()):
            return None
        found = {name: counts.get(name) for name in ("running", "waiting", "compiles")}
        return Reading(asked_ns, time.perf_counter_ns(), **found)

    def reset_cache(self) -> bool | None:
        """Ask for it, and read whether it happened: a reset can answer 200 and say that it failed."""
        import httpx

        if self.dialect.reset_path is None:
            return None
        try:
            answer = self.client.post(self.dialect.reset_path)
        except httpx.HTTPError:
            return False
        return None if answer.status_code == 404 else has_reset(answer.status_code, answer.text)

    def describe(self) -> Mapping[str, Any]:
        plan = self.entry.get("plan")
        facts = {
            "served_by": self.dialect.name,
            "url": self.url,
            "model": self.model,
            "prompt_as": "token ids" if self.sends_token_ids else "text",
            "extensions": dict(self.dialect.extra),
        }
        return {**facts, "plan": plan} if isinstance(plan, dict) else facts

    def fingerprint(self) -> str:
        """Digest of the model list's entry, without the time it was made."""
        entry = {key: value for key, value in self.model_entry().items() if key != "created"}
        return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        self.client.close()


def schema_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` of a JSON schema, as OpenAI has it."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema), "strict": True}}


def has_reset(status: int, text: str) -> bool | None:
    """What the answer to a cache reset says: done, failed, or (None) that there is no cache.

    >>> has_reset(200, '{"reset": true}'), has_reset(200, '{"success": false}'), has_reset(200, ""), has_reset(400, "")
    (True, False, True, False)
    """
    if status != 200:
        return False
    try:
        told = json.loads(text) if text.strip() else {}
    except ValueError:
        return True  # a sentence: SGLang's "Cache flushed."
    if isinstance(told, dict) and told.get("reset") is False:
        return None  # ours, without a prefix cache
    return not (isinstance(told, dict) and told.get("success") is False)


class StreamReader:
    """Fills a sample from a server-sent event stream, wherever the transport cut it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self._buffer = b""
        self._ids: list[int] = []
        self._counted = 0
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}

    def read(self, answer: "httpx.Response") -> None:
        """The whole answer, to its end; errors land in the sample."""
        self.sample.http_status = answer.status_code
        if answer.status_code != 200:
            self.sample.error = f"HTTP {answer.status_code}: {error_text(answer.read())[:MAX_ERROR_TEXT]}"
            return
        for piece in answer.iter_bytes():
            stamp = time.perf_counter_ns()
            for event in self.events(piece):
                self.read_shape(self.take, event, stamp)
        self.read_shape(self.close)

    def read_shape(self, read: Callable[..., None], *words: Any) -> None:
        """Read a part of the answer; what has not the shape that OpenAI gave it is an error of the request."""
        try:
            read(*words)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.sample.error = f"the stream has not the OpenAI shape ({type(error).__name__}: {error})"[
                :MAX_ERROR_TEXT
            ]

    def events(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """JSON events completed by this piece; comments and `[DONE]` are skipped."""
        # over the joined bytes: a cut may fall between a CR and its LF
        self._buffer = (self._buffer + piece).replace(b"\r\n", b"\n")
        *whole, self._buffer = self._buffer.split(b"\n\n")
        for block in whole:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if not data or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                self.sample.error = "an event of the stream is not JSON"
                continue
            if isinstance(event, dict):
                yield event

    def take(self, event: dict[str, Any], stamp: int) -> None:
        """One event: an error, usage, timings, or tokens."""
        if event.get("error"):
            self.sample.error = error_text(json.dumps(event).encode())[:MAX_ERROR_TEXT]
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings
        for choice in event.get("choices") or []:
            finish = choice.get("finish_reason") or self.sample.finish
            text, ids = choice.get("text") or "", choice.get("token_ids")
            if not (isinstance(text, str) and isinstance(finish, str | None)):
                raise TypeError(f"text {text!r:.80}, finish reason {finish!r:.80}")
            self.sample.finish = finish
            if self.sample.t_first_ns is None:
                self.sample.t_first_ns = stamp
            count = self.tokens_of(ids, event.get("timings"))
            if text or count:
                self.sample.out_text += text
                self.sample.chunk_t_ns.append(stamp)
                self.sample.chunk_ntok.append(count if count is not None else 1)

    def tokens_of(self, ids: list[int] | None, timings: dict[str, Any] | None) -> int | None:
        """How many tokens a chunk holds, from its ids or a running count; None when the server does not say."""
        if ids is not None:
            if not all(isinstance(one, int) for one in ids):
                raise TypeError(f"token ids {ids!r:.80}")
            self._ids.extend(ids)
            return len(ids)
        if timings and isinstance(timings.get("predicted_n"), int):
            before, self._counted = self._counted, int(timings["predicted_n"])
            return max(self._counted - before, 0)
        return None

    def close(self) -> None:
        """Settle counts once the stream has ended."""
        sample, usage = self.sample, self._usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        cached = cached if cached is not None else self._timings.get("cache_n")
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
        if not all(isinstance(count, int | None) for count in counts):
            raise TypeError(f"usage counts {counts}")
        sample.n_prompt, sample.n_out, sample.n_cached = counts[0], counts[1] or len(self._ids), cached
        sample.out_ids = tuple(self._ids) if self._ids else None
        if isinstance(self._timings.get("prompt_ms"), int | float):
            sample.srv_prefill_s = self._timings["prompt_ms"] / 1e3
        if isinstance(self._timings.get("predicted_ms"), int | float):
            sample.srv_decode_s = self._timings["predicted_ms"] / 1e3
        if sum(sample.chunk_ntok) != sample.n_out:
            # the counts do not add up to what the server billed: better none than wrong ones
            sample.chunk_ntok = []
        if sample.error is None and sample.finish is None:
            sample.error = "the stream ended without a finish reason"
