"""The engine in this process: its loop is driven here, so nothing stands between a step and its time stamp."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pocketllm.bench.targets.contract import Ask, Need, Sample
from pocketllm.errors import PocketLLMError

if TYPE_CHECKING:
    from pocketllm.engine.lifecycle.request import Event
    from pocketllm.engine.load import Engine

NUMBERS = itertools.count()


@dataclass
class Running:
    """A request in the loop, and what has come of it."""

    sample: Sample
    ids: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    end: Any = None
    compiles_before: int = 0

    @property
    def has_ended(self) -> bool:
        return self.end is not None or self.sample.error is not None


class EngineTarget:
    """One loop over weights that other arms may share; `engine` is made for this arm alone."""

    kind = "engine"
    has = frozenset({Need.ENGINE, Need.STRUCTURED})

    def __init__(self, engine: "Engine", on_close: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self._on_close = on_close

    @property
    def pid(self) -> int:
        return os.getpid()

    def ask(self, ask: Ask) -> Sample:
        """Submit, then step until the terminal event. The first token's stamp closes prefill: its id was read."""
        return self.load([ask], 1)[0]

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Sample]:
        """Submit what is due and has a place, then step; the loop takes it in at the step's beginning."""
        begin_ns = time.perf_counter_ns()
        order = sorted(range(len(asks)), key=lambda place: asks[place].offset_s or 0.0)
        waiting, running, found = iter(order), dict[int, Running](), dict[int, Running]()
        place = next(waiting, None)
        while place is not None or running:
            while place is not None and self.may_leave(asks[place], begin_ns, len(running), concurrency):
                found[place] = running[place] = self.submit(asks[place], begin_ns)
                place = next(waiting, None)
            if running and not self.engine.loop.step():
                self.give_up(running.values())
            elif not running:
                time.sleep(0.0005)  # nothing is due yet
            ended = [key for key, one in running.items() if one.has_ended]
            for key in ended:
                del running[key]
        return [complete(found[place]) for place in range(len(asks))]

    def may_leave(self, ask: Ask, begin_ns: int, num_running: int, concurrency: int) -> bool:
        """Whether its time has come, or a place is free."""
        if ask.offset_s is None:
            return num_running < concurrency
        return time.perf_counter_ns() >= begin_ns + ask.offset_s * 1e9

    def submit(self, ask: Ask, begin_ns: int) -> Running:
        """Hand a request to the loop; a refusal is its error."""
        from pocketllm.engine.lifecycle.request import FinishEvent, Request, TokenEvent
        from pocketllm.engine.lifecycle.sampling.params import SamplingParams
        from pocketllm.engine.structured.constraint import json_schema

        held = None if ask.json_schema is None else json_schema(ask.json_schema)
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True, constraint=held)
        request = Request(f"bench-{next(NUMBERS)}", ask.prompt_token_ids, params)
        now = time.perf_counter_ns()
        # who is due while a step runs has come to the engine and waits for it: from then on it is time to first token
        sent = now if ask.offset_s is None else begin_ns + round(ask.offset_s * 1e9)
        one = Running(Sample(t_sched_ns=sent, t_send_ns=sent, t_start_ns=now, n_prompt=len(ask.prompt_token_ids)))
        one.compiles_before = self.engine.loop.stats().num_compiles

        def sink(event: "Event") -> None:
            stamp = time.perf_counter_ns()
            match event:
                case TokenEvent():
                    one.stamps.append(stamp)
                    one.ids.append(event.token_id)
                    one.sample.out_text += event.text
                case FinishEvent():
                    one.sample.out_text += event.text
                    one.end = event
                    one.sample.compiles = self.engine.loop.stats().num_compiles - one.compiles_before

        try:
            self.engine.loop.submit(request, sink)
        except PocketLLMError as error:
            one.sample.error = str(error)
        return one

    def give_up(self, running: Iterable[Running]) -> None:
        """The loop has no work left: whoever has not ended never will."""
        for one in running:
            if not one.has_ended:
                one.sample.error = "the loop came to rest without ending the request"

    def probe(self, ask: Ask) -> Sample:
        """Nothing to learn of an engine that is here."""
        return self.ask(ask)

    def in_flight(self) -> int:
        stats = self.engine.loop.stats()
        return int(stats.num_running + stats.num_waiting)

    def reset_cache(self) -> bool | None:
        """The loop's own word; None where it has no prefix cache."""
        return self.engine.loop.reset_prefix_cache() or None

    def describe(self) -> Mapping[str, Any]:
        return {"served_by": "engine in process", "plan": self.engine.plan.as_dict()}

    def fingerprint(self) -> str:
        """Plan, and size and time of the weight files: code that is loaded cannot change."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.engine.checkpoint.files]
        text = json.dumps([self.engine.plan.as_dict(), files], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        """End this arm's loop; whoever shares its weights closes the engine that holds them."""
        self.engine.close()
        self._on_close()


def complete(one: Running) -> Sample:
    """Fill a sample from its terminal event and the stamps of its tokens."""
    sample, end = one.sample, one.end
    if end is None:
        return sample
    if end.times.scheduled_s is not None:
        sample.t_start_ns = int(end.times.scheduled_s * 1e9)
        sample.srv_queue_s = max(0.0, (sample.t_start_ns - sample.t_send_ns) / 1e9)
    sample.t_first_ns = one.stamps[0] if one.stamps else None
    sample.chunk_t_ns, sample.chunk_ntok = one.stamps, [1] * len(one.stamps)
    sample.out_ids, sample.n_out = tuple(one.ids), len(one.ids)
    sample.n_cached = end.num_cached_tokens
    sample.finish = end.reason.value
    sample.error = end.error
    return sample
