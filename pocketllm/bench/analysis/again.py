"""A record's results computed again from its own rows: what was concluded must follow from what was measured; pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.contrasts import Analysis, Question, analyze
from pocketllm.bench.analysis.validity import Measured
from pocketllm.bench.arm import Arm, ArmSet, Isolation, Role
from pocketllm.bench.scenarios import find_scenario, known
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import Slot
from pocketllm.bench.targets.contract import Sample

Document = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

TOLERANCE = 1e-6
"""Of a log ratio: stamps are whole nanoseconds, and where prefill began is kept as seconds of queueing."""


def differences(document: Document, rows: Rows) -> list[str]:
    """Results of a complete bench record that its rows do not give, a sentence each; empty when all follow.

    Only for records judged by the rules of this version. A record without chunk lists cannot be computed again.
    """
    measured = [row for row in rows if row["phase"] == "measure" and row["block"] is not None]
    if str(document.get("scenario")) not in known() or any(row["chunk_t_ns"] is None for row in measured):
        return []
    if not document.get("results"):
        return []
    analysis = analyze_again(document, measured)
    found = {(result.metric, result.arm): result for result in analysis.results}
    told = {(result["metric"], result["arm"]): result for result in document.get("results") or ()}
    sentences = [f"{metric}, {arm}: its rows give no such result" for metric, arm in told.keys() - found.keys()]
    for key, result in told.items():
        if key in found and not math.isclose(float(found[key].fit.estimate), result["estimate"], abs_tol=TOLERANCE):
            ratio = math.exp(float(found[key].fit.estimate))
            sentences.append(
                f"{key[0]}, {key[1]}: its rows give a time ratio of {ratio:.4f}, not {result['ratio']:.4f}"
            )
    if document.get("valid_blocks") not in (None, len(analysis.valid_blocks)):
        count = len(analysis.valid_blocks)
        sentences.append(f"its rows have {count} valid blocks, not {document['valid_blocks']}")
    return sentences


def analyze_again(document: Document, measured: Rows) -> Analysis:
    """The analysis of measured rows, as the run made it; noise floors from a history are not known any more."""
    margins = document.get("margin") or {}
    question = Question(
        scenario=scenario_of(document),
        arm_set=ArmSet(tuple(arms_of(document)), Isolation(document["isolation"])),
        slots=sorted(slots_of(measured), key=lambda slot: slot.index),
        margins=margins,
    )
    return analyze(question, [measured_of(row) for row in measured])


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


def measured_of(row: Mapping[str, Any]) -> Measured:
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
        **{name: row[name] for name in ("throttle_mask", "loop_lag_ms", "compiles")},
    )
