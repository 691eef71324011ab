"""What `--plan` shows: schedule, time and power of a run that is not made. Needs no weights and no server."""

from typing import Any

from pocketllm.bench.analysis import stats
from pocketllm.bench.arm import ArmSet
from pocketllm.bench.run import minutes, whole_blocks
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import MIN_BLOCKS, order, whole_row_sets

SPREADS = (0.005, 0.01, 0.02)


def preview(
    scenario: Scenario, arm_set: ArmSet, blocks: int | None, budget_s: float | None, seed: int
) -> dict[str, Any]:
    """The plan as a JSON-able document."""
    k = len(arm_set.arms)
    planned = whole_blocks(blocks, k)
    slots = order(arm_set.names, planned, seed)
    return {
        "scenario": scenario.name,
        "n_prompt": scenario.n_prompt,
        "n_out": scenario.n_out,
        "isolation": arm_set.isolation.value,
        "seed": seed,
        "arms": [{"name": arm.name, "role": arm.role.value, "options": dict(arm.options)} for arm in arm_set.arms],
        "schedule": [[slot.arm for slot in slots if slot.block == block] for block in range(planned)],
        "time": time_words(scenario, planned * k, budget_s, whole_row_sets(MIN_BLOCKS, k)),
        "mde": [{"sd": sd, "mde": stats.minimum_detectable_effect(sd, planned, planned - 3)} for sd in SPREADS],
    }


def time_words(scenario: Scenario, num_slots: int, budget_s: float | None, fewest: int) -> str:
    """Minutes from the last record of this scenario and these lengths, or why they are not known."""
    recorded = recorded_slot_s(scenario)
    known = (
        f"about {minutes(recorded * num_slots)}, as slots took {recorded:.1f} s in the last record of this scenario"
        if recorded is not None
        else "not known: no record of this scenario and these lengths is here; calibration will tell"
    )
    if budget_s is None:
        return known
    return (
        f"at most about {minutes(budget_s)} (--budget): calibration decides the number of blocks, at least {fewest}; "
        f"for the schedule above: {known}"
    )


def recorded_slot_s(scenario: Scenario) -> float | None:
    """Seconds a slot took in the newest complete record of this scenario and these lengths."""
    from pocketllm.bench.record import seconds_per_slot
    from pocketllm.evidence.store import list_records, search_dirs

    lengths = {"n_prompt": scenario.n_prompt, "n_out": scenario.n_out}
    for record in reversed(list_records(search_dirs(), kind="bench", on_problem=lambda problem: None)):
        found = seconds_per_slot(record.document, scenario.name, lengths)
        if record.complete and found is not None:
            return found
    return None
