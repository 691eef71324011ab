"""Whole runs against a scripted target: every validity code is turned on once."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pocketllm.bench.analysis.verdict import exit_code
from pocketllm.bench.arm import ArmSet, make_arms
from pocketllm.bench.latency import slot_values
from pocketllm.bench.pace import Wish, minutes
from pocketllm.bench.record import judged_words
from pocketllm.bench.run import Done, Outcome, Run, Settings, past_nulls
from pocketllm.bench.scenarios import find_scenario, known
from pocketllm.bench.targets import rig as rig_module
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.gate import GateAnswer, GateState
from pocketllm.bench.targets.rig import Rig
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import MachineError, NotJudgedError, OptionError
from pocketllm.evidence.store import keep, read_record, writing
from tests.ctrl_c import ctrl_c_heard, interrupted_while
from tests.fake_target import FakeTarget, fake_rig, steady_rig, wobble

ARMS = ("base", "b:prefill_chunk=64")
GREEN = GateAnswer(GateState.GREEN, "golden: IDENTICAL")


class Quiet:
    def __init__(self, stop_after: int | None = None) -> None:
        self.lines: list[str] = []
        self.slots = 0
        self.intervals: list[str] = []
        self.stop_after = stop_after

    def say(self, text: str) -> None:
        self.lines.append(text)

    def slot_done(self, done: Done) -> None:
        self.slots = done.slots
        self.intervals.append(done.interval)
        if done.slots == self.stop_after:
            raise KeyboardInterrupt


def settings(directory: Path, arm_set: ArmSet | None = None, **changes: Any) -> Settings:
    scenario = replace(find_scenario("decode"), n_prompt=16, n_out=8)
    base = Settings(
        *(scenario, arm_set or make_arms(ARMS, EngineOptions()), {"decode": 0.01}, directory),
        requests=2,
        blocks=12,
        soak_s=0.0,
    )
    return replace(base, **changes)


def run(
    directory: Path,
    costs: Mapping[str, float] | None = None,
    gate: Callable[[Rig, Any], GateAnswer] = lambda rig, arm: GREEN,
    progress: Quiet | None = None,
    rig: Rig | None = None,
    **changes: Any,
) -> Outcome:
    made = settings(directory, **changes)
    rig = rig or steady_rig(made.arm_set, costs or {"base": 0.01, "b": 0.012, "null": 0.01})
    return Run(made, rig, gate, progress or Quiet()).run()


def codes(outcome: Outcome, severity: str) -> set[str]:
    return {check["code"] for check in outcome.document["checks"] if check["severity"] == severity}


def words(outcome: Outcome) -> dict[str, str]:
    return {r["arm"]: r["verdict"] for r in outcome.document["results"] if r["verdict"] is not None}


def code_of(outcome: Outcome, **gates: Any) -> int:
    return exit_code(judged_words(outcome.document), **gates)


def spoiled(arm: str, spoil: Callable[[int, Ask, Sample], None]) -> Rig:
    """A steady rig whose one arm's samples are changed."""
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.01, "null": 0.01})
    target = rig.targets[arm]
    assert isinstance(target, FakeTarget)
    target.spoil = spoil
    return rig


def test_a_slower_arm_is_called_slower_and_everything_is_in_the_record(tmp_path: Path) -> None:
    outcome = run(tmp_path)
    record = read_record(outcome.path)

    assert words(outcome) == {"b": "SLOWER"}
    assert (outcome.document["valid"], outcome.document["null_valid"]) == (True, True)
    result = next(r for r in record.document["results"] if (r["arm"], r["metric"]) == ("b", "decode"))
    assert result["ratio"] == pytest.approx(1.2, rel=0.002)
    assert result["low"] < 1.2 < result["high"]
    assert record.complete
    phases = [row["phase"] for row in record.row_dicts]
    assert {phase: phases.count(phase) for phase in set(phases)} == {"warmup": 9, "burnin": 36, "measure": 72}
    assert code_of(outcome) == 0
    assert code_of(outcome, fail_on_slower=True) == 1


def test_a_faster_arm_is_called_faster(tmp_path: Path) -> None:
    assert words(run(tmp_path, {"base": 0.01, "b": 0.008, "null": 0.01})) == {"b": "FASTER"}


def test_equal_arms_are_the_same(tmp_path: Path) -> None:
    assert words(run(tmp_path, {"base": 0.01, "b": 0.01, "null": 0.01})) == {"b": "SAME"}


