"""The loop: golden gate, warm-up and calibration, slots with a seam before each, every sample kept as it comes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pocketllm.bench.analysis import validity
from pocketllm.bench.analysis.contrasts import Question, analyze
from pocketllm.bench.analysis.history import history_key, null_history
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.arm import Arm, ArmSet
from pocketllm.bench.record import end_document, row_of, start_document
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.scenarios.prompts import make_ask
from pocketllm.bench.schedule import (
    MIN_BLOCKS,
    SHORT_BURNIN,
    Fitted,
    Slot,
    default_blocks,
    default_requests,
    fit_budget,
    minimum_seconds,
    order,
    row_set_size,
    seconds_needed,
    whole_row_sets,
)
from pocketllm.bench.targets.contract import Sample
from pocketllm.bench.targets.gate import Gate, GateState
from pocketllm.bench.targets.rig import Rig
from pocketllm.errors import MachineError, NotJudgedError, OptionError

OVERRUN = 1.25
"""Share of its budget that a run may come to need before it changes its pace at a row set's end."""


class Progress(Protocol):
    """What a run tells while it lasts."""

    def say(self, text: str) -> None:
        """One line."""

    def slot_done(self, done: int, total: int, left_s: float) -> None:
        """A slot has ended; `left_s` is what the rest will take."""


@dataclass(frozen=True)
class Settings:
    """How one run is to be made. `blocks` None: by the budget, or the default; `requests` None: by calibration."""

    scenario: Scenario
    arm_set: ArmSet
    margins: Mapping[str, float]
    directory: Path
    seed: int = 1
    blocks: int | None = None
    budget_s: float | None = None
    requests: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A finished or interrupted run: the record's document and where it went."""

    document: Mapping[str, Any]
    path: Path
    interrupted: bool


def whole_blocks(asked: int | None, k: int) -> int:
    """Blocks of a run: the default, or those asked for, rounded up to whole row sets; OptionError below the minimum."""
    if asked is None:
        return default_blocks(k)
    if asked < MIN_BLOCKS:
        raise OptionError(f"--blocks {asked} is below {MIN_BLOCKS}, the fewest that can be judged")
    return whole_row_sets(asked, k)


