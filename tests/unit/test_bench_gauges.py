"""What a server says of itself while it is measured: compilations inside a request, and how many run at a time."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pocketllm.bench.targets import gauges
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.engine import EngineTarget
from pocketllm.bench.targets.gauges import GaugeWatch, Reading, parse_slots
from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
from pocketllm.engine.lifecycle.loop import EngineLoop
from tests.fake_model import fake_loop
from tests.unit.test_bench_targets import ASK, OURS, PLAIN, Server, serving


class Compiling(Server):
    """Compiles something each time that its metrics are read."""

    def __init__(self) -> None:
        super().__init__("pocketllm", OURS)
        self.counts = itertools.count()  # the handler looks twice an answer

    @property
    def metrics(self) -> str:
        count = next(self.counts) // 2
        return f'pocketllm:num_requests_running{{m="x"}} 0\npocketllm:num_compiles_total{{m="x"}} {count}.0\n'

    @metrics.setter
    def metrics(self, value: object) -> None: ...


def test_a_served_request_tells_what_was_compiled_around_it() -> None:
    with serving(Compiling()) as url:
        target = OpenAIHTTPTarget(url)
        sample = target.ask(ASK)
        target.close()

    assert (sample.error, sample.compiles) == (None, 1)


def test_a_server_that_counts_no_compilations_tells_none() -> None:
    server = Server("vllm", OURS)
    server.metrics = "vllm:num_requests_running 0\n"
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        sample = target.ask(ASK)
        target.close()

    assert (sample.error, sample.compiles, sample.srv_running) == (None, None, None)


def test_a_request_in_process_tells_what_was_compiled_while_it_ran() -> None:
    loop, _, _ = fake_loop()
    counts = iter([0, 2])
    compiling = EngineLoop(loop._scheduler, loop._steps.runner, loop._tokenizer, lambda: next(counts))
    target = EngineTarget(type("Engine", (), {"loop": compiling, "close": lambda self: None})())

    sample = target.ask(Ask("x", (1, 2, 3), "", 4))

    assert (sample.error, sample.n_out, sample.compiles) == (None, 4, 2)
    assert loop.stats().num_compiles == 0


def readings(*running: int | None, step_ns: int = 10) -> Iterator[Reading]:
    for number, count in enumerate(running):
        yield Reading(number * step_ns, number * step_ns + 1, count, compiles=number // 3)


@pytest.mark.parametrize(
    ("running", "expected"),
    [((4, 2, 2, 1, 2, 4), 2.0), ((4, 2, None, 2, None, 4), None), ((None,) * 6, None)],
    ids=["median inside", "too few", "not told"],
)
def test_running_requests_are_the_median_of_readings_while_all_were_offered(
    running: tuple[int | None, ...], expected: float | None
) -> None:
    watch = GaugeWatch(lambda: None, 4)
    watch._readings = list(readings(*running))
    sends = [0, 1, 2, 5, 30, 45]
    samples = [Sample(t, t, t, chunk_t_ns=[t + 3, t + 9]) for t in sends]
    watch.fill(samples)

    assert {sample.srv_running for sample in samples} == {expected}
    assert [sample.compiles for sample in samples] == [None, 0, 0, 0, 1, None]


def test_a_server_that_admits_fewer_than_offered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Server):
        def post(self, body: dict[str, Any]) -> tuple[int, list[bytes]]:
            time.sleep(0.05)
            return super().post(body)

    monkeypatch.setattr(gauges, "POLL_S", 0.005)
    server = Slow("llamacpp", PLAIN)
    server.metrics = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 1\n"
    with serving(server) as url:
        target = OpenAIHTTPTarget(url)
        closed = target.load([ASK] * 6, 2)
        at_their_times = target.load([replace(ASK, offset_s=0.0)] * 2, 1)
        target.close()

    assert {sample.srv_running for sample in closed} == {1.0}
    assert {sample.srv_running for sample in at_their_times} == {None}


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([{"is_processing": True}, {"is_processing": False}], 1), ([], 0), ({"error": 1}, None), ([{"id": 0}], None)],
)
def test_slots_of_llama_server_count_as_running_where_they_work(slots: object, expected: int | None) -> None:
    assert parse_slots(slots) == expected