def test_a_null_arm_that_differs_makes_the_run_invalid(tmp_path: Path) -> None:
    outcome = run(tmp_path, {"base": 0.01, "b": 0.012, "null": 0.0103})

    assert codes(outcome, "run") == {"V05"}
    assert words(outcome) == {"b": "INVALID"}
    assert (outcome.document["valid"], outcome.document["null_valid"], code_of(outcome)) == (False, False, 3)


def test_failed_requests_cost_their_block_for_every_arm(tmp_path: Path) -> None:
    def spoil(number: int, ask: Ask, sample: Sample) -> None:
        if "decode-1-5-" in ask.prompt_id and "burnin" not in ask.prompt_id:
            sample.error = "HTTP 500"

    rigs = dict.fromkeys(("base", "b", "null"), spoil)
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.012, "null": 0.01})
    for name in rigs:
        rig.targets[name].spoil = spoil  # type: ignore[attr-defined]  # all are FakeTargets
    outcome = run(tmp_path, rig=rig)

    assert codes(outcome, "block") == {"V01"}
    assert outcome.document["valid_blocks"] == 11
    assert words(outcome) == {"b": "SLOWER"}


def test_an_arm_that_dies_leaves_nothing_to_judge(tmp_path: Path) -> None:
    def dies(number: int, ask: Ask, sample: Sample) -> None:
        if number > 8:
            sample.error, sample.n_out = "connection refused", 0

    outcome = run(tmp_path, rig=spoiled("b", dies))

    assert "V01" in codes(outcome, "run")
    assert code_of(outcome) == 3


def test_an_arm_that_is_gone_at_the_end_leaves_a_whole_record_that_says_so(tmp_path: Path) -> None:
    def gone() -> str:
        if target.asked[8:]:
            raise NotJudgedError("connection refused")
        return "same"

    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.01, "null": 0.01})
    target = rig.targets["b"]
    assert isinstance(target, FakeTarget)
    target.fingerprint = gone  # type: ignore[method-assign]  # a server that has gone
    outcome = run(tmp_path, rig=rig)

    assert [c["detail"] for c in outcome.document["checks"] if c["code"] == "V12"] == [
        "b no longer answered at the end"
    ]
    assert read_record(outcome.path).complete
    assert code_of(outcome) == 3


def test_an_arm_that_is_dead_from_the_start_is_not_judged(tmp_path: Path) -> None:
    def dead(number: int, ask: Ask, sample: Sample) -> None:
        sample.error = "connection refused"

    with pytest.raises(NotJudgedError, match="arm b does not answer: connection refused"):
        run(tmp_path, rig=spoiled("b", dead))


def shorter(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_out -= 1


def stops(number: int, ask: Ask, sample: Sample) -> None:
    sample.finish = "stop"


def longer_prompt(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_prompt = len(ask.prompt_token_ids) + 1


def empty(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_out, sample.chunk_t_ns, sample.chunk_ntok = 0, [], []


def cached(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_cached = 12


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(shorter, "V02"), (stops, "V02"), (longer_prompt, "V02"), (empty, "V03"), (cached, "V04")],
)
def test_an_arm_that_did_other_work_makes_the_run_invalid(
    tmp_path: Path, spoil: Callable[[int, Ask, Sample], None], code: str
) -> None:
    outcome = run(tmp_path, rig=spoiled("b", spoil))

    assert code in codes(outcome, "run")
    assert code_of(outcome) == 3


def test_caches_that_are_warm_or_unknown_alike_are_noted(tmp_path: Path) -> None:
    def unknown(number: int, ask: Ask, sample: Sample) -> None:
        sample.n_cached = None

    rig = spoiled("b", unknown)
    outcome = run(tmp_path, rig=rig)

    assert "V04" in codes(outcome, "note")
    assert outcome.document["valid"]


def ordered_rig(arm_set: ArmSet, penalty: Callable[[int, str], float]) -> Rig:
    """Costs that depend on the place in the run: `penalty(measured slot number, arm)` multiplies."""
    order: list[str] = []

    def at(name: str) -> Callable[[int], tuple[float, float]]:
        def cost(number: int) -> tuple[float, float]:
            if number < 3:
                return 0.01, 0.01
            if number % 3 == 0:  # a burn-in begins a slot
                order.append(name)
            value = 0.01 * wobble(number) * penalty(len(order) - 1, order[-2] if len(order) > 1 else "")
            return value, value

        return cost

    return fake_rig({arm.name: FakeTarget(at(arm.name)) for arm in arm_set.arms})


@pytest.mark.parametrize(("blocks", "severity"), [(7, "run"), (12, "note")])
def test_a_position_effect_is_seen_and_few_blocks_fall_for_it(tmp_path: Path, blocks: int, severity: str) -> None:
    arm_set = make_arms([*ARMS, "c:prefill_chunk=32"], EngineOptions())
    rig = ordered_rig(arm_set, lambda slot, before: 1.0 + 0.03 * (slot % 4))
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, blocks=blocks)

    assert "V06" in codes(outcome, severity)
    assert outcome.document["valid"] is (severity == "note")


@pytest.mark.parametrize(("blocks", "severity"), [(7, "run"), (12, "note")])
def test_a_predecessor_effect_is_seen(tmp_path: Path, blocks: int, severity: str) -> None:
    arm_set = make_arms([*ARMS, "c:prefill_chunk=32"], EngineOptions())
    rig = ordered_rig(arm_set, lambda slot, before: 1.05 if before == "b" else 1.0)
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, blocks=blocks)

    assert "V07" in codes(outcome, severity)
    if severity == "note":
        # the t interval is adjusted for it and holds 0, the signed-rank interval is not
        assert words(outcome)["b"] == "NOT DISTINGUISHABLE"