class Run:
    """One run over an opened rig."""

    def __init__(self, settings: Settings, rig: Rig, gate: Gate, progress: Progress) -> None:
        self.settings = settings
        self.rig = rig
        self.gate = gate
        self.progress = progress
        self.checks: list[Check] = []
        self.measured: list[Measured] = []
        self.rows: list[dict[str, Any]] = []
        self.remarks: list[str] = []
        self.requests = 0

    # -- before the first slot -----------------------------------------------------------------------------------------
    def check_lengths(self) -> None:
        """OptionError for lengths that the engine in this process cannot hold; a server is asked and answers."""
        scenario, engine = self.settings.scenario, self.rig.engine
        if engine is not None and scenario.n_prompt + scenario.n_out > engine.plan.limits.max_model_len:
            raise OptionError(
                f"{scenario.n_prompt} tokens in and {scenario.n_out} out are more than "
                f"max_model_len={engine.plan.limits.max_model_len}: lower --input-len or --output-len"
            )

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

    def warm_up(self) -> list[float]:
        """Two requests an arm: one prompt that all share, whose answers are compared, then one that is timed.

        Returns seconds of one request by arm, in order. NotJudgedError when an arm cannot answer.
        """
        answers: dict[str, Sample] = {}
        seconds: list[float] = []
        start = time.perf_counter()
        for arm in self.settings.arm_set.arms:
            first = time.perf_counter()
            answers[arm.name] = self.ask(arm, None, "probe", f"{self.settings.seed}-agreement")
            second = time.perf_counter()
            self.ask(arm, None, "warmup", f"{self.settings.seed}-calibration-{arm.name}")
            # the quicker of the two: a disturbed calibration must not refuse a run that would fit
            seconds.append(min(second - first, time.perf_counter() - second))
            self.refuse_early(seconds, time.perf_counter() - start)
        self.checks += agreement(answers)
        return seconds

    def refuse_early(self, request_s: Sequence[float], spent_s: float) -> None:
        """Do not warm up the other arms for a budget that cannot even hold arms as quick as the quickest so far."""
        k, budget_s = len(self.settings.arm_set.arms), self.settings.budget_s
        least = minimum_seconds([min(request_s)] * k, self.settings.requests)
        if budget_s is not None and spent_s + least > budget_s:
            raise self.budget_refusal(spent_s + least)

    def budget_refusal(self, needed_s: float) -> OptionError:
        """Why a budget cannot hold a run, and what would."""
        k = len(self.settings.arm_set.arms)
        return OptionError(
            f"--budget {self.settings.budget_s:g}s cannot hold {whole_row_sets(MIN_BLOCKS, k)} blocks of {k} arms, the "
            f"fewest that can be judged: they need about {minutes(needed_s)} here; raise --budget or ask for less"
        )

    def fit(self, request_s: Sequence[float], spent_s: float) -> Fitted:
        """Blocks and requests a slot, by `--blocks` or by the budget that is left; OptionError when it cannot hold."""
        settings, k = self.settings, len(request_s)
        burnin = settings.scenario.burnin
        if settings.budget_s is None or settings.blocks is not None:
            blocks = whole_blocks(settings.blocks, k)
            requests = settings.requests or default_requests(request_s)
            needed = seconds_needed(request_s, blocks, requests, burnin)
            if settings.budget_s is not None and needed > settings.budget_s - spent_s:
                raise OptionError(f"{blocks} blocks need about {minutes(needed + spent_s)}: more than --budget allows")
            return Fitted(blocks, requests, burnin, needed)
        fitted = fit_budget(request_s, settings.budget_s - spent_s, burnin, settings.requests)
        if fitted is None:
            raise self.budget_refusal(minimum_seconds(request_s, settings.requests) + spent_s)
        return fitted

    # -- measuring -----------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """The whole run. Ctrl-C keeps what was paid for: the record is marked incomplete and no word is given."""
        from pocketllm.evidence.store import RecordWriter

        settings = self.settings
        self.check_lengths()
        self.check_golden()
        start = time.perf_counter()
        self.progress.say("warming up and calibrating every arm")
        request_s = self.warm_up()
        fitted = self.fit(request_s, time.perf_counter() - start)
        slots = order(settings.arm_set.names, fitted.blocks, settings.seed)
        question = Question(settings.scenario, settings.arm_set, slots, settings.margins)
        self.progress.say(
            f"{fitted.blocks} blocks of {len(settings.arm_set.arms)} slots, about {minutes(fitted.seconds)}; "
            f"measured requests a slot: {fitted.requests}"
        )
        document = start_document(question, self.rig, fitted, settings.seed, settings.arguments)
        writer = RecordWriter("bench", document, settings.directory)
        question = replace(question, null_history=past_nulls(settings.directory, writer.document))
        before = self.rig.fingerprints()
        interrupted = False
        try:
            writer.append(self.rows)
            self.measure(slots, fitted, writer.append, start)
            self.checks += validity.changed(before, self.rig.last_fingerprints())
        except KeyboardInterrupt:
            interrupted = True
        except BaseException as error:
            writer.finish({"ended_by": type(error).__name__}, complete=False)
            raise
        analysis = analyze(self.so_far(question), self.whole_blocks_only(), self.checks)
        ending = end_document(question, analysis, time.perf_counter() - start, self.notes(slots))
        if interrupted:
            ending = without_words(ending)
        path = writer.finish(ending, complete=not interrupted)
        return Outcome(writer.document, path, interrupted)

    def measure(
        self, slots: Sequence[Slot], fitted: Fitted, append: Callable[[list[dict[str, Any]]], None], start: float
    ) -> None:
        """All slots in order; rows are durable before the next slot begins."""
        arms = {arm.name: arm for arm in self.settings.arm_set.arms}
        begun = time.perf_counter()
        for slot in slots:
            if slot.index and slot.position == 0 and slot.block % row_set_size(len(arms)) == 0:
                paced = self.pace(fitted, slot, len(slots), start, begun)
                if paced is None:
                    self.tell("stopped at the end of a row set: the machine became slower than its calibration")
                    break
                fitted = paced
            self.rows = []
            self.run_slot(arms[slot.arm], slot, fitted)
            append(self.rows)
            done = slot.index + 1
            left_s = (time.perf_counter() - begun) / done * (len(slots) - done)
            self.progress.slot_done(done, len(slots), left_s)

    def pace(self, fitted: Fitted, slot: Slot, num_slots: int, start: float, begun: float) -> Fitted | None:
        """How to go on after a row set when the budget would be overrun; None: stop, there are enough blocks.

        Before the minimum is reached the slots of all arms become short instead: fewer requests, never fewer blocks.
        """
        budget_s = self.settings.budget_s
        now = time.perf_counter()
        slot_s = (now - begun) / slot.index
        if budget_s is None or now - start + slot_s * (num_slots - slot.index) <= OVERRUN * budget_s:
            return fitted
        if slot.block >= MIN_BLOCKS:
            row_set_s = slot_s * row_set_size(len(self.settings.arm_set.arms)) * len(self.settings.arm_set.arms)
            return None if now - start + row_set_s > OVERRUN * budget_s else fitted
        short = replace(fitted, requests=self.settings.requests or 1, burnin=min(fitted.burnin, SHORT_BURNIN))
        if short != fitted:
            self.tell(f"the machine became slower than its calibration: short slots from block {slot.block} on")
        return short

    def tell(self, text: str) -> None:
        """Say it now and in the record."""
        self.progress.say(text)
        self.remarks.append(text)

    def run_slot(self, arm: Arm, slot: Slot, fitted: Fitted) -> None:
        """Seam, burn-in, measured requests."""
        self.seam()
        salt = f"{self.settings.seed}-{slot.index}"
        self.ask(arm, slot, "burnin", f"{salt}-burnin", fitted.burnin)
        for number in range(fitted.requests):
            sample = self.ask(arm, slot, "measure", f"{salt}-{number}")
            self.measured.append(Measured(slot.block, arm.name, sample))

    def seam(self) -> None:
        """Between slots nothing is in flight at the client, in any arm; prompts are fresh, so no cache to reset.

        A request ends only once its last token's id, or its last byte, is read: the device has synchronized.
        """
        busy = {name: count for name, target in self.rig.targets.items() if (count := target.in_flight())}
        if busy:
            raise MachineError(f"the seam between two slots is not clean: in flight {busy}")

    def ask(self, arm: Arm, slot: Slot | None, phase: str, salt: str, share: float = 1.0) -> Sample:
        """One request, kept as a row. A warm-up request that fails is a NotJudgedError: nothing can be timed."""
        scenario = self.settings.scenario
        ask = make_ask(
            f"{scenario.name}-{salt}",
            max(1, round(scenario.n_prompt * share)),
            max(1, round(scenario.n_out * share)),
            self.rig.encode,
            self.rig.decode,
        )
        target = self.rig.targets[arm.name]
        sample = target.probe(ask) if phase == "probe" else target.ask(ask)
        self.rows.append(row_of(arm, slot, "warmup" if slot is None else phase, self.requests, ask, sample))
        self.requests += 1
        if slot is None and sample.error is not None:
            raise NotJudgedError(f"arm {arm.name} does not answer: {sample.error}")
        return sample

    # -- after the last slot -------------------------------------------------------------------------------------------
    def whole_blocks_only(self) -> list[Measured]:
        """Samples of blocks that every arm has."""
        by_block: dict[int, set[str]] = {}
        for item in self.measured:
            by_block.setdefault(item.block, set()).add(item.arm)
        whole = {block for block, arms in by_block.items() if len(arms) == len(self.settings.arm_set.arms)}
        return [item for item in self.measured if item.block in whole]

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
        asked = self.settings.blocks
        if asked is not None and asked != planned:
            notes.append(f"{asked} blocks rounded up to {planned}: whole row sets keep the arms balanced")
        return notes


