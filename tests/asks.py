"""Requests of a benchmark as tests make them, and how many of them were in flight at once."""

from collections.abc import Sequence

from pocketllm.bench.latency import Timed
from pocketllm.bench.scenarios.contract import Planned
from pocketllm.bench.scenarios.prompts import Decode, Encode, ask_of
from pocketllm.bench.targets.contract import Ask


def make_ask(salt: str, n_prompt: int, max_tokens: int, encode: Encode, decode: Decode) -> Ask:
    """A request of exactly n_prompt prompt tokens that shares no beginning with another salt's."""
    return ask_of(Planned(salt, n_prompt, max_tokens), encode, decode)


def peak_in_flight(requests: Sequence[Timed]) -> int:
    """Most requests in flight at one moment, as the client saw it; a request that ends as another begins is over."""
    served = [request for request in requests if request.chunk_t_ns]
    changes = sorted(
        [*((request.t_send_ns, 1) for request in served), *((request.chunk_t_ns[-1], -1) for request in served)]
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