def test_a_red_golden_check_times_nothing(tmp_path: Path) -> None:
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.01, "null": 0.01})

    def gate(rig: Rig, arm: Any) -> GateAnswer:
        return GateAnswer(GateState.RED, "golden capital: REGRESSION") if arm.name == "b" else GREEN

    with pytest.raises(NotJudgedError, match="V11 b is not timed: golden capital: REGRESSION") as caught:
        run(tmp_path, gate=gate, rig=rig)

    assert caught.value.exit_code == 3
    assert [target.asked for target in rig.targets.values()] == [[], [], []]  # type: ignore[attr-defined]  # FakeTargets
    assert list(tmp_path.iterdir()) == []


def test_an_arm_without_a_fixture_is_timed_and_noted(tmp_path: Path) -> None:
    absent = GateAnswer(GateState.ABSENT, "tokens not compared: no fixture")
    outcome = run(tmp_path, gate=lambda rig, arm: absent)

    assert "V11" in codes(outcome, "note")
    assert any("tokens not compared" in check["detail"] for check in outcome.document["checks"])


def test_a_golden_check_that_could_not_run_is_no_pass(tmp_path: Path) -> None:
    with pytest.raises(NotJudgedError, match="could not be checked"):
        run(tmp_path, gate=lambda rig, arm: GateAnswer(GateState.NOT_JUDGED, "timeout"))


def test_arms_whose_greedy_answers_differ_are_noted(tmp_path: Path) -> None:
    def other(number: int, ask: Ask, sample: Sample) -> None:
        sample.out_ids = (7,) * ask.max_tokens

    outcome = run(tmp_path, rig=spoiled("b", other))

    assert "V11" in codes(outcome, "note")
    assert any("b gives other token ids than base" in check["detail"] for check in outcome.document["checks"])


def test_a_target_that_changes_midway_makes_the_run_invalid(tmp_path: Path) -> None:
    def change(number: int, ask: Ask, sample: Sample) -> None:
        target.digest = "other" if number > 5 else "same"

    rig = spoiled("b", change)
    target = rig.targets["b"]
    assert isinstance(target, FakeTarget)
    outcome = run(tmp_path, rig=rig)

    assert codes(outcome, "run") == {"V12"}


def test_a_run_without_a_soak_says_so_with_the_drift(tmp_path: Path) -> None:
    drifting = fake_rig(
        {name: FakeTarget(lambda number: (0.01 + 1e-4 * number,) * 2) for name in ("base", "b", "null")}
    )
    outcome = run(tmp_path, rig=drifting)
    check = next(check for check in outcome.document["checks"] if check["code"] == "V15")

    assert check["severity"] == "note"
    assert check["value"] > 0.2


def test_a_seam_with_a_request_in_flight_stops_the_run_and_keeps_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pocketllm.bench.run.DRAIN_S", 0.02)

    def stick(number: int, ask: Ask, sample: Sample) -> None:
        target.busy = 1 if number >= 9 else 0

    rig = spoiled("b", stick)
    target = rig.targets["b"]
    assert isinstance(target, FakeTarget)
    with pytest.raises(MachineError, match="in flight"):
        run(tmp_path, rig=rig)

    (path,) = tmp_path.glob("*.parquet")
    assert not read_record(path).complete


