"""Many requests in flight: places, arrival times, the client's own lag; over threads and in the engine's loop."""

import threading
import time
from pathlib import Path

import pytest

from pocketllm.bench.arm import make_arms
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.rig import open_rig
from pocketllm.bench.targets.streams import LagWatch, run_load
from pocketllm.engine.options import EngineOptions
from tests.asks import make_ask, peak_in_flight


def ask(name: str, offset_s: float | None = None) -> Ask:
    return Ask(name, (1, 2), "a b", 3, offset_s)


class Counter:
    """A server that takes 20 ms a request and knows how many it has at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.order: list[str] = []

    def send(self, one: Ask, due_ns: int) -> Sample:
        sent = time.perf_counter_ns()
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(one.prompt_id)
        time.sleep(0.02)
        with self.lock:
            self.now -= 1
        return Sample(due_ns, sent, sent, chunk_t_ns=[time.perf_counter_ns()], out_text=one.prompt_id)


@pytest.mark.parametrize("concurrency", [1, 2, 4])
def test_so_many_requests_are_in_flight_and_samples_keep_their_order(concurrency: int) -> None:
    server = Counter()
    names = [str(number) for number in range(8)]
    samples = run_load(server.send, [ask(name) for name in names], concurrency)

    assert server.most == concurrency
    assert [sample.out_text for sample in samples] == names
    assert server.order[:concurrency] == names[:concurrency] or set(server.order[:concurrency]) == set(
        names[:concurrency]
    )
    assert all(sample.loop_lag_ms is not None and sample.loop_lag_ms >= 0 for sample in samples)


def test_arrivals_leave_at_their_time_whatever_is_in_flight() -> None:
    server = Counter()
    offsets = [0.05, 0.0, 0.01, 0.01]
    begin = time.perf_counter_ns()
    samples = run_load(server.send, [ask(str(n), offset) for n, offset in enumerate(offsets)], concurrency=1)

    due = [(sample.t_sched_ns - begin) / 1e9 for sample in samples]
    assert due == pytest.approx(offsets, abs=0.02)
    assert all(sample.t_send_ns >= sample.t_sched_ns for sample in samples)
    assert server.most == 3


def test_a_failure_of_the_client_itself_is_raised_and_hands_out_nothing_more() -> None:
    sent = []

    def broken(one: Ask, due_ns: int) -> Sample:
        sent.append(one)
        raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        run_load(broken, [ask(str(n)) for n in range(50)], concurrency=2)

    assert len(sent) < 50


def test_a_thread_that_holds_the_interpreter_is_seen_as_lag() -> None:
    with LagWatch() as watch:
        time.sleep(0.1)
        begin = time.perf_counter_ns()
        sum(range(6_000_000))  # one call into C: nobody else runs
        end = time.perf_counter_ns()
        time.sleep(0.05)

    held_ms = (end - begin) / 1e6
    assert watch.p99_ms(begin, end + int(2e7)) == pytest.approx(held_ms, abs=max(12.0, 0.3 * held_ms))
    assert watch.p99_ms(0, 1) is None


# -- the engine in this process ----------------------------------------------------------------------------------------
def test_the_engine_keeps_so_many_requests_in_one_batch_and_answers_each_as_if_alone(tiny_gguf: Path) -> None:
    options = EngineOptions(model=str(tiny_gguf), threads=1, backend="reference")
    rig = open_rig(make_arms(["base"], options), options, lambda line: None)
    try:
        asks = [make_ask(f"x{number}", 12, 5, rig.encode, rig.decode) for number in range(6)]
        target = rig.targets["base"]
        alone = [target.ask(one).out_ids for one in asks]
        assert target.reset_cache() is True
        together = target.load(asks, 3)
        idle = target.in_flight()
    finally:
        rig.close()

    assert [sample.out_ids for sample in together] == alone
    assert peak_in_flight(together) == 3
    assert {sample.n_cached for sample in together} == {0}
    assert idle == 0


def test_the_engine_takes_arrivals_at_their_time(tiny_gguf: Path) -> None:
    options = EngineOptions(model=str(tiny_gguf), threads=1, backend="reference")
    rig = open_rig(make_arms(["base"], options), options, lambda line: None)
    try:
        asks = [make_ask("x", 12, 3, rig.encode, rig.decode) for _ in range(2)]
        timed = [
            Ask(one.prompt_id, one.prompt_token_ids, "", 3, offset)
            for one, offset in zip(asks, (0.2, 0.0), strict=True)
        ]
        begin = time.perf_counter_ns()
        late, early = rig.targets["base"].load(timed, 1)
    finally:
        rig.close()

    assert (late.t_sched_ns - begin) / 1e9 == pytest.approx(0.2, abs=0.05)
    assert late.t_send_ns >= late.t_sched_ns > early.t_send_ns
    assert (late.error, early.error, late.out_ids) == (None, None, early.out_ids)
