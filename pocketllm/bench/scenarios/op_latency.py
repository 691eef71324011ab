"""Each operation × type × shape of the engine in this process, and a step of the lifecycle without a model."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pocketllm.bench.latency import Timed
from pocketllm.bench.probes.ceilings import measure_ceilings
from pocketllm.bench.probes.operations import Case, make_cases
from pocketllm.bench.scenarios.contract import Need, Point, Scenario
from pocketllm.bench.targets.contract import Ask, Sample

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

STAMPS = 9
STAMP_S = 0.5e-3
"""Calls between two stamps take about this long together, so that reading the clock costs nothing."""
LIFECYCLE_WIDTHS = (1, 8)
LIFECYCLE_STEPS = 90


class OpMeter:
    """Measures the operations of one backend; arms that share one share the prepared cases too."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.cases = make_cases(engine)
        self.calls = {case.name: calls_a_stamp(self.timed(case)) for case in self.cases}

    @property
    def facts(self) -> Mapping[str, Any]:
        """Bytes and operations of each case, and the machine's ceilings, where they are the backend's too."""
        capability = self.engine.backend.capability
        known = {
            "backend": capability.name,
            "cases": {case.name: {"bytes": case.num_bytes, "flops": case.flops} for case in self.cases},
        }
        if capability.device != "cpu":
            return known
        return {**known, "ceilings": measure_ceilings(capability.threads).as_dict()}

    def __call__(self, point: Point, salt: str) -> Sequence[tuple[Ask, Sample]]:
        """All cases of one operation, or the steps of the lifecycle."""
        if point.label == "lifecycle":
            return [self.lifecycle(width) for width in LIFECYCLE_WIDTHS]
        return [self.measure(case) for case in self.cases if case.op == point.label]

    def measure(self, case: Case) -> tuple[Ask, Sample]:
        """STAMPS times as many calls as calibration found."""
        calls, run = self.calls[case.name], self.timed(case)
        start, stamps = time.perf_counter_ns(), []
        for _ in range(STAMPS):
            run(calls)
            stamps.append(time.perf_counter_ns())
        return as_sample(case.name, start, stamps, calls)

    def timed(self, case: Case) -> Callable[[int], None]:
        """So many calls, and all of them finished."""
        synchronize, call = self.engine.backend.ops.synchronize, case.call

        def run(count: int) -> None:
            for _ in range(count):
                call()
            synchronize()

        return run

    def lifecycle(self, width: int) -> tuple[Ask, Sample]:
        """Steps of the real loop over a model that answers at once."""
        from pocketllm.engine.lifecycle.null_model import step_costs_s

        limits = self.engine.plan.limits
        costs_s = step_costs_s(
            self.engine.tokenizer,
            width,
            LIFECYCLE_STEPS,
            # a backend whose steps may be in flight draws their tokens, one at a time as well
            is_drawn=self.engine.backend.capability.max_steps_in_flight > 1,
            max_steps_in_flight=limits.max_steps_in_flight,
        )
        start = time.perf_counter_ns()
        ends = [start + round(1e9 * sum(costs_s[: index + 1])) for index in range(len(costs_s))]
        return as_sample(f"lifecycle step ×{width}", start, ends, 1)


def as_sample(name: str, start: int, stamps: list[int], calls: int) -> tuple[Ask, Sample]:
    """A case as a row of the record: a stamp is a chunk, its calls are its tokens."""
    total = calls * len(stamps)
    sample = Sample(start, start, start, t_first_ns=stamps[0], chunk_t_ns=stamps, finish="measured", n_out=total)
    sample.chunk_ntok = [calls] * len(stamps)
    return Ask(name, (), "", total), sample


def calls_a_stamp(run: Callable[[int], None]) -> int:
    """Calls that take about STAMP_S, at least one; the first calls do not count."""
    run(2)
    count = 1
    while True:
        start = time.perf_counter()
        run(count)
        took_s = time.perf_counter() - start
        if took_s >= STAMP_S / 2:
            return max(1, round(count * STAMP_S / took_s))
        count *= 4


def call_s(request: Timed) -> float:
    """Seconds of one call: the median over stamps."""
    ends = [request.t_send_ns, *request.chunk_t_ns]
    gaps = [(after - before) / 1e9 for before, after in pairwise(ends)]
    return statistics.median(gap / count for gap, count in zip(gaps, request.chunk_ntok, strict=True))


def op_costs(requests: Sequence[Timed], slos: Mapping[str, float]) -> dict[str, float]:
    """One number an operation: the geometric mean over its cases, in which each counts alike."""
    return {"op": math.exp(statistics.fmean(math.log(call_s(request)) for request in requests))} if requests else {}


def meters(targets: Mapping[str, Any]) -> dict[str, OpMeter]:
    """One meter a backend, however many arms run on it."""
    by_backend: dict[int, OpMeter] = {}
    for target in targets.values():
        by_backend.setdefault(id(target.engine.backend), OpMeter(target.engine))
    return {name: by_backend[id(target.engine.backend)] for name, target in targets.items()}


SHOWN = ("store_kv", "rms_norm", "rope", "rope_angles", "silu_mul", "add", "take", "to_numpy")

SCENARIO = Scenario(
    name="op_latency",
    about="each operation × type × shape of the backend, and a step of the lifecycle without a model",
    point_words="in {}",
    n_prompt=1,
    n_out=1,
    judged=("op",),
    points=(
        *(Point(op) for op in ("project", "attention", "lifecycle")),
        *(Point(op, judged=False) for op in SHOWN),
    ),
    needs=frozenset({Need.ENGINE}),
    meters=meters,
    costs=op_costs,
)
