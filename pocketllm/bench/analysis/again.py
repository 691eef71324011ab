"""A record's results computed again from its own rows: what was concluded must follow from what was measured; pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pocketllm.bench.analysis.contrasts import Analysis, Question, analyze
from pocketllm.bench.analysis.entry import result_entry
from pocketllm.bench.analysis.validity import Check, Measured, Severity
from pocketllm.bench.analysis.verdict import MIN_HISTORY, OWN_FLOOR
from pocketllm.bench.arm import Arm, ArmSet, Isolation, Role
from pocketllm.bench.scenarios import find_scenario, known
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import Slot
from pocketllm.bench.targets.contract import Sample

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

TOLERANCE = 1e-6
"""Of a log ratio: stamps are whole nanoseconds, and where prefill began is kept as seconds of queueing."""
RELATIVE = {"ratio": 1e-5, "low": 1e-5, "high": 1e-5}
"""Of a figure, as far as such a difference may move it; 1e-3 where nothing is said."""
COMPARED = (
    *("role", "primary", "n", "n_unit", "df", "ratio", "low", "high", "se", "sd", "p_holm", "mde", "margin"),
    *("floor", "verdict"),
)
BELIEVED = ("V02", "V11", "V12")
"""Rules about what no row keeps: what was asked for, golden checks, what the arms were."""


def differences(document: Document, rows: Rows) -> list[str]:
    """Results of a complete bench record that its rows do not give, a sentence each; empty when all follow.

    Only for records judged by the rules of this version. A record without chunk lists cannot be computed again.
    """
    measured = [row for row in rows if row["phase"] == "measure" and row["block"] is not None]
    if str(document.get("scenario")) not in known() or any(row["chunk_t_ns"] is None for row in measured):
        return []
    if not document.get("results"):
        return []
    if missing := [key for key in ("isolation", "margin", "workload") if not document.get(key)]:
        return [f"its document lacks {', '.join(missing)}, which its results need"]
    question = question_of(document, measured)
    analysis = analyze_again(document, question, measured)
    found = {(result.metric, result.arm): result_entry(question, result) for result in analysis.results}
    told = {(result["metric"], result["arm"]): result for result in document["results"]}
    sentences = [f"{metric}, {arm}: its rows give no such result" for metric, arm in told.keys() - found.keys()]
    sentences += [f"{metric}, {arm}: its rows give a result that is left out" for metric, arm in found.keys() - told]
    for key in told.keys() & found.keys():
        sentences += unlike(", ".join(key), told[key], found[key])
    if document.get("valid_blocks") not in (None, len(analysis.valid_blocks)):
        count = len(analysis.valid_blocks)
        sentences.append(f"its rows have {count} valid blocks, not {document['valid_blocks']}")
    if document.get("valid") is not analysis.valid:
        sentences.append(
            f"by its rows and checks it is {'valid' if analysis.valid else 'INVALID'}, and it says otherwise"
        )
    return sorted(sentences)


def unlike(name: str, told: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Figures and the word of one result that are not what its rows give."""
    if not math.isclose(found["estimate"], told["estimate"], abs_tol=TOLERANCE):
        yield f"{name}: its rows give a time ratio of {found['ratio']:.4f}, not {told['ratio']:.4f}"
        return
    for field in COMPARED:
        here, there = found[field], told.get(field)
        same = here == there
        if isinstance(here, float) and isinstance(there, int | float):
            same = math.isclose(here, there, rel_tol=RELATIVE.get(field, 1e-3), abs_tol=TOLERANCE)
        if not same:
            yield f"{name}: its rows give {field} {shown(here)}, not {shown(there)}"


def shown(value: object) -> str:
    """A figure in four digits, a word as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def analyze_again(document: Document, question: Question, measured: Rows) -> Analysis:
    """The analysis of measured rows, as the run made it; what no row shows (V02, V11, V12) is believed."""
    names = [field.name for field in fields(Check) if field.name not in ("severity", "blocks")]
    extra = [
        Check(**{name: check.get(name) for name in names}, severity=Severity(check["severity"]))
        for check in document.get("checks") or ()
        if check["code"] in BELIEVED
    ]
    points = (document.get("workload") or {}).get("points") or ()
    warm = {point.get("label") or "" for point in points if point.get("warm_prefix")}
    return analyze(question, [measured_of(row, (row["point"] or "") in warm) for row in measured], extra)


def question_of(document: Document, measured: Rows) -> Question:
    """What the run asked. Past null arms are not known any more: a floor that came from them is believed."""
    floors = {
        str(result["metric"]): [math.log1p(result["floor"])] * MIN_HISTORY
        for result in document["results"]
        if result.get("floor") is not None and result.get("floor_source") != OWN_FLOOR
    }
    return Question(
        scenario=scenario_of(document),
        arm_set=ArmSet(tuple(arms_of(document)), Isolation(document["isolation"])),
        slots=sorted(slots_of(measured), key=lambda slot: slot.index),
        margins=document.get("margin") or {},
        null_history=floors,
    )


def scenario_of(document: Document) -> Scenario:
    """What the run measured: its judged metrics, and those that it only showed, by their full names.

    They are told by the results, because a run may leave points out that its margins name.
    """
    made = find_scenario(str(document["scenario"]))
    work = document.get("workload") or {}
    results = document.get("results") or ()
    names = dict.fromkeys(str(result["metric"]) for result in results)
    judged = dict.fromkeys(str(result["metric"]) for result in results if result["primary"])
    return Scenario(
        name=made.name,
        about=made.about,
        n_prompt=int(work["n_prompt"]),
        n_out=int(work["n_out"]),
        judged=tuple(judged),
        shown=tuple(name for name in names if name not in judged),
        slos=made.slos,
        costs=made.costs,
    )


def arms_of(document: Document) -> Iterator[Arm]:
    """Names and roles, in the order of the run."""
    for entry in document["arms"]:
        yield Arm(str(entry["name"]), role=Role(entry["role"]))


def slots_of(measured: Rows) -> set[Slot]:
    """The slots that the rows stand in."""
    names = ("slot", "superblock", "block", "position", "arm", "prev_arm", "start")
    return {Slot(*(row[name] for name in names)) for row in measured}


def measured_of(row: Mapping[str, Any], warm: bool) -> Measured:
    """A measured request as the analysis wants it, from its row; what was asked for is not kept, so it is what came."""
    sample = Sample(
        t_sched_ns=row["t_sched_ns"],
        t_send_ns=row["t_send_ns"],
        t_start_ns=row["t_send_ns"] + round((row["srv_queue_s"] or 0.0) * 1e9),
        t_first_ns=row["t_first_ns"],
        chunk_t_ns=row["chunk_t_ns"],
        chunk_ntok=row["chunk_ntok"] or [],
        **{name: row[name] for name in ("n_prompt", "n_cached", "finish", "http_status", "error")},
        **{name: row[name] for name in ("srv_prefill_s", "srv_decode_s", "srv_queue_s", "loop_lag_ms")},
        srv_running=row.get("srv_running"),
        n_out=row["n_out"] or 0,
    )
    return Measured(
        block=row["block"],
        arm=row["arm"],
        sample=sample,
        start=row["start"],
        point=row["point"] or "",
        asked=(row["n_prompt"] or 0, row["n_out"] or 0),
        offered=row["offered"] or 1,
        warm=warm,
        **{name: row[name] for name in ("throttle_mask", "loop_lag_ms", "compiles")},
    )
