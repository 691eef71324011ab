"""Every validity code is turned on by what it is there for, and is silent without it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.bench.analysis import conditions, validity
from pocketllm.bench.analysis.contrasts import Analysis, Question, analyze
from pocketllm.bench.analysis.entry import result_entry
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.analysis.verdict import Require, Word, exit_code
from pocketllm.bench.arm import Arm, ArmSet, Isolation, Role
from pocketllm.bench.record import judged_words
from pocketllm.bench.scenarios import find_scenario
from pocketllm.bench.schedule import Slot, order
from pocketllm.bench.targets.contract import Sample
from pocketllm.bench.targets.gate import GateAnswer, GateState
from pocketllm.errors import NotJudgedError
from tests.unit.test_bench_run import GREEN, run

ARMS = ArmSet(
    (Arm("base", role=Role.BASELINE), Arm("b", {"prefill_chunk": 64}), Arm("null", role=Role.NULL)), Isolation.TOGGLE
)
SCENARIO = replace(find_scenario("decode"), n_prompt=16, n_out=8)
STEP_NS = 10_000_000


def sample(step_ns: float, send_ns: int = 0) -> Sample:
    """One request: a prefill of 16 steps, then 8 tokens a step apart; the server's own clock agrees."""
    first = send_ns + round(16 * step_ns)
    times = [first + round(number * step_ns) for number in range(8)]
    return Sample(
        *(send_ns, send_ns, send_ns),
        t_first_ns=first,
        chunk_t_ns=times,
        chunk_ntok=[1] * 8,
        n_prompt=16,
        n_cached=0,
        n_out=8,
        out_ids=tuple(range(8)),
        finish="length",
        srv_prefill_s=16 * step_ns / 1e9,
        srv_decode_s=7 * step_ns / 1e9,
    )


Spoil = Callable[[Slot, Measured], Measured]


def measure(
    spoil: Spoil = lambda slot, item: item,
    cost: Callable[[Slot], float] = lambda slot: 1.0,
    blocks: int = 12,
    steady_start: bool | None = True,
    extra: Sequence[Check] = (),
) -> Analysis:
    """A run of two requests a slot, one after another, each spoiled as told; `cost` multiplies the time of a slot."""
    slots = order(ARMS.names, blocks, seed=4)
    rng = np.random.default_rng(7)
    measured = [
        spoil(slot, Measured(slot.block, slot.arm, sample(STEP_NS * cost(slot) * float(np.exp(noise)), send_ns)))
        for slot in slots
        for send_ns, noise in zip((0, 10**10), rng.normal(0, 0.002, 2), strict=True)
    ]
    question = Question(SCENARIO, ARMS, slots, {"decode": 0.01}, steady_start=steady_start)
    return analyze(question, measured, extra)


def changed(**fields: Any) -> Callable[[Measured], Measured]:
    """A request whose sample has other fields."""
    return lambda item: replace(item, sample=replace(item.sample, **fields))


def only(arm: str, change: Callable[[Measured], Measured], blocks: Sequence[int] = range(12)) -> Spoil:
    """A change to the requests of one arm in these blocks."""
    return lambda slot, item: change(item) if slot.arm == arm and slot.block in blocks else item


def condition(**fields: Any) -> Callable[[Measured], Measured]:
    """A request measured under other conditions."""
    return lambda item: replace(item, **fields)


def together(item: Measured) -> Measured:
    """Two requests were to be in flight, and were."""
    return replace(item, offered=2, sample=sample(STEP_NS))


def penalized(slot: Slot) -> float:
    return 1.03**slot.position


def haunted(slot: Slot) -> float:
    return 1.05 if slot.prev_arm == "b" else 1.0


def drifting(slot: Slot) -> float:
    return 1.0 + 0.002 * slot.index


@dataclass(frozen=True)
class Case:
    """How a code is turned on, with which severity and value, and the nearest thing that leaves it off."""

    code: str
    severity: str
    value: float | None
    on: Mapping[str, Any]
    off: Mapping[str, Any]