def test_ctrl_c_keeps_what_was_paid_for_and_gives_no_verdict(tmp_path: Path) -> None:
    outcome = run(tmp_path, progress=Quiet(stop_after=20))
    record = read_record(outcome.path)

    assert outcome.interrupted
    assert not record.complete
    assert len({row["slot"] for row in record.row_dicts if row["phase"] == "measure"}) == 20
    assert record.document["valid_blocks"] == 6
    assert words(outcome) == {}
    assert [r["arm"] for r in record.document["results"] if r["metric"] == "decode"] == ["b", "null"]


def test_ctrl_c_while_the_record_is_written_leaves_it_whole_with_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "write_parquet", interrupted_while(writing.write_parquet))
    with ctrl_c_heard():
        outcome = run(tmp_path)

    assert outcome.interrupted
    assert read_record(outcome.path).complete
    assert words(outcome) == {"b": "SLOWER"}
    assert [path.name for path in tmp_path.iterdir()] == [outcome.path.name]


def test_ctrl_c_in_the_first_block_leaves_a_readable_record(tmp_path: Path) -> None:
    outcome = run(tmp_path, progress=Quiet(stop_after=1))

    assert read_record(outcome.path).document["results"] == []


def test_without_a_null_arm_there_are_intervals_and_no_verdict(tmp_path: Path) -> None:
    arm_set = make_arms(ARMS, EngineOptions(), with_null=False)
    outcome = run(tmp_path, arm_set=arm_set, blocks=None)

    assert words(outcome) == {}
    assert [r["arm"] for r in outcome.document["results"] if r["metric"] == "decode"] == ["b"]
    assert (outcome.document["null_valid"], code_of(outcome)) == (False, 0)


def test_blocks_are_rounded_up_and_said(tmp_path: Path) -> None:
    outcome = run(tmp_path, blocks=13)

    assert len(outcome.document["schedule"]) == 18
    assert any("13 blocks rounded up to 18" in note for note in outcome.document["notes"])


def test_a_budget_that_cannot_hold_the_minimum_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot hold 12 blocks of 3 arms.*they need at least about") as caught:
        run(tmp_path, blocks=None, budget_s=1e-6)

    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_several_runs_share_is_told_as_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^--budget 2s, 0\.5s a run, cannot hold 12 blocks of 3 arms"):
        raise replace(settings(tmp_path), budget_s=0.5, runs=4).wish.refusal(3.0)


def test_a_budget_that_the_first_point_breaks_is_refused_before_a_longer_one_is_waited_for(tmp_path: Path) -> None:
    scenario = find_scenario("prefill")
    made = settings(tmp_path, scenario=scenario)
    rig = steady_rig(made.arm_set, {"base": 0.01, "b": 0.01, "null": 0.01})
    with pytest.raises(OptionError, match=r"they need at least about .* here; raise --budget, or ask for less"):
        run(tmp_path, rig=rig, scenario=scenario, blocks=None, requests=None, budget_s=1e-6)
    first = rig.targets["base"]
    assert isinstance(first, FakeTarget)
    assert {len(ask.prompt_token_ids) for ask in first.asked} == {512}


def test_a_budget_decides_the_number_of_blocks(tmp_path: Path) -> None:
    outcome = run(tmp_path, blocks=None, requests=1, budget_s=60.0)

    assert len(outcome.document["schedule"]) == 48


class Clock:
    """A clock that scripted targets move: `seconds` a request, after `from_request` of them `later`."""

    def __init__(self, seconds: float, later: float, from_request: int) -> None:
        self.now, self.requests = 0.0, 0
        self.seconds, self.later, self.from_request = seconds, later, from_request

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def spend(self, number: int, ask: Ask, sample: Sample) -> None:
        self.requests += 1
        share = ask.max_tokens / 8  # a burn-in is shorter
        self.now += share * (self.seconds if self.requests <= self.from_request else self.later)


def clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, **changes: Any) -> Outcome:
    """A run whose seconds are the clock's."""
    monkeypatch.setattr("pocketllm.bench.run.time", clock)
    monkeypatch.setattr("pocketllm.bench.pace.time", clock)
    arm_set = make_arms(ARMS, EngineOptions())
    rig = steady_rig(arm_set, {"base": 0.01, "b": 0.012, "null": 0.01}, spoil=clock.spend)
    return run(tmp_path, rig=rig, arm_set=arm_set, **changes)


