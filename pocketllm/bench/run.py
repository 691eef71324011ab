"""The loop: golden gate, warm-up, soak, slots with a seam before each, every sample kept as it comes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pocketllm.bench.analysis import conditions, validity
from pocketllm.bench.analysis.contrasts import Question, analyze, half_width, interim
from pocketllm.bench.analysis.history import history_key, null_history
from pocketllm.bench.analysis.hopeless import FIRST_BLOCKS, hopeless
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.arm import Arm, ArmSet, claim
from pocketllm.bench.pace import Pace, Wish, minutes, plan_words
from pocketllm.bench.record import end_document, start_document, without_words
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import MIN_BLOCKS, Costs, Fitted, Slot, order, row_set_size
from pocketllm.bench.slot_load import Amount, Place, SlotLoad, answered
from pocketllm.bench.targets.contract import MAX_STREAMS, Sample
from pocketllm.bench.targets.gate import Gate, GateState
from pocketllm.bench.targets.rig import Rig
from pocketllm.errors import MachineError, NotJudgedError, OptionError

DRAIN_S = 30.0
"""How long a seam waits for a server that still counts a request in flight."""
SOAK_S = 300.0
SOAK_SHARE = 0.2
"""A heat soak takes at most SOAK_S, and at most this share of the run that follows."""


@dataclass(frozen=True)
class Done:
    """How far a run is. `interval`: the running 95 % intervals of time ratios, in words; empty before there are any."""

    slots: int
    total: int
    arm: str
    block: int
    left_s: float
    interval: str = ""


class Progress(Protocol):
    """What a run tells while it lasts."""

    def say(self, text: str) -> None:
        """One line."""

    def slot_done(self, done: Done) -> None:
        """A slot has ended."""


@dataclass(frozen=True)
class Settings:
    """How one run is to be made. `blocks` None: by the budget, or the default; `requests` None: by calibration.

    until: stop once every judged interval is at most ± this share, but not before `min_n` blocks. soak_s: the longest
    heat soak, 0: none. runs: how many of them share the budget that was asked for.
    """

    scenario: Scenario
    arm_set: ArmSet
    margins: Mapping[str, float]
    directory: Path
    seed: int = 1
    blocks: int | None = None
    budget_s: float | None = None
    requests: int | None = None
    starts: int = 1
    until: float | None = None
    min_n: int = MIN_BLOCKS
    soak_s: float = SOAK_S
    runs: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def wish(self) -> Wish:
        """What was asked of the length."""
        asked = (self.blocks, self.budget_s, self.requests, self.until, self.min_n, self.runs)
        return Wish(len(self.arm_set.arms), self.starts, *asked)


@dataclass(frozen=True)
class Outcome:
    """A finished or interrupted run: the record's document and where it went; complete if interrupted later."""

    document: Mapping[str, Any]
    path: Path
    interrupted: bool


