"""One request over HTTP, as any OpenAI client would send it, and what came back; ids where the server shows them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.golden.compare import Observed
from pocketllm.golden.entry_points import without_stops
from pocketllm.golden.entry_points.answers import (
    SchemaError,
    StreamReader,
    error_text,
    parse_object,
    read_prompt_logprobs,
    read_whole,
)
from pocketllm.golden.fixture import Case

REQUEST_TIMEOUT_S = 300.0
OPTIONAL = ("return_token_ids", "logprobs")
"""Fields that a golden asks for beyond the request itself, and can do without."""


class HttpClient:
    """Asks `url` for the cases of one model. Transport failures are NotJudgedError: nothing was compared."""

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        num_top: int = 1,
    ) -> None:
        """num_top: how many of the likeliest tokens to ask for with each token; a recording wants them."""
        import httpx

        self.url = base_url(url)
        self.model = model
        self._num_top = num_top
        self._refused: set[str] = set()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def answer(
        self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None, **overrides: Any
    ) -> Observed:
        """Send a case and wait for all of its answer; `on_first` is called after the first token of a stream."""
        while True:
            asked = [name for name in OPTIONAL if name not in self._refused]
            observed = self._send(case, is_stream, on_first, overrides)
            refused = [name for name in asked if observed.status in (400, 422) and name in observed.error]
            if not refused:
                return observed
            # a server that refuses what it does not know: without it from here on
            self._refused.add(refused[0])

    def resume(self, case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        """Go on after these tokens, which /v1/completions takes as a prompt."""
        text = replace(without_stops(case, max_tokens), kind="completion", messages=(), template_sha256=None)
        return self.answer(text, prompt=list(token_ids))

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...] | None:
        """By `prompt_logprobs`, as vLLM has them, else by OpenAI's echo with logprobs."""
        ids = [*prompt_ids, *answer_ids]
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
        }
        for words in ({"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
            try:
                with self._transport():
                    response = self._client.post("/v1/completions", json={**asked, **words})
                found = read_prompt_logprobs(parse_object(response.text), ids) if response.status_code == 200 else None
            except SchemaError as error:
                raise NotJudgedError(str(error)) from error
            if found is not None:
                return found[-len(answer_ids) :]
        return None

    def _send(
        self, case: Case, is_stream: bool, on_first: Callable[[], None] | None, overrides: Mapping[str, Any]
    ) -> Observed:
        path, body = self.request(case, is_stream, overrides)
        sent_s = time.perf_counter()
        try:
            if is_stream:
                observed, first_s = self._stream(path, body, on_first)
            else:
                observed, first_s = self._whole(path, body), None
        except SchemaError as error:
            observed, first_s = Observed(error=str(error)), None
        ttft_s = first_s - sent_s if first_s else None
        return replace(observed, ttft_s=ttft_s, e2el_s=time.perf_counter() - sent_s)

    def request(self, case: Case, is_stream: bool, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Path and body of a case."""
        body: dict[str, Any] = {"model": self.model, **case.sampling, **overrides, "stream": is_stream}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        if "return_token_ids" not in self._refused:
            body["return_token_ids"] = True
        with_logprobs = "logprobs" not in self._refused
        if case.kind == "chat":
            wanted = {"logprobs": True, "top_logprobs": self._num_top} if with_logprobs else {}
            return "/v1/chat/completions", {**body, **wanted, "messages": [dict(m) for m in case.messages]}
        wanted = {"logprobs": self._num_top} if with_logprobs else {}
        return "/v1/completions", {"prompt": case.prompt, **body, **wanted}

    def _whole(self, path: str, body: Mapping[str, Any]) -> Observed:
        with self._transport():
            response = self._client.post(path, json=body)
        if response.status_code != 200:
            return Observed(status=response.status_code, error=error_text(response.content))
        return read_whole(parse_object(response.text))

    def _stream(
        self, path: str, body: Mapping[str, Any], on_first: Callable[[], None] | None
    ) -> tuple[Observed, float | None]:
        first_s: float | None = None
        reader = StreamReader()
        with self._transport(), self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return Observed(status=response.status_code, error=error_text(response.read())), None
            for data in events(response.iter_lines()):
                if reader.push(data) and first_s is None:
                    first_s = time.perf_counter()
                    if on_first:
                        on_first()
        return reader.finish(), first_s

    def abandon(self, case: Case, num_chunks: int, meanwhile: Callable[[], None], **overrides: Any) -> Observed:
        """Stream a case, read `num_chunks` of its answer, call `meanwhile`, and disconnect."""
        path, body = self.request(case, True, overrides)
        reader, seen = StreamReader(), 0
        with self._transport(), self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                return Observed(status=response.status_code, error=error_text(response.read()))
            for data in events(response.iter_lines()):
                seen += reader.push(data)
                if seen >= num_chunks:
                    meanwhile()
                    break
        return Observed(text=reader.text)

    def metrics(self) -> dict[str, float]:
        """Prometheus series by name, labels summed; NotJudgedError when there are none."""
        with self._transport():
            response = self._client.get("/metrics")
        if response.status_code != 200:
            raise NotJudgedError(f"/metrics answered HTTP {response.status_code}")
        return parse_metrics(response.text)

    @contextmanager
    def _transport(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.TimeoutException as error:
            raise NotJudgedError(f"{self.url} did not answer in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise NotJudgedError(f"{self.url} broke off: {error or type(error).__name__}") from error


def base_url(url: str) -> str:
    """An address without the `/v1` that clients are often given with it."""
    return url.rstrip("/").removesuffix("/v1")


def unreachable(url: str) -> str | None:
    """Why nobody answers at that address; None where somebody does, whatever the answer is."""
    import httpx

    base = base_url(url)
    try:
        httpx.get(f"{base}/v1/models", timeout=30, trust_env=False)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        return f"{base} does not answer: {error}; is the server running?"
    except (httpx.HTTPError, httpx.InvalidURL):
        return None  # said where it is asked
    return None


def served_model(url: str, api_key: str | None = None) -> str:
    """The only model a server lists; NotJudgedError when it cannot be had, OptionError when there are several."""
    import httpx

    base = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{base}/v1/models", headers=headers, timeout=30, trust_env=False)
        if response.status_code == 401:
            told = error_text(response.content)
            raise NotJudgedError(f"{base} answers HTTP 401: {told}; give its key with --api-key")
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except httpx.ConnectError as error:
        raise NotJudgedError(f"{base} does not answer: {error}; is the server running?") from error
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise NotJudgedError(f"{base} does not list its models ({type(error).__name__}: {error})") from error
    except httpx.InvalidURL as error:
        raise OptionError(f"--url {url!r} is no URL: {error}") from error
    if len(names) != 1:
        raise OptionError(f"{base} serves {', '.join(names) or 'no model'}: say which with --served-model")
    return names[0]


def events(lines: Iterator[str]) -> Iterator[str]:
    """The data of each server-sent event; comments and blank lines are skipped."""
    for line in lines:
        if line.startswith("data:"):
            yield line[5:].strip()


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to values by series name, labels summed."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            with suppress(ValueError):  # a line of something else
                values[name] = values.get(name, 0.0) + float(value)
    return values