def test_a_machine_that_becomes_slow_gets_short_slots_before_it_gets_fewer_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.5, 2.0, from_request=40)
    outcome = clocked(tmp_path, monkeypatch, clock, blocks=None, requests=None, budget_s=50.0)
    rows = [row for row in read_record(outcome.path).row_dicts if row["phase"] == "measure"]
    per_slot = [sum(row["slot"] == slot for row in rows) for slot in range(36)]

    assert any("short slots from block 6 on" in note for note in outcome.document["notes"])
    assert (per_slot[:18], per_slot[18:]) == ([2] * 18, [1] * 18)
    assert words(outcome) == {"b": "SLOWER"}


def test_a_machine_that_becomes_slow_later_stops_after_a_whole_row_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.5, 20.0, from_request=100)
    outcome = clocked(tmp_path, monkeypatch, clock, blocks=None, requests=1, budget_s=100.0)

    assert len(outcome.document["schedule"]) > 18
    assert any("stopped at the end of a row set" in note for note in outcome.document["notes"])
    assert outcome.document["valid_blocks"] % 6 == 0
    assert 12 <= outcome.document["valid_blocks"] < len(outcome.document["schedule"])
    assert words(outcome) == {"b": "SLOWER"}


def test_a_machine_that_stays_as_calibrated_runs_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.5, 0.5, from_request=0)
    outcome = clocked(tmp_path, monkeypatch, clock, blocks=None, requests=None, budget_s=80.0)

    assert outcome.document["notes"] == []
    assert clock.now <= 80.0


def test_every_prompt_is_new_and_none_shares_a_beginning(tmp_path: Path) -> None:
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.01, "null": 0.01})
    run(tmp_path, rig=rig)
    prompts = [ask for t in rig.targets.values() for ask in t.asked if "agreement" not in ask.prompt_id]  # type: ignore[attr-defined]  # FakeTargets

    assert len({ask.prompt_token_ids[:3] for ask in prompts}) == len(prompts)
    assert {len(ask.prompt_token_ids) for ask in prompts} == {16, 4}


def test_past_null_arms_raise_the_floor_once_there_are_eight(tmp_path: Path) -> None:
    only_null = make_arms(ARMS[:1], EngineOptions())
    for _ in range(8):
        run(tmp_path, {"base": 0.01, "null": 0.01005}, arm_set=only_null, blocks=8, requests=1)
    outcome = run(tmp_path, {"base": 0.01, "null": 0.01}, arm_set=only_null, blocks=8, requests=1)
    result = next(r for r in outcome.document["results"] if r["metric"] == "decode")

    assert "8 past null arms" in result["floor_source"]
    assert result["floor"] == pytest.approx(0.005, abs=0.001)


def test_a_kept_null_arm_counts_once_and_also_where_the_local_copy_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nobody"))
    local = tmp_path / "records" / "local"
    only_null = make_arms(ARMS[:1], EngineOptions())
    first = run(local, {"base": 0.01, "null": 0.01}, arm_set=only_null, blocks=8, requests=1)
    keep(first.path, force=True)
    with_copy = past_nulls(local, first.document)
    first.path.unlink()

    assert len(with_copy["decode"]) == 1
    assert past_nulls(local, first.document) == with_copy


@pytest.mark.parametrize("per_chunk", [1, 3, 4])
def test_the_decode_rate_is_right_however_many_tokens_a_chunk_holds(per_chunk: int) -> None:
    target = FakeTarget(lambda number: (0.001, 0.02), tokens_per_chunk=per_chunk)
    sample = target.ask(Ask("x", tuple(range(10)), "", 128))

    assert slot_values([sample])["decode"] == pytest.approx(0.02)
    assert slot_values([sample])["prefill"] == pytest.approx(0.001)


def test_a_decode_rate_without_token_counts_uses_the_billed_total() -> None:
    sample = FakeTarget(lambda number: (0.001, 0.02)).ask(Ask("x", tuple(range(10)), "", 128))
    sample.chunk_ntok = []

    assert slot_values([sample])["decode"] == pytest.approx(0.02)


def test_a_slot_is_the_median_of_its_requests() -> None:
    samples = [FakeTarget(lambda n, c=c: (c, c)).ask(Ask("x", (1, 2), "", 4)) for c in (0.1, 0.9, 0.2)]  # type: ignore[misc]  # the default binds c

    assert slot_values(samples)["prefill"] == pytest.approx(0.2)


