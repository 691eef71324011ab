"""What the routes of a server share: its engine, its phase, and the calls in flight."""

import time
import uuid
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pocketllm.engine.serving.answers.logprobs import Speller
from pocketllm.engine.serving.failures import RefusedError, model_not_found, unavailable
from pocketllm.engine.serving.prompts import Choice
from pocketllm.engine.serving.protocol import ChatBody, GenerationBody
from pocketllm.engine.serving.settings import ServedEngine, ServerSettings
from pocketllm.engine.serving.stream import Reply
from pocketllm.engine.serving.transport.aside import Aside
from pocketllm.engine.serving.transport.bridge import Generation, Postbox
from pocketllm.engine.serving.transport.request_log import Summary, summarized
from pocketllm.engine.serving.watching import metrics
from pocketllm.engine.serving.watching.tracing import Tracer, make_tracer
from pocketllm.errors import QueueFullError, RequestError

NUM_RECENT = 50
"""Ended requests that the status page remembers, without their texts."""


class Phase(Enum):
    """Where a server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Server:
    """What the routes share: the engine once it is there, the phase, and the calls in flight."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.phase = Phase.LOADING
        self.engine: ServedEngine | None = None
        self.metrics: metrics.ServerMetrics | None = None
        self.in_flight: set[Generation] = set()
        self.postbox = Postbox()
        self.aside = Aside()
        self.names: tuple[str, ...] = settings.served_model_names
        self.recent: deque[Summary] = deque(maxlen=NUM_RECENT)
        self.started_s = time.time()
        self._tracer: Tracer | None = None
        self._spellers: dict[bool, Speller] = {}

    def attach(self, engine: ServedEngine) -> None:
        """Begin to serve a loaded engine; its loop gets its thread."""
        self.engine = engine
        self.names = self.settings.served_model_names or (engine.model_name,)
        self.metrics = metrics.ServerMetrics(self.names[0], engine.loop.stats)
        self._tracer = make_tracer(self.settings.otlp_traces_endpoint, self.names[0])
        self._spellers = {True: Speller(engine.tokenizer), False: Speller(engine.tokenizer, "bytes:")}
        engine.loop.on_step_end(self.postbox.flush)
        engine.loop.on_compile(self.metrics.grammar_s.observe)
        engine.loop.start()
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def serving(self) -> tuple[ServedEngine, metrics.ServerMetrics]:
        """The engine; raises RefusedError (503) while it is loading or the server drains."""
        if self.phase is Phase.DRAINING:
            if self.metrics is not None:
                self.metrics.reject("draining")
            raise RefusedError(unavailable("the server is shutting down", "draining"))
        if self.engine is None or self.metrics is None:
            raise RefusedError(unavailable("the model is still loading", "loading"))
        return self.engine, self.metrics

    def check_model(self, name: str | None) -> str:
        """The name to report; raises RefusedError (404) for one that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RefusedError(model_not_found(name, self.names))
        return name

    def card(self, name: str, engine: ServedEngine) -> dict[str, object]:
        """One entry of the model list."""
        return {
            "id": name,
            "object": "model",
            "created": int(self.started_s),
            "owned_by": "pocketllm",
            "root": self.names[0],
            "parent": None,
            "max_model_len": engine.plan.limits.max_model_len,
            "plan": engine.plan.as_dict(),  # so that a benchmark by URL can record what really ran
        }

    def named(self, document: Mapping[str, Any]) -> str:
        """The name to report for a body; raises RefusedError (404) for a model that is not served."""
        model = document.get("model")
        return self.check_model(model) if model is None or isinstance(model, str) else ""

    def begin(
        self, body: GenerationBody, choices: list[Choice], model: str, request_id: str
    ) -> tuple[Generation, Reply]:
        """Submit a call's requests, all or none; what the engine refuses is raised before anything is sent."""
        engine, counts = self.serving()
        self._check_number(body, len(choices))
        self._check_queued_tokens(choices, counts)
        is_chat = isinstance(body, ChatBody)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        generation = Generation(name, choices, engine.loop, self.postbox, bool(body.stream), request_id)
        try:
            generation.submit(counts.observer)
        except QueueFullError:
            counts.reject("queue_full")
            raise
        self.in_flight.add(generation)
        return generation, Reply(generation, body, model, self._spellers[is_chat])

    def cancel(self, name: str) -> int:
        """End the calls of this X-Request-Id, or the one whose answer has this id; how many there were."""
        named = [one for one in self.in_flight if name in (one.id, one.request_id)]
        for generation in named:
            generation.cancel()
        return len(named)

    def end(self, generation: Generation, path: str, headers: Mapping[str, str]) -> Summary:
        """A call is over, whatever became of it. headers: of its HTTP request, which may name a trace."""
        self.in_flight.discard(generation)
        if any(choice.params.prompt_logprobs is not None for choice in generation.choices):
            self.aside.give_back_soon()  # a scored prompt had logits of many rows at once
        summary = summarized(generation, path)
        self.recent.append(summary)
        if self._tracer is not None:
            self._tracer.record(summary, headers)
        return summary

    def close(self) -> None:
        """Send what is left to be sent."""
        if self._tracer is not None:
            self._tracer.close()

    def _check_number(self, body: GenerationBody, number: int) -> None:
        """Raise RequestError for more choices than may ever run and wait: coming back later would not help."""
        limits = self.serving()[0].plan.limits
        if number > limits.max_num_seqs + limits.max_queued_requests:
            raise RequestError(
                f"{number} answers in one request are more than may run and wait (max_num_seqs={limits.max_num_seqs} "
                f"and max_queued_requests={limits.max_queued_requests}): ask for them in several",
                param="prompt" if body.num_choices < number else "n",
            )

    def _check_queued_tokens(self, choices: list[Choice], counts: metrics.ServerMetrics) -> None:
        """Raise QueueFullError where more prompt tokens would wait than may; an empty queue takes any prompt."""
        limit = self.settings.max_queued_tokens
        if limit is None:
            return
        requests = (request for generation in self.in_flight for request in generation.requests)
        waiting = sum(len(request.prompt_token_ids) for request in requests if request.times.scheduled_s is None)
        if waiting and waiting + sum(len(choice.prompt_token_ids) for choice in choices) > limit:
            counts.reject("queue_full")
            raise QueueFullError(f"{waiting} prompt tokens are waiting (max_queued_tokens={limit}): come back later")