class Run:
    """One run over an opened rig."""

    def __init__(self, settings: Settings, rig: Rig, gate: Gate, progress: Progress) -> None:
        self.settings = settings
        self.rig = rig
        self.gate = gate
        self.progress = progress
        self.checks: list[Check] = []
        self.remarks: list[str] = []
        self.start = 0
        self.load: SlotLoad
        self.fingerprints: dict[str, str] = {}

    # -- before the first slot -----------------------------------------------------------------------------------------
    def fitting_scenario(self) -> Scenario:
        """The scenario as far as these arms can run it; OptionError when they cannot at all."""
        scenario = self.settings.scenario
        for name, target in self.rig.targets.items():
            if refusal := scenario.refusal(name, target.has):
                raise OptionError(refusal)
        widest = max(point.concurrency for point in scenario.points)
        if widest > MAX_STREAMS:
            raise OptionError(f"{scenario.name} keeps {widest} requests in flight; one client holds {MAX_STREAMS}")
        plans = [target.describe().get("plan") or {} for target in self.rig.targets.values()]
        contexts = [int(plan["max_model_len"]) for plan in plans if plan.get("max_model_len")]
        if contexts and scenario.meters is None:
            scenario, left_out = scenario.within(min(contexts))
            if left_out:
                self.tell(f"left out, longer than a context of {min(contexts)}: {', '.join(left_out)}")
        return scenario

    def check_golden(self) -> None:
        """V11 for every arm that differs; NotJudgedError when one is red: what is wrong is not timed."""
        absent = []
        for arm in self.settings.arm_set.arms:
            if arm is self.settings.arm_set.null:
                continue
            answer = self.gate(self.rig, arm)
            match answer.state:
                case GateState.GREEN:
                    self.progress.say(f"{arm.name}: {answer.detail}")
                case GateState.ABSENT:
                    self.progress.say(f"{arm.name}: {answer.detail}")
                    absent.append(f"{arm.name}: {answer.detail}")
                case GateState.RED:
                    raise NotJudgedError(f"V11 {arm.name} is not timed: {answer.detail}")
                case GateState.NOT_JUDGED:
                    raise NotJudgedError(f"V11 {arm.name} could not be checked, and is not timed: {answer.detail}")
        if absent:
            self.checks.append(Check("V11", Severity.NOTE, float(len(absent)), "; ".join(absent)))

    def warm_up(self) -> Costs:
        """One prompt that all arms share, whose answers are compared, then one slot each, which is timed.

        NotJudgedError when an arm cannot answer.
        """
        begun = time.perf_counter()
        answers: dict[str, Sample] = {}
        found = Costs(())
        for arm in self.settings.arm_set.arms:
            place = Place(arm, None, "warmup", self.start)
            probe_s = 0.0
            if self.load.scenario.meters is None:
                before = time.perf_counter()
                answers[arm.name] = answered(arm, self.load.probe(place))
                probe_s = time.perf_counter() - before
            found = self.add_costs(found, place, probe_s, begun)
        self.checks += validity.agreement(answers)
        return replace(found, start_s=self.rig.renew_s + time.perf_counter() - begun)

    def add_costs(self, costs: Costs, place: Place, probe_s: float, begun: float) -> Costs:
        """Run one slot of an arm, and add what its points take: a request, where their number is to be fitted."""
        scenario = self.load.scenario
        open_s: list[float] = []
        fixed_s = costs.fixed_s
        for point in scenario.shapes:
            before = time.perf_counter()
            for _, sample in self.load.run(place, Amount(1, scenario.burnin), [point]):
                answered(place.arm, sample)
            took_s = time.perf_counter() - before
            if point.num_requests is None and scenario.meters is None:
                open_s.append(took_s / (1 + scenario.burnin))
            else:
                fixed_s += took_s
            # the probe is such a request too; the quicker reading counts: a disturbed one must not refuse a run
            request_s = min(open_s[0], probe_s) + sum(open_s[1:]) if open_s else 0.0
            found = Costs((*costs.request_s, request_s), fixed_s)
            self.settings.wish.refuse_early(found, time.perf_counter() - begun)  # the next point may take minutes
        return found

    def soak(self, fitted: Fitted, spent_s: float) -> bool | None:
        """Slots of the baseline until the last ones drift by less than half the margin; None: no time for it."""
        scenario, arm_set, budget_s = self.load.scenario, self.settings.arm_set, self.settings.budget_s
        allowed_s = min(self.settings.soak_s, SOAK_SHARE * fitted.seconds)
        if budget_s is not None:
            allowed_s = min(allowed_s, budget_s - spent_s - fitted.seconds)  # blocks go before a soak
        slot_s = fitted.seconds / (fitted.blocks * len(arm_set.arms))
        if conditions.SOAK_SLOTS * slot_s > allowed_s:
            return None
        word, margin, costs = scenario.judged[0], min(self.settings.margins.values()), list[float]()
        point = next(shape for shape in scenario.shapes if shape.metric(word) in scenario.primary)
        begun = time.perf_counter()
        while time.perf_counter() - begun <= allowed_s:
            place = Place(arm_set.baseline, None, "soak", self.start, len(costs))
            requests = self.load.run(place, Amount(fitted.requests, fitted.burnin), [point])
            values = scenario.costs([sample for _, sample in requests], scenario.slos)
            if word not in values:
                return None
            costs.append(values[word])
            if conditions.steady(costs, margin):
                return True
        return False

    # -- measuring -----------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """The whole run. Ctrl-C keeps what was paid for: the record is marked incomplete and no word is given."""
        from pocketllm.evidence.store import RecordWriter

        settings = self.settings
        if self.rig.last_start:
            self.rig.renew(settings.arm_set, 0)  # an earlier run has used this rig
        scenario = self.fitting_scenario()
        self.check_golden()
        begun = time.perf_counter()
        fitted = self.calibrate(scenario, begun)
        slots = order(settings.arm_set.names, fitted.blocks, settings.seed, fitted.starts)
        question = Question(scenario, settings.arm_set, slots, settings.margins)
        self.progress.say(f"{plan_words(fitted, len(settings.arm_set.arms))}, about {minutes(fitted.seconds)}")
        document = start_document(question, self.rig, fitted, settings.seed, settings.arguments)
        meters = self.load.meters
        document |= {"meter": {name: meter.facts for name, meter in meters.items()}} if meters else {}
        self.fingerprints = self.rig.fingerprints()
        writer = RecordWriter("bench", document, settings.directory)
        interrupted = False
        try:
            question = replace(
                question,
                null_history=past_nulls(settings.directory, writer.document),
                steady_start=self.soak(fitted, time.perf_counter() - begun) if settings.soak_s > 0 else None,
            )
            writer.append(self.load.taken_rows())
            self.measure(question, fitted, writer.append, Pace(settings.wish, begun, self.tell))
            self.note_changes()
        except KeyboardInterrupt:
            interrupted = True
        except BaseException as error:
            writer.finish({"ended_by": type(error).__name__}, complete=False)
            raise
        worded = without_words if interrupted else dict[str, Any]
        path, late = writer.finish_with(
            lambda: worded(self.ending(question, time.perf_counter() - begun)), complete=not interrupted
        )
        return Outcome(writer.document, path, interrupted or late)

    def calibrate(self, scenario: Scenario, begun: float) -> Fitted:
        """Every arm once, with what the scenario reads it by; how much of it fits into what was asked for."""
        self.progress.say("warming up and calibrating every arm")
        meters = scenario.meters(self.rig.targets) if scenario.meters else {}
        self.load = SlotLoad(scenario, self.rig, self.settings.seed, meters)
        costs = self.warm_up()
        return self.settings.wish.fit(costs, scenario.burnin, time.perf_counter() - begun)

    def ending(self, question: Question, wall_s: float) -> dict[str, Any]:
        """What a record ends with: what the blocks that ran come to, and what can be claimed of them."""
        analysis = analyze(self.so_far(question), self.whole_blocks_only(), self.checks)
        ending = end_document(question, analysis, wall_s, self.notes(question.slots))
        return ending | {"starts": self.start + 1, "claim": claim(self.settings.arm_set.isolation, self.start + 1)}

    def measure(
        self, question: Question, fitted: Fitted, append: Callable[[list[dict[str, Any]]], None], pace: Pace
    ) -> None:
        """All slots in order; rows are durable before the next slot begins."""
        slots, arms = question.slots, {arm.name: arm for arm in self.settings.arm_set.arms}
        interval = ""
        for slot in slots:
            if slot.index and slot.position == 0 and slot.block % row_set_size(len(arms)) == 0:
                interval = interval_words(self.so_far(question), self.whole_blocks_only())
                paced = None if self.is_resolved(question, slot) else pace.at_row_set(fitted, slot, len(slots))
                if paced is None:
                    break
                fitted = paced
            if slot.index and slot.position == 0 and self.is_hopeless(question, slot):
                break
            if slot.start != self.start:
                self.start_afresh(slot.start)
            if slot.index and slot.position == 0 and not self.load.meters:
                block = [arms[one.arm] for one in slots[slot.index : slot.index + len(arms)]]
                self.rig.reseat(block, fitted.seconds / fitted.blocks, self.tell)
            self.run_slot(arms[slot.arm], slot, fitted)
            append(self.load.taken_rows())
            done = slot.index + 1
            left_s = pace.left_s(done, len(slots))
            self.progress.slot_done(Done(done, len(slots), slot.arm, slot.block, left_s, interval))

    def is_hopeless(self, question: Question, slot: Slot) -> bool:
        """Whether the run, before this slot, can only be INVALID: then it is said why, and what to change.

        Every request so far is read, so it is asked where the answer can be new: in the first blocks, between row sets,
        among the last blocks, and once a target has changed.
        """
        near_an_end = slot.block <= FIRST_BLOCKS or question.blocks - slot.block < MIN_BLOCKS
        at_row_set = slot.block % row_set_size(len(self.settings.arm_set.arms)) == 0
        if not (near_an_end or at_row_set or any(check.code == "V12" for check in self.checks)):
            return False
        why = hopeless(question, self.whole_blocks_only(), self.checks)
        if why is not None:
            self.tell(f"stopped after {slot.block} blocks, INVALID: {why}")
        return why is not None

    def is_resolved(self, question: Question, slot: Slot) -> bool:
        """Whether `until` is reached before this slot, the first of a row set (of a start, where starts differ)."""
        settings = self.settings
        # where the start is the sample, one start resolves nothing
        at_end = settings.starts == 1 or (slot.start != self.start and slot.start >= 2)
        if settings.until is None or not at_end or slot.block < max(MIN_BLOCKS, settings.min_n):
            return False
        width = half_width(self.so_far(question), self.whole_blocks_only())
        if width is None or width > settings.until:
            return False
        self.tell(f"stopped after {slot.block} blocks: every judged interval is ± {width:.2%} or less (--until)")
        return True

    def start_afresh(self, start: int) -> None:
        """The next start: every arm's process anew, warmed up like the first ones."""
        self.note_changes()
        self.rig.renew(self.settings.arm_set, start)
        self.start = start
        for arm in self.settings.arm_set.arms:
            place = Place(arm, None, "warmup", start)
            answered(arm, self.load.probe(place))
            self.load.run(place, Amount(1, self.load.scenario.burnin))
        self.note_changes()

    def note_changes(self) -> None:
        """V12, once: a target that is not what it was when the run began, or gone."""
        if not any(check.code == "V12" for check in self.checks):
            self.checks += validity.changed(self.fingerprints, self.rig.last_fingerprints())

    def tell(self, text: str) -> None:
        """Say it now and in the record."""
        self.progress.say(text)
        if text not in self.remarks:
            self.remarks.append(text)

    def run_slot(self, arm: Arm, slot: Slot, fitted: Fitted) -> None:
        """Seam, burn-in, measured requests."""
        self.seam(arm)
        self.load.run(Place(arm, slot, "measure", slot.start), Amount(fitted.requests, fitted.burnin))

    def seam(self, arm: Arm) -> None:
        """Between slots nothing is in flight, at client or server, in any arm; the next arm forgets past prompts.

        Prompts are salted and new, so a cache that cannot be reset finds nothing either. A request ends only once its
        last token's id, or its last byte, is read: the device has synchronized.
        """
        deadline = time.monotonic() + DRAIN_S
        while busy := {name: count for name, target in self.rig.targets.items() if (count := target.in_flight())}:
            if time.monotonic() > deadline:
                raise MachineError(f"the seam between two slots is not clean: in flight {busy}")
            time.sleep(0.01)
        if self.rig.targets[arm.name].reset_cache() is False:
            self.tell(f"{arm.name} did not reset its prefix cache; prompts are salted and new all the same")

    # -- after the last slot -------------------------------------------------------------------------------------------
    def whole_blocks_only(self) -> list[Measured]:
        """Samples of blocks that every arm has."""
        by_block: dict[int, set[str]] = {}
        for item in self.load.measured:
            by_block.setdefault(item.block, set()).add(item.arm)
        whole = {block for block, arms in by_block.items() if len(arms) == len(self.settings.arm_set.arms)}
        return [item for item in self.load.measured if item.block in whole]

    def so_far(self, question: Question) -> Question:
        """The question over the blocks that ran (all of them, unless the run was cut short)."""
        ran = {item.block for item in self.whole_blocks_only()}
        slots = [slot for slot in question.slots if slot.block in ran]
        return replace(question, slots=slots or question.slots)

    def notes(self, slots: Sequence[Slot]) -> list[str]:
        """What a reader should know of how the run went."""
        planned = max(slot.block for slot in slots) + 1
        ran = len({item.block for item in self.whole_blocks_only()})
        notes = [*self.remarks, *([f"{ran} of {planned} planned blocks ran"] if ran < planned else [])]
        asked, until = self.settings.blocks, self.settings.until
        if asked is not None and asked != planned:
            notes.append(f"{asked} blocks rounded up to {planned}: whole row sets keep the arms balanced")
        if until is not None and ran == planned:
            notes.append(f"all {planned} blocks ran before every judged interval was ± {until:.2%} or less (--until)")
        return notes


def interval_words(question: Question, measured: Sequence[Measured]) -> str:
    """The running intervals of the first judged metric: `b 0.98 to 1.02`."""
    metric = question.scenario.primary[0]
    fits = {arm: fit for (name, arm), fit in interim(question, measured).items() if name == metric}
    ends = {arm: [math.exp(float(end)) for end in fit.interval()] for arm, fit in fits.items()}
    return ", ".join(f"{arm} {low:.3f} to {high:.3f}" for arm, (low, high) in ends.items())


def past_nulls(directory: Path, document: Mapping[str, Any]) -> dict[str, list[float]]:
    """Past null arms that are comparable with a run that has just begun."""
    from pocketllm.evidence.store import search_dirs

    return null_history([directory, *search_dirs()], history_key(document), document["machine"]["hard"])