def test_scenarios_are_the_files_of_their_folder() -> None:
    assert {"concurrency", "context", "decode", "mixed", "prefill", "prefix", "structured", "wave"} <= set(known())
    with pytest.raises(OptionError, match="known: concurrency, context, decode"):
        find_scenario("everything")


def test_too_few_and_far_too_many_blocks_are_refused_not_changed_silently() -> None:
    with pytest.raises(OptionError, match="--blocks 6 is below 7"):
        Wish(3, blocks=6).planned_blocks()
    with pytest.raises(OptionError, match="--blocks 999999999 is above 100000"):
        Wish(3, blocks=999_999_999).planned_blocks()


def test_durations_are_for_people() -> None:
    assert (minutes(42), minutes(150)) == ("42 s", "2.5 min")


# -- fresh starts ------------------------------------------------------------------------------------------------------
def process_rig(arm_set: ArmSet, costs: Callable[[Any, int], float]) -> tuple[Rig, list[tuple[str, int, FakeTarget]]]:
    """A rig whose arms are started afresh, and every target that it ever opened: (arm, start, target)."""
    opened: list[tuple[str, int, FakeTarget]] = []

    def start(arm: Any, number: int) -> FakeTarget:
        alive = [name for name, _, target in opened if not target.is_closed]
        assert len(alive) < len(arm_set.arms), "more processes at once than arms"
        cost = costs(arm, number)
        target = FakeTarget(lambda n: (cost * wobble(n + 7 * number), cost * wobble(n + 3 * number)))
        opened.append((arm.name, number, target))
        return target

    rig = fake_rig({})
    rig.start_arm = start
    rig.renew(arm_set, 0)
    return rig, opened


def lucky_rig(seated: list[str]) -> Rig:
    """Arms that are equal but for the memory they have: each seat is up to 3 % slower for as long as it lasts."""

    def seat(name: str) -> FakeTarget:
        luck = 0.01 * (1.0 + 0.03 * (len(seated) * 2654435761 % 1000) / 1000)
        seated.append(name)
        return FakeTarget(lambda number: (luck * wobble(number), luck * wobble(number)))

    rig = fake_rig({name: seat(name) for name in ("base", "b", "null")})
    rig.seat_arm = lambda arm: seat(arm.name)
    return rig


def test_arms_that_share_weights_get_new_memory_in_every_block_so_that_its_luck_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig_module, "RESEAT_SHARE", 1e6)  # a block of this rig takes no time
    seated: list[str] = []
    outcome = run(tmp_path, rig=lucky_rig(seated), blocks=24)
    result = next(r for r in outcome.document["results"] if (r["arm"], r["metric"]) == ("b", "decode"))

    assert outcome.document["valid"]
    assert words(outcome) != {"b": "SLOWER"}
    assert result["low"] < 1.0 < result["high"]
    blocks = [tuple(seated[first : first + 3]) for first in range(0, len(seated), 3)]
    assert len(seated) == 72
    assert {frozenset(block) for block in blocks} == {frozenset(("base", "b", "null"))}
    assert len(set(blocks)) > 1, "arms were always seated in the same order, so that each may get the same place"


def test_arms_keep_their_memory_where_a_new_one_is_dear_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig_module, "RESEAT_SHARE", 0.0)
    seated: list[str] = []
    outcome = run(tmp_path, rig=lucky_rig(seated), blocks=12)

    assert len(seated) == 6
    assert any("arms keep their memory from here on" in note for note in outcome.document["notes"])


PROCESSES = ("base:via=http", "b:prefill_chunk=64,via=http")


