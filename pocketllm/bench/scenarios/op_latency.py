"""Each operation × type × shape of the engine in this process, and a step of the lifecycle without a model."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from pocketllm.bench.latency import Timed
from pocketllm.bench.probes.cases import Case, Extent
from pocketllm.bench.probes.ceilings import measure_ceilings
from pocketllm.bench.probes.operations import make_cases
from pocketllm.bench.probes.timing import Launch, beside, launches
from pocketllm.bench.scenarios.contract import Need, Point, Scenario
from pocketllm.bench.targets.contract import Ask, Sample

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

STAMPS, DEVICE_STAMPS = 9, 5
"""Of a case in a slot; a device's own clock needs fewer."""
ROUNDS = 5
"""Times that a case and another library's calls for the same are measured in turn."""
LIFECYCLE_WIDTHS = (1, 8)
LIFECYCLE_STEPS = 90


class OpMeter:
    """Measures the operations of one backend; arms that share one share the prepared cases too."""

    def __init__(self, engine: "Engine", extent: Extent | None = None) -> None:
        self.engine = engine
        self.cases = make_cases(engine, extent)
        self.launches = launches(engine.backend, self.cases)

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Bytes and operations of each case, and the ceilings of the device that the backend computes on."""
        capability, probe = self.engine.backend.capability, self.engine.backend.probe
        known: dict[str, Any] = {"backend": capability.name, "cases": self.case_facts()}
        if probe is not None:
            return {**known, "peer": probe.peer.name, "ceilings": dict(probe.ceilings())}
        if capability.device == "cpu":
            return {**known, "ceilings": measure_ceilings(capability.threads).as_dict()}
        return known

    def case_facts(self) -> dict[str, dict[str, Any]]:
        """By case: `peer_s` is what another library took for a call of it, measured in turn with `own_s` of ours."""
        peers: dict[int, Launch] = {}
        found = {}
        for case in self.cases:
            own = self.launches[case.name]
            found[case.name] = {**told(case), **({} if self.engine.backend.probe is None else {"timed": own.how})}
            if case.peer:
                # kinds of one shape have one peer
                if id(case.peer) not in peers:
                    peers[id(case.peer)] = Launch(self.engine.backend, case.peer)
                own_s, peer_s = beside(own, peers[id(case.peer)], ROUNDS)
                found[case.name] |= {"own_s": own_s, "peer_s": peer_s}
        return found

    def __call__(self, point: Point, salt: str) -> Sequence[tuple[Ask, Sample]]:
        """All cases of one operation, or the steps of the lifecycle."""
        if point.label == "lifecycle":
            return [self.lifecycle(width) for width in LIFECYCLE_WIDTHS]
        return [self.measure(case) for case in self.cases if case.op == point.label]

    def measure(self, case: Case) -> tuple[Ask, Sample]:
        """Some times as many calls as a launch has."""
        launch, start = self.launches[case.name], time.perf_counter_ns()
        stamps = STAMPS if self.engine.backend.probe is None else DEVICE_STAMPS
        return as_sample(case.name, start, [launch.seconds() for _ in range(stamps)], launch.count)

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
        return as_sample(f"lifecycle step ×{width}", time.perf_counter_ns(), costs_s, 1)


def told(case: Case) -> dict[str, Any]:
    """What a case is, for whoever reads its times."""
    about = {"op": case.op, "type": case.kind, "shape": case.shape, "rows": case.rows}
    return {"bytes": case.num_bytes, "flops": case.flops, **{key: value for key, value in about.items() if value}}


def as_sample(name: str, start: int, took_s: Sequence[float], calls: int) -> tuple[Ask, Sample]:
    """A case as a row of the record: so many calls, which took so long, are a chunk, and each call a token of it."""
    total, stamps = calls * len(took_s), [start + round(1e9 * end_s) for end_s in accumulate(took_s)]
    sample = Sample(start, start, start, t_first_ns=stamps[0], chunk_t_ns=stamps, finish="measured", n_out=total)
    sample.chunk_ntok = [calls] * len(stamps)
    return Ask(name, (), "", total), sample


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


SHOWN = (
    "store_kv",
    "rms_norm",
    "rope",
    "rope_angles",
    "silu_mul",
    "add",
    "take",
    "to_numpy",
    "embed",
    "mixture",
    "draw",
)
"""`draw` of backends that draw tokens themselves."""

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