CASES = [
    Case(
        *("V01", "block", 2.0),
        on={"spoil": only("b", changed(error="HTTP 500"), [3])},
        off={"spoil": only("b", changed(http_status=500), [3])},
    ),
    Case(
        *("V02", "run", 24.0),
        on={"spoil": only("b", changed(n_out=7))},
        off={"spoil": lambda slot, item: replace(changed(n_out=7)(item), asked=(16, 7))},
    ),
    Case(
        *("V02", "run", 2.0),
        on={"spoil": only("b", changed(finish="stop"))},
        off={"spoil": lambda slot, item: changed(finish="stop")(item)},
    ),
    Case(
        *("V03", "run", 2.0),
        on={"spoil": only("b", changed(n_out=0, chunk_t_ns=[], chunk_ntok=[]), [0])},
        off={"spoil": only("b", changed(out_ids=None), [0])},
    ),
    Case(
        *("V04", "run", 12.0),
        on={"spoil": only("b", changed(n_cached=12))},
        off={"spoil": lambda slot, item: replace(changed(n_cached=12 * (slot.arm == "b"))(item), warm=True)},
    ),
    Case(
        *("V04", "note", 12.0),
        on={"spoil": lambda slot, item: changed(n_cached=12)(item)},
        off={"spoil": lambda slot, item: changed(n_cached=0)(item)},
    ),
    Case(
        *("V05", "run", 0.03),
        on={"cost": lambda slot: 1.03 if slot.arm == "null" else 1.0},
        off={"cost": lambda slot: 1.03 if slot.arm == "b" else 1.0},
    ),
    Case(
        *("V05", "note", 0.004),
        on={"cost": lambda slot: 1.004 if slot.arm == "null" else 1.0},
        off={"cost": lambda slot: 1.03 if slot.arm == "null" else 1.0},
    ),
    Case("V06", "note", 0.061, on={"cost": penalized}, off={"cost": lambda slot: 1.001**slot.position}),
    Case("V07", "note", 0.05, on={"cost": haunted}, off={"cost": lambda slot: 1.001 if slot.prev_arm == "b" else 1.0}),
    Case(
        *("V08", "block", 1.0),
        on={"spoil": lambda slot, item: replace(item, throttle_mask=0x40 * (slot.arm == "b" and slot.block == 5))},
        # all alike, or idle in one arm, which is no throttling
        off={"spoil": lambda slot, item: replace(item, throttle_mask=0x40 * (slot.block == 5) + (slot.arm == "b"))},
    ),
    Case(
        *("V09", "block", 0.033),
        on={"spoil": only("b", condition(loop_lag_ms=2.0), [5])},
        off={"spoil": only("b", condition(loop_lag_ms=0.5), [5])},
    ),
    Case(
        *("V10", "block", 0.5),
        on={"spoil": only("b", condition(offered=2), [5])},
        off={"spoil": only("b", together, [5])},
    ),
    Case(
        *("V10", "note", 0.5),
        on={"spoil": only("b", lambda item: changed(srv_running=1.0)(together(item)), [5])},
        off={"spoil": only("b", lambda item: changed(srv_running=2.0)(together(item)), [5])},
    ),
    Case(
        *("V13", "block", 3.0),
        on={"spoil": only("b", condition(compiles=3), [5])},
        off={"spoil": only("b", condition(compiles=0), [5])},
    ),
    Case(
        *("V14", "run", 0.1),
        on={"spoil": only("b", lambda item: slow_clock(item, 1.1))},
        off={"spoil": only("b", lambda item: slow_clock(item, 1.03))},
    ),
    Case("V15", "note", 0.07, on={"cost": drifting, "steady_start": False}, off={"cost": drifting}),
]


def slow_clock(item: Measured, ratio: float) -> Measured:
    """The server says less than the client sees."""
    return changed(srv_decode_s=(item.sample.srv_decode_s or 0.0) / ratio)(item)


def found(analysis: Analysis, code: str, severity: str | None = None) -> list[Check]:
    return [c for c in analysis.checks if c.code == code and severity in (None, c.severity.value)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.severity}")
def test_a_code_is_on_with_its_value_and_severity_and_off_without_its_cause(case: Case) -> None:
    check = found(measure(**case.on), case.code, case.severity)[0]

    assert check.value == pytest.approx(case.value, rel=0.25)
    assert check.detail
    assert found(measure(**case.off), case.code, case.severity) == []