def test_every_start_has_processes_of_its_own_and_is_the_sample(tmp_path: Path) -> None:
    arm_set = make_arms(PROCESSES, EngineOptions())
    # what differs from start to start is the same for all arms of one
    rig, opened = process_rig(arm_set, lambda arm, start: (1.0 + 0.2 * start) * (0.012 if arm.name == "b" else 0.01))
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, starts=5, blocks=30)
    document = outcome.document
    result = next(r for r in document["results"] if (r["arm"], r["metric"]) == ("b", "decode"))

    assert words(outcome) == {"b": "SLOWER"}
    assert (result["n"], result["n_unit"], document["starts"]) == (5, "start", 5)
    assert result["ratio"] == pytest.approx(1.2, rel=0.003)
    assert [(name, start) for name, start, _ in opened] == [
        (name, start) for start in range(5) for name in ("base", "b", "null")
    ]
    assert [target.is_closed for _, start, target in opened] == [start < 4 for _, start, _ in opened]
    rows = read_record(outcome.path).row_dicts
    assert {(row["block"] // 6, row["start"]) for row in rows if row["phase"] == "measure"} == {
        (n, n) for n in range(5)
    }
    assert {row["start"] for row in rows if row["phase"] == "warmup"} == set(range(5))
    assert "started afresh 5 times" in document["claim"]


def test_a_start_that_is_not_what_the_first_one_was_makes_the_run_invalid(tmp_path: Path) -> None:
    arm_set = make_arms(PROCESSES, EngineOptions())
    rig, _ = process_rig(arm_set, lambda arm, start: 0.01)
    fresh = rig.start_arm
    assert fresh is not None

    def rebuilt(arm: Any, number: int) -> FakeTarget:
        target = fresh(arm, number)
        assert isinstance(target, FakeTarget)
        target.digest = "another build" if (arm.name, number) == ("b", 1) else "same"
        return target

    rig.start_arm = rebuilt
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, starts=2, blocks=12)

    assert codes(outcome, "run") == {"V12"}
    # a block later nothing else is possible, and the run ends
    assert outcome.document["valid_blocks"] == 7
    assert any("leave weights and servers as they are" in note for note in outcome.document["notes"])


def test_ctrl_c_between_two_starts_keeps_the_first(tmp_path: Path) -> None:
    arm_set = make_arms(PROCESSES, EngineOptions())
    rig, opened = process_rig(arm_set, lambda arm, start: 0.01)
    fresh = rig.start_arm
    assert fresh is not None

    def interrupted(arm: Any, number: int) -> Any:
        if number:
            raise KeyboardInterrupt
        return fresh(arm, number)

    rig.start_arm = interrupted
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, starts=2, blocks=12)

    assert (outcome.interrupted, outcome.document["valid_blocks"]) == (True, 6)
    assert all(target.is_closed for _, _, target in opened)


def test_a_second_run_over_the_same_rig_begins_with_a_fresh_start(tmp_path: Path) -> None:
    arm_set = make_arms(PROCESSES, EngineOptions())
    rig, opened = process_rig(arm_set, lambda arm, start: 0.01)
    for _ in range(2):
        run(tmp_path, rig=rig, arm_set=arm_set, starts=2, blocks=12, requests=1)

    assert [start for name, start, _ in opened if name == "base"] == [0, 1, 0, 1]


# -- stopping on a half-width ------------------------------------------------------------------------------------------
def test_a_run_stops_at_the_end_of_a_row_set_once_it_is_resolved(tmp_path: Path) -> None:
    outcome = run(tmp_path, blocks=48, requests=1, until=0.01, min_n=13)

    assert outcome.document["valid_blocks"] == 18
    assert any(note.startswith("stopped after 18 blocks") for note in outcome.document["notes"])
    assert words(outcome) == {"b": "SLOWER"}


def test_a_run_that_is_never_resolved_says_so(tmp_path: Path) -> None:
    outcome = run(tmp_path, blocks=18, requests=1, until=1e-9)

    assert outcome.document["valid_blocks"] == 18
    assert any("all 18 blocks ran before" in note for note in outcome.document["notes"])


def test_starts_are_judged_at_their_ends_only(tmp_path: Path) -> None:
    arm_set = make_arms(PROCESSES, EngineOptions())
    rig, opened = process_rig(arm_set, lambda arm, start: 0.01)
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, starts=4, blocks=48, requests=1, until=0.5)

    # the first start alone says nothing of starts; two do
    assert outcome.document["valid_blocks"] == 24
    assert max(start for _, start, _ in opened) == 1
    assert (outcome.document["starts"], "started 2 times" in outcome.document["claim"]) == (2, True)


# -- the soak, the seam, progress --------------------------------------------------------------------------------------
def test_a_soak_that_settles_leaves_no_note_and_its_rows_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = clocked(tmp_path, monkeypatch, Clock(0.5, 0.5, from_request=0), soak_s=300.0, requests=1, blocks=48)
    rows = read_record(outcome.path).row_dicts
    soaked = [row for row in rows if row["phase"] == "soak"]

    assert {row["arm"] for row in soaked} == {"base"}
    assert len(soaked) >= 5
    assert not any(check["code"] == "V15" for check in outcome.document["checks"])
    assert len({row["prompt_id"] for row in rows if "agreement" not in row["prompt_id"]}) == len(rows) - 3


