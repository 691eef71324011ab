"""Between a run and its record: rows of samples, the run document, and what past null arms say."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.contrasts import Analysis, Question
from pocketllm.bench.analysis.entry import result_entry
from pocketllm.bench.analysis.rules import RULES_VERSION, rules_sha256
from pocketllm.bench.analysis.verdict import Word, slowest
from pocketllm.bench.arm import Arm, claim
from pocketllm.bench.scenarios.contract import Point, Scenario
from pocketllm.bench.scenarios.prompts import GENERATOR_VERSION, PROMPTS, ids_sha256
from pocketllm.bench.schedule import Fitted, Slot
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.rig import Rig


def row_of(arm: Arm, slot: Slot | None, phase: str, number: int, ask: Ask, sample: Sample) -> dict[str, Any]:
    """One request as a row of the record."""
    place: dict[str, Any] = {}
    if slot is not None:
        place = {
            "superblock": slot.superblock,
            "block": slot.block,
            "slot": slot.index,
            "position": slot.position,
            "prev_arm": slot.prev_arm,
        }
    return {
        "arm": arm.name,
        "arm_role": arm.role.value,
        "arm_sha256": config_sha256(arm),
        **place,
        "phase": phase,
        "request": number,
        "prompt_id": ask.prompt_id,
        "prompt_sha256": ids_sha256(ask.prompt_token_ids),
        "n_prompt": sample.n_prompt,
        "n_cached": sample.n_cached,
        "n_out": sample.n_out,
        "t_sched_ns": sample.t_sched_ns,
        "t_send_ns": sample.t_send_ns,
        "t_first_ns": sample.t_first_ns,
        "t_first_content_ns": sample.t_first_content_ns,
        "t_last_ns": sample.t_last_ns,
        "chunk_t_ns": sample.chunk_t_ns,
        "chunk_ntok": sample.chunk_ntok,
        "srv_prefill_s": sample.srv_prefill_s,
        "srv_decode_s": sample.srv_decode_s,
        "srv_queue_s": sample.srv_queue_s,
        "finish": sample.finish,
        "http_status": sample.http_status,
        "error": sample.error,
        "out_ids_sha256": ids_sha256(sample.out_ids) if sample.out_ids else None,
        "loop_lag_ms": sample.loop_lag_ms,
        "compiles": sample.compiles,
        "srv_running": sample.srv_running,
    }


def config_sha256(arm: Arm) -> str:
    """Digest of what makes an arm differ, whatever it is called."""
    return hashlib.sha256(json.dumps(arm.difference(), sort_keys=True).encode()).hexdigest()


def start_document(
    question: Question, rig: Rig, fitted: Fitted, seed: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The run document as far as it is known before the first slot."""
    scenario, arm_set = question.scenario, question.arm_set
    return {
        "device_class": rig.device_class,
        "model": dict(rig.model),
        "scenario": scenario.name,
        "isolation": arm_set.isolation.value,
        "claim": claim(arm_set.isolation, fitted.starts),
        "starts": fitted.starts,
        "arms": [arm_entry(arm, rig) | {"isolation": arm_set.isolation.value} for arm in arm_set.arms],
        "plan": dict(rig.targets[arm_set.baseline.name].describe().get("plan") or {}),
        "schedule": [[slot.arm for slot in question.slots if slot.block == block] for block in range(question.blocks)],
        "seed": seed,
        "margin": dict(question.margins),
        "rules_version": RULES_VERSION,
        "rules_sha256": rules_sha256(),
        "workload": {
            "n_prompt": scenario.n_prompt,
            "n_out": scenario.n_out,
            "concurrency": max(point.concurrency for point in scenario.points),
            "points": [point_entry(point) for point in scenario.shapes],
            "requests_per_slot": fitted.requests,
            "burnin": fitted.burnin,
            "about": scenario.about,
            "prompts": PROMPTS,
            "generator_version": GENERATOR_VERSION,
            "sampling": "greedy, past any end token",
        },
        "options": dict(arguments),
        "served": rig.served,
    }


def point_entry(point: Point) -> dict[str, Any]:
    """One load of the scenario as the run document tells it."""
    told = {
        "label": point.label or None,
        "n_prompt": point.n_prompt,
        "n_out": point.n_out,
        "arrivals": point.arrivals.value,
        "concurrency": point.concurrency,
        "rate_per_s": point.rate_per_s,
        "num_requests": point.num_requests,
        "spread": point.spread or None,
        "n_prefix": point.n_prefix or None,
        "warm_prefix": point.warm_prefix or None,
    }
    return {name: value for name, value in told.items() if value is not None}


def arm_entry(arm: Arm, rig: Rig) -> dict[str, Any]:
    """One arm as the run document tells it."""
    facts = dict(rig.targets[arm.name].describe())
    return {
        "name": arm.name,
        "role": arm.role.value,
        "target": rig.targets[arm.name].kind,
        "options": dict(arm.options),
        "config_sha256": config_sha256(arm),
        "plan": facts.pop("plan", None),
        **facts,
    }


def end_document(question: Question, analysis: Analysis, wall_s: float, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What is known once the last slot has ended."""
    return {
        "checks": [
            {
                "code": check.code,
                "severity": check.severity.value,
                "value": check.value,
                "detail": check.detail,
                "blocks": list(check.blocks),
            }
            for check in analysis.checks
        ],
        "results": [result_entry(question, result) for result in analysis.results],
        "medians": {metric: dict(values) for metric, values in analysis.medians.items()},
        "valid": analysis.valid,
        "null_valid": analysis.null_valid,
        "valid_blocks": len(analysis.valid_blocks),
        "blocks": question.blocks,
        "wall_s": wall_s,
        "notes": [*notes, *analysis.notes],
    }


def without_words(ending: Mapping[str, Any]) -> dict[str, Any]:
    """An ending without verdicts, for a run that was interrupted."""
    results = [{**result, "verdict": None, "reason": None} for result in ending["results"]]
    return {**ending, "results": results, "ended_by": "KeyboardInterrupt"}


def same_work(document: Mapping[str, Any], scenario: Scenario) -> bool:
    """Whether a recorded run asked for the same lengths at the same points."""
    workload = document.get("workload") or {}
    labels = [point.get("label", "") for point in workload.get("points") or [{}]]
    return (document.get("scenario"), workload.get("n_prompt"), workload.get("n_out"), labels) == (
        *(scenario.name, scenario.n_prompt, scenario.n_out),
        [point.label for point in scenario.points],
    )


def seconds_per_slot(document: Mapping[str, Any], scenario: Scenario) -> float | None:
    """What a slot took in a recorded run of this scenario and these lengths; None when it is another."""
    # as many as ran: a run may have stopped early
    num_slots = document.get("blocks", 0) * len(document.get("arms") or ())
    wall_s = document.get("wall_s")
    known = same_work(document, scenario) and num_slots and isinstance(wall_s, int | float)
    return wall_s / num_slots if known else None


def judged_words(document: Mapping[str, Any]) -> list[tuple[Word, float, float]]:
    """(word, `slowest` time ratio − 1, margin) of every judged contrast, as `verdict.exit_code` reads them."""
    words = [
        (Word(result["verdict"]), slowest(result), result["margin"])
        for result in document.get("results") or ()
        if result.get("verdict") is not None
    ]
    return words if document.get("valid") else [(Word.INVALID, math.inf, 0.0)]
