"""An engine that says what a test wrote: real threads, real events, no model. One token is one byte."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

from pocketllm.engine.lifecycle.request import (
    Event,
    FinishEvent,
    FinishReason,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from pocketllm.errors import ContextLengthError, RequestError

CONTEXT = 4096
END = 256
VOCABULARY = 257


class ScriptedTokenizer:
    """Bytes are tokens; token 256 ends a text."""

    vocab_size = VOCABULARY
    strips_first_space = False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token_id for token_id in ids if token_id != END).decode(errors="replace")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return "<end>" if token_id == END else chr(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id == END

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]:
        return {}


class ScriptedTemplate:
    """Renders `role: content` lines; refuses a conversation that begins with the assistant."""

    source = ""

    def render(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True, **kwargs: object
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise RequestError("conversation roles must alternate", param="messages")
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def render_continued(self, messages: Sequence[dict[str, str]], **kwargs: object) -> str:
        return self.render(messages)[:-1]


def held_back(data: bytes) -> list[str]:
    """The text each byte releases: nothing inside a character."""
    texts, pending = [], b""
    for byte in data:
        pending += bytes([byte])
        try:
            texts.append(pending.decode())
            pending = b""
        except UnicodeDecodeError:
            texts.append("")
    return texts


class ScriptedLoop:
    """Runs `script(request)`, which yields (token id, text), a finish reason or an exception, on a thread a request."""

    def __init__(self) -> None:
        self.script: Callable[[Request], Iterable[tuple[int, str] | FinishReason | str]] = echo
        self.refusal: Exception | None = None
        self.submitted: list[Request] = []
        self.num_tokens = 0
        self.compiled: list[object] = []
        self.cancelled: list[str] = []
        self.active: dict[str, threading.Event] = {}
        self.listeners: list[Callable[[], None]] = []

    def check(self, request: Request) -> None:
        if len(request.prompt_token_ids) + (request.params.max_tokens or 0) > CONTEXT:
            raise ContextLengthError(f"{len(request.prompt_token_ids)} prompt tokens do not fit", param="prompt")

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        self.check(request)
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(request)
        self.active[request.request_id] = threading.Event()
        threading.Thread(target=self._run, args=(request, sink), daemon=True).start()

    def on_compile(self, listener: Callable[[float], None]) -> None: ...

    def compile(self, constraint: object) -> None:
        self.compiled.append(constraint)

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        is_known = request_id in self.active
        if is_known:
            self.active[request_id].set()
        return is_known

    def start(self) -> None: ...

    def step(self) -> bool:
        return bool(self.active)

    def stop(self, timeout_s: float = 0.0) -> None:
        for request_id in list(self.active):
            self.cancel(request_id)

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            num_running=len(self.active),
            num_waiting=0,
            kv_usage=0.0,
            num_preemptions=0,
            num_compiles=0,
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in self.submitted),
            num_generation_tokens=self.num_tokens,
            num_prefix_queried_tokens=None,
            num_prefix_hit_tokens=None,
        )

    def on_step_end(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def reset_prefix_cache(self) -> bool:
        return False

    def _run(self, request: Request, tell: Callable[[Event], None]) -> None:
        def sink(event: Event) -> None:
            tell(event)
            for listener in self.listeners:
                listener()

        reason, error, count = FinishReason.STOP, None, 0
        told = self.active[request.request_id]
        times = request.times
        times.scheduled_s = time.perf_counter()
        scored = (request.scored_by or request).params.prompt_logprobs
        if scored is not None:
            given = [scripted_logprobs(one, scored, 7) for one in request.prompt_token_ids]
            request.prompt_logprobs[:] = [None, *given[1:]]
        for item in self.script(request) if request.params.max_tokens != 0 else [FinishReason.LENGTH]:
            if told.is_set():
                reason = FinishReason.CANCELLED
                break
            if isinstance(item, FinishReason):
                reason = item
                break
            if isinstance(item, str):
                reason, error = FinishReason.ERROR, item
                break
            times.last_token_s = time.perf_counter()
            times.first_token_s = times.first_token_s or times.last_token_s
            count += 1
            self.num_tokens += 1
            logprobs = scripted_logprobs(item[0], request.params.logprobs)
            sink(TokenEvent(request.request_id, item[0], item[1], logprobs, times.last_token_s))
            if count == request.params.max_tokens:
                reason = FinishReason.LENGTH
                break
        del self.active[request.request_id]
        times.finished_s = time.perf_counter()
        sink(FinishEvent(request.request_id, reason, "", len(request.prompt_token_ids), count, 0, times, 0, error))


def scripted_logprobs(token_id: int, num_top: int | None, rank: int = 0) -> TokenLogprobs | None:
    """The chosen token at -0.5, alternatives below it."""
    if num_top is None:
        return None
    ids = [(token_id + step) % VOCABULARY for step in range(num_top)]
    return TokenLogprobs(-0.5, tuple(ids), tuple(-0.5 - step for step in range(num_top)), rank)


def echo(request: Request) -> Iterable[tuple[int, str]]:
    """Says the prompt again, byte by byte."""
    data = bytes(token_id for token_id in request.prompt_token_ids if token_id < END)
    return zip(data, held_back(data), strict=True)


def slow(seconds_a_token: float) -> Callable[[Request], Iterable[tuple[int, str]]]:
    """A script that never ends by itself."""

    def script(request: Request) -> Iterable[tuple[int, str]]:
        while True:
            time.sleep(seconds_a_token)
            yield ord("x"), "x"

    return script


class ScriptedEngine:
    """What a server needs of an engine."""

    def __init__(self, model_name: str = "scripted") -> None:
        self.model_name = model_name
        self.plan = SimpleNamespace(
            limits=SimpleNamespace(max_model_len=CONTEXT, max_num_seqs=8, max_queued_requests=256),
            step_widths=(1,),
            as_dict=lambda: {"max_model_len": CONTEXT},
        )
        self.tokenizer = ScriptedTokenizer()
        self.chat_template: ScriptedTemplate | None = ScriptedTemplate()
        self.loop = ScriptedLoop()

    def close(self) -> None: ...