def test_a_machine_that_goes_on_warming_up_is_called_unsteady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.5, 0.5, from_request=0)
    monkeypatch.setattr("pocketllm.bench.run.time", clock)
    monkeypatch.setattr("pocketllm.bench.pace.time", clock)
    arm_set = make_arms(ARMS, EngineOptions())
    rig = fake_rig(
        {name: FakeTarget(lambda n: (0.01 * 1.02**n,) * 2, spoil=clock.spend) for name in ("base", "b", "null")}
    )
    outcome = run(tmp_path, rig=rig, arm_set=arm_set, soak_s=300.0, requests=1)

    assert any("the heat soak did not settle" in check["detail"] for check in outcome.document["checks"])


def test_every_slot_begins_with_a_reset_of_its_arms_cache_and_a_failed_one_is_said_once(tmp_path: Path) -> None:
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.01, "null": 0.01})
    targets = {name: target for name, target in rig.targets.items() if isinstance(target, FakeTarget)}
    targets["b"].resets = False
    outcome = run(tmp_path, rig=rig)

    assert {name: target.num_resets for name, target in targets.items()} == {"base": 12, "b": 12, "null": 12}
    assert [note for note in outcome.document["notes"] if "did not reset its prefix cache" in note] == [
        "b did not reset its prefix cache; prompts are salted and new all the same"
    ]


def test_progress_tells_the_running_interval_of_every_arm(tmp_path: Path) -> None:
    progress = Quiet()
    run(tmp_path, progress=progress, requests=1)

    assert progress.intervals[0] == ""
    assert re.fullmatch(r"b 1\.\d{3} to 1\.\d{3}, null \d\.\d{3} to \d\.\d{3}", progress.intervals[-1])


# -- loads -------------------------------------------------------------------------------------------------------------
def test_a_slot_at_a_concurrency_hands_over_from_burn_in_to_measuring_without_draining(tmp_path: Path) -> None:
    scenario = find_scenario("concurrency").at(["1", "4"]).resized(16, 8)
    margins = dict.fromkeys(scenario.primary, 0.01)
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.012, "null": 0.01})
    outcome = run(tmp_path, rig=rig, scenario=scenario, margins=margins)
    target = rig.targets["base"]
    assert isinstance(target, FakeTarget)
    rows = [row for row in read_record(outcome.path).row_dicts if row["slot"] == 0]

    # point 1: a burn-in, then two requests; point 4: eight of burn-in and eight measured, in one load
    assert target.loads[:3] == [(1, 1), (2, 1), (16, 4)]
    assert Counter((row["point"], row["phase"], row["offered"]) for row in rows) == {
        ("1", "burnin", 1): 1,
        ("1", "measure", 1): 2,
        ("4", "burnin", 4): 8,
        ("4", "measure", 4): 8,
    }
    assert {result["metric"] for result in outcome.document["results"]} >= {"throughput@1", "throughput@4", "tpot@4"}
    assert [point["label"] for point in outcome.document["workload"]["points"]] == ["1", "4"]


def test_arrival_times_are_the_same_for_all_arms_of_a_block(tmp_path: Path) -> None:
    scenario = find_scenario("mixed").resized(16, 8)
    rig = steady_rig(make_arms(ARMS, EngineOptions()), {"base": 0.01, "b": 0.012, "null": 0.01})
    run(tmp_path, rig=rig, scenario=scenario, margins=dict.fromkeys(scenario.primary, 0.01))
    asked: dict[str, list[list[tuple[float | None, int, int]]]] = {}
    for name, target in rig.targets.items():
        assert isinstance(target, FakeTarget)
        timed = [(a.offset_s, len(a.prompt_token_ids), a.max_tokens) for a in target.asked if a.offset_s is not None]
        asked[name] = [timed[start : start + 12] for start in range(12, len(timed), 12)]

    assert len(asked["base"]) == 12
    assert sorted(map(str, asked["base"])) == sorted(map(str, asked["b"])) == sorted(map(str, asked["null"]))
    assert len(set(map(str, asked["base"]))) == 12


def test_a_scenario_that_an_arm_cannot_run_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="structured needs structured output"):
        run(tmp_path, scenario=find_scenario("structured"))

    assert list(tmp_path.iterdir()) == []