def agreement(answers: Mapping[str, Sample]) -> list[Check]:
    """A V11 note when arms answer one and the same prompt differently; texts are compared where ids are not known."""
    by_ids = all(sample.out_ids is not None for sample in answers.values())
    given = {name: sample.out_ids if by_ids else sample.out_text for name, sample in answers.items()}
    first = next(iter(given))
    differ = [name for name, answer in given.items() if answer != given[first]]
    if not differ:
        return []
    text = f"{', '.join(differ)} gives other {'token ids' if by_ids else 'text'} than {first} (greedy)"
    return [Check("V11", Severity.NOTE, float(len(differ)), text)]


def past_nulls(directory: Path, document: Mapping[str, Any]) -> dict[str, list[float]]:
    """Past null arms that are comparable with a run that has just begun."""
    from pocketllm.evidence.store import search_dirs

    return null_history([directory, *search_dirs()], history_key(document), document["machine"]["hard"])


def without_words(ending: Mapping[str, Any]) -> dict[str, Any]:
    """An ending without verdicts, for a run that was interrupted."""
    results = [{**result, "verdict": None, "reason": None} for result in ending["results"]]
    return {**ending, "results": results, "ended_by": "KeyboardInterrupt"}


def minutes(seconds: float) -> str:
    """A duration for people.

    >>> minutes(42), minutes(150)
    ('42 s', '2.5 min')
    """
    return f"{math.ceil(seconds)} s" if seconds < 100 else f"{seconds / 60:.1f} min"
