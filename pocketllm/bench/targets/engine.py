"""The engine in this process: its loop is driven here, so nothing stands between a step and its time stamp."""

import hashlib
import itertools
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.errors import PocketLLMError

if TYPE_CHECKING:
    from pocketllm.engine.lifecycle.request import Event
    from pocketllm.engine.load import Engine

NUMBERS = itertools.count()


class EngineTarget:
    """One loop over weights that other arms share; `engine` is a sibling made for this arm alone."""

    kind = "engine"

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._in_flight = 0

    def ask(self, ask: Ask) -> Sample:
        """Submit, then step until the terminal event. The first token's stamp closes prefill: its id was read."""
        from pocketllm.engine.lifecycle.request import FinishEvent, Request, TokenEvent
        from pocketllm.engine.lifecycle.sampling.params import SamplingParams

        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
        ids: list[int] = []
        stamps: list[int] = []
        ends: list[FinishEvent] = []

        def sink(event: "Event") -> None:
            stamp = time.perf_counter_ns()
            match event:
                case TokenEvent():
                    stamps.append(stamp)
                    ids.append(event.token_id)
                case FinishEvent():
                    ends.append(event)

        request = Request(f"bench-{next(NUMBERS)}", ask.prompt_token_ids, params)
        sent = time.perf_counter_ns()
        sample = Sample(t_sched_ns=sent, t_send_ns=sent, t_start_ns=sent, n_prompt=len(ask.prompt_token_ids))
        try:
            self._in_flight += 1
            self.engine.loop.submit(request, sink)
            while not ends and self.engine.loop.step():
                pass
        except PocketLLMError as error:
            sample.error = str(error)
            return sample
        finally:
            self._in_flight -= 1
        if not ends:
            sample.error = "the loop came to rest without ending the request"
            return sample
        return complete(sample, ends[0], ids, stamps)

    def probe(self, ask: Ask) -> Sample:
        """Nothing to learn of an engine that is here."""
        return self.ask(ask)

    def in_flight(self) -> int:
        stats = self.engine.loop.stats()
        return int(self._in_flight + stats.num_running + stats.num_waiting)

    def describe(self) -> Mapping[str, Any]:
        return {"served_by": "engine in process", "plan": self.engine.plan.as_dict()}

    def fingerprint(self) -> str:
        """Plan, and size and time of the weight files: code that is loaded cannot change."""
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.engine.checkpoint.files]
        text = json.dumps([self.engine.plan.as_dict(), files], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def close(self) -> None:
        """End this arm's loop; the run closes the engine whose weights all arms share."""
        self.engine.close()


def complete(sample: Sample, end: Any, ids: list[int], stamps: list[int]) -> Sample:
    """Fill a sample from its terminal event and the stamps of its tokens."""
    if end.times.scheduled_s is not None:
        sample.t_start_ns = int(end.times.scheduled_s * 1e9)
        sample.srv_queue_s = max(0.0, (sample.t_start_ns - sample.t_send_ns) / 1e9)
    sample.t_first_ns = stamps[0] if stamps else None
    sample.chunk_t_ns, sample.chunk_ntok = stamps, [1] * len(stamps)
    sample.out_ids, sample.n_out = tuple(ids), len(ids)
    sample.n_cached = end.num_cached_tokens
    sample.finish = end.reason.value
    sample.error = end.error
    return sample
