"""A device for the fake model that does nothing until it is waited for, and then all it was given, in order.

Whoever looks at a token too early, or hands over one that was not drawn yet, gets a wrong answer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.drawing import FORBIDDEN, NOT_FINITE, Draw, Drawn
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.sampling.logits_processors import candidates
from pocketllm.engine.lifecycle.sampling.logprobs import token_logprobs
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.sampler import only, place_of
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.steps.runner import Runner
from tests.fake_model import FakeModel, FakeTokenizer, limits

Logits = npt.NDArray[np.float32]


@dataclass
class Promise:
    """What a call will give once the device has come to it."""

    device: "FakeDevice"
    call: Callable[[], Any]
    value: Any = None
    error: Exception | None = None
    is_done: bool = False

    def __len__(self) -> int:
        return len(self.wait())

    def wait(self) -> Any:
        self.device.run_until(self)
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class FakeDevice:
    """Forward passes of a model and draws from their logits; obeys backends.api.drawing.Drawer."""

    model: FakeModel
    queue: deque[Promise] = field(default_factory=deque)
    drawn: dict[int, int] = field(default_factory=dict)
    """The last token of each row."""
    num_draws: int = 0
    most_queued: int = 0
    cache: Any = None

    def __post_init__(self) -> None:
        self.cache = self.model.new_cache()

    def enqueue(self, call: Callable[[], Any]) -> Promise:
        promise = Promise(self, call)
        self.queue.append(promise)
        self.most_queued = max(self.most_queued, len(self.queue))
        return promise

    def run_until(self, last: Promise) -> None:
        while not last.is_done:
            promise = self.queue.popleft()
            try:
                promise.value = promise.call()
            except Exception as error:
                promise.error = error
            promise.is_done = True

    def forward(self, batch: ForwardBatch) -> Promise:
        return self.enqueue(lambda: self.model.forward(self.with_drawn(batch), self.cache))

    def with_drawn(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with tokens in the place of what stood for them; a row without one will not be looked at."""
        ids = [token_id if token_id >= 0 else self.drawn[-1 - token_id] for token_id in batch.input_ids.tolist()]
        return replace(batch, input_ids=np.maximum(np.array(ids, np.int32), 0))

    def draw(self, logits: Promise, draws: Sequence[Draw]) -> Promise:
        def run() -> list[Drawn]:
            results = [drawn(logits.wait()[draw.row], draw) for draw in draws]
            self.drawn = {draw.row: result.token_id for draw, result in zip(draws, results, strict=True)}
            return results

        assert len({draw.row for draw in draws}) == len(draws) > 0
        self.num_draws += len(draws)
        return self.enqueue(run)

    def capped(self, logits: Promise, cap: float) -> Promise:
        return self.enqueue(lambda: cap * np.tanh(logits.wait() / cap))


def drawn(logits: Logits, draw: Draw) -> Drawn:
    """What the host's own functions make of a Draw."""
    row = logits.copy() if draw.allowed is None else only(logits, draw.allowed)
    for edit in draw.edits:
        edit.apply(row)
    token_id = int(np.argmax(row))
    if not np.isfinite(row[token_id]):
        return Drawn(FORBIDDEN if np.isfinite(logits.max()) else NOT_FINITE)
    if draw.temperature:
        params = SamplingParams(
            temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p, max_tokens=1
        )
        ids, weights = candidates(row, params)
        place = place_of(weights, draw.share)
        token_id = place if ids is None else int(ids[place])
    if draw.num_logprobs is None:
        return Drawn(token_id)
    found = token_logprobs(logits, token_id, draw.num_logprobs)
    return Drawn(token_id, found.chosen, found.top_ids, found.top_logprobs)


def loop_on_device(model: FakeModel | None = None, **changes: Any) -> tuple[EngineLoop, Scheduler, FakeDevice]:
    """A loop over a fake device, with a step in flight unless `changes` say otherwise."""
    some = limits(**{"max_steps_in_flight": 2, **changes})
    device = FakeDevice(model or FakeModel(some.num_blocks, some.block_size))
    scheduler = Scheduler(some, device.model.vocab_size)

    def take(hidden: Promise, rows: npt.NDArray[np.int32]) -> Promise:
        return device.enqueue(lambda: hidden.wait()[rows])

    runner = Runner(device.forward, device.model.logits, some.block_size, take)
    runner.draw_by(device, lambda hidden: hidden, lambda logits: logits.wait())
    return EngineLoop(scheduler, runner, FakeTokenizer()), scheduler, device  # type: ignore[arg-type]  # a fake