def test_the_remedy_for_a_late_client_is_one_that_its_number_of_streams_allows() -> None:
    def remedy(**fields: Any) -> str:
        analysis = measure(spoil=only("b", condition(loop_lag_ms=2.0, **fields), [5]))
        return found(analysis, "V09")[0].detail.partition(": ")[2]

    assert remedy() == "leave a core to the client (fewer --threads)"
    assert remedy(offered=2) == "use fewer streams a client process, or leave a core to the client (fewer --threads)"


def test_a_drift_of_fewer_than_two_blocks_is_not_known() -> None:
    [one] = conditions.unsteady([0.5], None)
    [two] = conditions.unsteady([0.5, 0.6], None)

    assert one.detail == "no heat soak; how the baseline drifted is not known"
    assert two.detail == "no heat soak; the baseline drifted by +10.5%"


def test_a_clean_run_has_nothing_to_remark() -> None:
    analysis = measure()

    assert analysis.checks == ()
    assert (analysis.valid, analysis.valid_blocks) == (True, tuple(range(12)))


@pytest.mark.parametrize("code", ["V01", "V08", "V09", "V10", "V13"])
def test_a_block_that_a_rule_took_is_lost_for_every_arm_and_no_other(code: str) -> None:
    case = next(case for case in CASES if case.code == code)
    analysis = measure(**case.on)
    [check] = found(analysis, code)

    assert check.severity is Severity.BLOCK
    assert set(range(12)) - set(analysis.valid_blocks) == set(check.blocks)
    assert len(check.blocks) == 1
    assert {result.fit.blocks for result in analysis.results} == {11}


def test_a_rule_that_took_too_many_blocks_takes_the_run() -> None:
    analysis = measure(spoil=only("b", condition(compiles=1), range(6)))

    assert analysis.broken == ["V01 6 of 12 blocks are valid; 7 are needed"]
    assert all(result.verdict is None or result.verdict.word.value == "INVALID" for result in analysis.results)


def test_a_block_that_the_seam_lost_is_lost_to_the_estimate() -> None:
    analysis = measure(extra=[Check("V04", Severity.BLOCK, 1.0, "the cache was not reset", (2, 3))])

    assert analysis.valid_blocks == (0, 1, 4, 5, 6, 7, 8, 9, 10, 11)


def test_order_effects_fell_few_blocks_and_are_noted_with_twelve() -> None:
    fit = next(result.fit for result in measure(cost=penalized).results if result.arm == "b")
    few = replace(fit, blocks=11)

    assert [c.severity for c in validity.order_checks("decode", "b", fit, 3, 0.01)] == [Severity.NOTE]
    assert [c.severity for c in validity.order_checks("decode", "b", few, 3, 0.01)] == [Severity.RUN]


def test_several_judged_metrics_share_the_one_percent_of_the_null_arm() -> None:
    fit = next(result.fit for result in measure().results if result.role is Role.NULL)
    edge = 3.5 * float(fit.se)  # beyond 99 % of t with 9 degrees of freedom, and inside 99.9 %
    moved = replace(fit, estimate=np.array(edge))

    assert [c.code for c in validity.null_check("decode", moved, 0.01)] == ["V05"]
    assert validity.null_check("decode", moved, 0.01, tests=10) == []


def test_a_small_difference_of_the_null_arm_leaves_large_ones_of_others_their_word() -> None:
    def cost(slot: Slot) -> float:
        return {"null": 1.004, "b": 0.5}.get(slot.arm, 1.0)

    analysis = measure(cost=cost)

    assert analysis.valid
    assert [c.severity for c in found(analysis, "V05")] == [Severity.NOTE]
    assert next(r.verdict.word for r in analysis.results if r.arm == "b" and r.verdict) is Word.FASTER
    nearly = measure(cost=lambda slot: {"null": 1.004, "b": 1.012}.get(slot.arm, 1.0))
    assert next(r.verdict.word for r in nearly.results if r.arm == "b" and r.verdict) is Word.SMALL


