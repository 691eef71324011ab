"""A target with scripted latencies: no model, no clock, exact stamps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pocketllm.bench.arm import ArmSet
from pocketllm.bench.targets.contract import Ask, Need, Sample
from pocketllm.bench.targets.rig import Rig


@dataclass
class FakeTarget:
    """`cost(n)` gives (prefill s/token, decode s/token) of the n-th request; `spoil` may change a sample."""

    cost: Callable[[int], tuple[float, float]]
    spoil: Callable[[int, Ask, Sample], None] = lambda number, ask, sample: None
    tokens_per_chunk: int = 1
    kind: str = "fake"
    asked: list[Ask] = field(default_factory=list)
    digest: str = "same"
    busy: int = 0
    has: frozenset[Need] = frozenset()
    pid: int | None = None
    resets: bool | None = None
    num_resets: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(requests, concurrency) of each load."""
    is_closed: bool = False

    def ask(self, ask: Ask) -> Sample:
        number = len(self.asked)
        self.asked.append(ask)
        prefill, decode = self.cost(number)
        start = 1_000_000_000
        first = start + round(prefill * len(ask.prompt_token_ids) * 1e9)
        counts = chunk_counts(ask.max_tokens, self.tokens_per_chunk)
        ends = [sum(counts[: index + 1]) for index in range(len(counts))]
        sample = Sample(
            *(start, start, start),
            t_first_ns=first,
            chunk_t_ns=[first + round((end - ends[0]) * decode * 1e9) for end in ends],
            chunk_ntok=counts,
            n_prompt=len(ask.prompt_token_ids),
            n_cached=0,
            n_out=ask.max_tokens,
            out_ids=tuple(range(ask.max_tokens)),
            finish="length",
        )
        self.spoil(number, ask, sample)
        return sample

    def load(self, asks: Sequence[Ask], concurrency: int) -> list[Sample]:
        self.loads.append((len(asks), concurrency))
        return [self.ask(ask) for ask in asks]

    def probe(self, ask: Ask) -> Sample:
        return self.ask(ask)

    def reset_cache(self) -> bool | None:
        self.num_resets += 1
        return self.resets

    def in_flight(self) -> int:
        return self.busy

    def describe(self) -> Mapping[str, Any]:
        return {"served_by": "a script", "plan": {"device": "cpu"}}

    def fingerprint(self) -> str:
        return self.digest

    def close(self) -> None:
        self.is_closed = True


def chunk_counts(n_out: int, per_chunk: int) -> list[int]:
    """n_out tokens in chunks of per_chunk, the last one smaller."""
    return [min(per_chunk, n_out - start) for start in range(0, n_out, per_chunk)]


def fake_rig(targets: Mapping[str, FakeTarget]) -> Rig:
    """A rig whose tokenizer gives a token a word."""
    return Rig(
        targets=targets,
        encode=lambda text: [sum(map(ord, word)) % 50_000 for word in text.split()],
        decode=lambda ids: " ".join(map(str, ids)),
        model={"name": "script", "sha256": "0" * 64},
    )


def steady_rig(arm_set: ArmSet, costs: Mapping[str, float], **kwargs: Any) -> Rig:
    """Each arm always at its own decode and prefill cost, with a little deterministic scatter."""

    def at(cost: float, shift: int) -> Callable[[int], tuple[float, float]]:
        return lambda number: (cost * wobble(number + shift), cost * wobble(number + shift))

    return fake_rig(
        {arm.name: FakeTarget(at(costs[arm.name], 7 * index), **kwargs) for index, arm in enumerate(arm_set.arms)}
    )


def wobble(number: int) -> float:
    """A reproducible scatter of about ±0.2 %."""
    return 1.0 + 0.004 * ((number * 2654435761 % 1000) / 1000 - 0.5)
