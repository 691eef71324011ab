"""One request over HTTP, as any OpenAI client would send it, and what came back; ids where the server shows them."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.golden.compare import Observed
from pocketllm.golden.fixture import Case

REQUEST_TIMEOUT_S = 300.0


class SchemaError(Exception):
    """A 200 whose body is not the OpenAI shape."""


class HttpClient:
    """Asks `url` for the cases of one model. Transport failures are NotJudgedError: nothing was compared."""

    def __init__(self, url: str, model: str, api_key: str | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        import httpx

        self.url = base_url(url)
        self.model = model
        self._wants_ids = True
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def answer(
        self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None, **overrides: Any
    ) -> Observed:
        """Send a case and wait for all of its answer; `on_first` is called after the first token of a stream."""
        observed = self._send(case, is_stream, on_first, overrides)
        if self._wants_ids and observed.status in (400, 422) and "return_token_ids" in observed.error:
            self._wants_ids = False  # a server that refuses what it does not know: text only from here on
            observed = self._send(case, is_stream, on_first, overrides)
        return observed

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
        if self._wants_ids:
            body["return_token_ids"] = True
        if case.kind == "chat":
            return "/v1/chat/completions", {**body, "messages": [dict(m) for m in case.messages]}
        return "/v1/completions", {**body, "prompt": case.prompt}

    def _whole(self, path: str, body: Mapping[str, Any]) -> Observed:
        with self._transport():
            response = self._client.post(path, json=body)
        if response.status_code != 200:
            return Observed(status=response.status_code, error=error_text(response.content))
        return read_whole(_json(response.text))

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


class StreamReader:
    """Puts a streamed answer together again."""

    def __init__(self) -> None:
        self.text = ""
        self._prompt_ids: list[int] | None = None
        self._ids: list[int] | None = None
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._is_done = False

    def push(self, data: str) -> bool:
        """Take one event's data; True when it carried a token or text. SchemaError for anything malformed."""
        if self._is_done:
            raise SchemaError("the stream went on after [DONE]")
        if data == "[DONE]":
            self._is_done = True
            return False
        chunk = _json(data)
        if "error" in chunk:
            raise SchemaError(f"error in the stream: {error_text(data.encode())}")
        self._usage = chunk.get("usage") or self._usage
        carried = False
        for choice in chunk.get("choices") or ():
            carried = self._push_choice(choice, chunk) or carried
        return carried

    def _push_choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> bool:
        if self._finish is not None and choice.get("finish_reason"):
            raise SchemaError("the stream has two finish reasons")
        text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
        ids = choice.get("token_ids")
        prompt_ids = choice.get("prompt_token_ids") or chunk.get("prompt_token_ids")
        self.text += text
        self._finish = choice.get("finish_reason") or self._finish
        if prompt_ids is not None:
            self._prompt_ids = list(prompt_ids)
        if ids is not None:
            self._ids = [*(self._ids or ()), *ids]
        return bool(text or ids)

    def finish(self) -> Observed:
        """The whole answer; SchemaError when the stream ended without its last event."""
        if not self._is_done:
            raise SchemaError("the stream ended without [DONE]")
        return Observed(
            prompt_token_ids=_ids(self._prompt_ids),
            token_ids=_ids(self._ids),
            text=self.text,
            finish_reason=self._finish,
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_output_tokens=self._usage.get("completion_tokens"),
        )


def read_whole(body: Mapping[str, Any]) -> Observed:
    """An unstreamed answer; SchemaError when it is not the OpenAI shape."""
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        usage = body.get("usage") or {}
        return Observed(
            prompt_token_ids=_ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids")),
            token_ids=_ids(choice.get("token_ids")),
            text=text or "",
            finish_reason=choice.get("finish_reason"),
            num_prompt_tokens=usage.get("prompt_tokens"),
            num_output_tokens=usage.get("completion_tokens"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise SchemaError(f"the answer has not the OpenAI shape ({type(error).__name__}: {error})") from error


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to values by series name, labels summed."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def _ids(values: Any) -> tuple[int, ...] | None:
    return tuple(values) if isinstance(values, list) else None


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SchemaError(f"not JSON: {text!r:.80}") from error
    if not isinstance(value, dict):
        raise SchemaError(f"not a JSON object: {text!r:.80}")
    return value


def error_text(body: bytes) -> str:
    """The message of an OpenAI error body, or the beginning of whatever it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip()