def test_a_gate_leaves_room_for_what_the_null_arm_showed() -> None:
    analysis = measure(cost=lambda slot: {"null": 1.004, "b": 1.0085}.get(slot.arm, 1.0))
    question = Question(SCENARIO, ARMS, (), {"decode": 0.01}, steady_start=None)
    entries = [result_entry(question, result) for result in analysis.results]
    [judged] = [entry for entry in entries if entry["arm"] == "b" and entry["metric"] == "decode"]

    assert judged["bias"] == pytest.approx(0.004, rel=0.25)
    assert judged["high"] < 1 + judged["margin"] < judged["high"] * (1 + judged["bias"])
    document = {"valid": True, "results": [judged]}
    assert exit_code(judged_words(document), require=Require.SAME_OR_FASTER) == 4
    assert (
        exit_code(judged_words({"valid": True, "results": [{**judged, "bias": 0.0}]}), require=Require.SAME_OR_FASTER)
        == 0
    )


@pytest.mark.parametrize(
    ("after", "detail"),
    [
        ({"base": "1", "b": "2"}, None),
        ({"base": "1", "b": "3"}, "weights, plan or served model of b changed mid-run"),
        ({"base": "1"}, "b no longer answered at the end"),
    ],
)
def test_v12_a_target_that_is_another_at_the_end_takes_the_run(after: dict[str, str], detail: str | None) -> None:
    checks = validity.changed({"base": "1", "b": "2"}, after)

    assert [(c.code, c.severity, c.detail) for c in checks] == ([("V12", Severity.RUN, detail)] if detail else [])


def test_v11_a_red_arm_is_not_timed_one_without_a_fixture_is_noted_and_a_green_one_is_silent(tmp_path: Path) -> None:
    def gate(state: GateState) -> Callable[..., GateAnswer]:
        return lambda rig, arm: GateAnswer(state, "tokens not compared")

    with pytest.raises(NotJudgedError, match="V11"):
        run(tmp_path, gate=gate(GateState.RED))
    noted, silent = run(tmp_path, gate=gate(GateState.ABSENT)), run(tmp_path, gate=lambda rig, arm: GREEN)

    assert [c["severity"] for c in noted.document["checks"] if c["code"] == "V11"] == ["note"]
    assert [c for c in silent.document["checks"] if c["code"] == "V11"] == []


def test_every_code_has_a_test_here_or_a_name_in_it() -> None:
    tested = {case.code for case in CASES} | {"V11", "V12"}

    assert tested == {f"V{number:02d}" for number in range(1, 16)}


def test_a_cached_count_that_one_arm_does_not_tell_beside_a_warm_one_is_not_equal() -> None:
    warm = measure(spoil=lambda slot, item: changed(n_cached=None if slot.arm == "b" else 12)(item))
    cold = measure(spoil=only("b", changed(n_cached=None)))

    assert [c.severity for c in found(warm, "V04")] == [Severity.RUN]
    assert [(c.severity, c.value) for c in found(cold, "V04")] == [(Severity.NOTE, None)]


def test_a_server_that_counts_no_transport_in_its_prefill_is_noted_only() -> None:
    prefill = replace(SCENARIO, judged=("prefill",), shown=())
    slow = [replace(item, srv_prefill_s=0.1) for item in [sample(STEP_NS)]]
    checks = conditions.server_clock([Measured(0, "base", item) for item in slow], prefill.primary)

    assert [(c.code, c.severity) for c in checks] == [("V14", Severity.NOTE)]
    assert checks[0].value == pytest.approx(0.6)


def test_concurrency_is_counted_while_there_is_something_to_admit() -> None:
    def request(send: int, last: int) -> Sample:
        return replace(sample(STEP_NS), t_send_ns=send, chunk_t_ns=[last])

    wave = [request(0, 10), request(0, 20), request(0, 30)]
    closed = [request(0, 10), request(0, 20), request(10, 30), request(20, 40)]

    assert conditions.achieved_concurrency(wave, 3) == 3
    assert conditions.achieved_concurrency(closed, 2) == 2


def test_a_soak_is_steady_when_its_last_five_slots_drift_by_less_than_half_the_margin() -> None:
    assert conditions.steady([2.0, 1.5, 1.0, 1.0, 1.001, 1.0, 1.001], 0.01)
    assert not conditions.steady([1.0, 1.01, 1.02, 1.03, 1.04], 0.01)
    assert not conditions.steady([1.0] * 4, 0.01)
