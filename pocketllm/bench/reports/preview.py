"""What `--plan` shows: schedule, time and power of a run that is not made; and what that run would refuse."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pocketllm.bench.analysis import stats
from pocketllm.bench.arm import Arm, ArmSet, Isolation, Role, Via, claim, effective_options
from pocketllm.bench.arm.checkout import Checkout
from pocketllm.bench.pace import minutes
from pocketllm.bench.run import Settings
from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.bench.schedule import MIN_BLOCKS, order, whole_row_sets
from pocketllm.bench.targets.engine import EngineTarget
from pocketllm.bench.targets.openai_http import DIALECTS
from pocketllm.bench.targets.process import require_program
from pocketllm.bench.targets.rig import api_key
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import OptionError

SPREADS = (0.005, 0.01, 0.02)
MAX_RUNS = 8
"""Most past runs of this machine that a spread is taken from."""


def preview(settings: Settings, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """The plan as a JSON-able document."""
    scenario, arm_set, wish = settings.scenario, settings.arm_set, settings.wish
    planned = wish.planned_blocks()
    slots = order(arm_set.names, planned, settings.seed, settings.starts)
    return {
        "scenario": scenario.name,
        "n_prompt": scenario.n_prompt,
        "n_out": scenario.n_out,
        "points": [point.label for point in scenario.points if point.label],
        "isolation": arm_set.isolation.value,
        "claim": claim(arm_set.isolation, settings.starts),
        "starts": settings.starts,
        "seed": settings.seed,
        "arms": [{"name": arm.name, "role": arm.role.value, "options": dict(arm.options)} for arm in arm_set.arms],
        "schedule": [[slot.arm for slot in slots if slot.block == block] for block in range(planned)],
        "time": time_words(settings, len(slots)),
        "mde": power(settings, planned),
        "notes": list(remarks),
    }


def power(settings: Settings, blocks: int) -> list[dict[str, Any]]:
    """Smallest change found, for the spread that past null arms of this machine had, and for three others."""
    by_start = settings.arm_set.isolation is Isolation.PROCESS and settings.starts > 1
    n, df = (settings.starts, settings.starts - 1) if by_start else (blocks, blocks - 3)
    past = list(past_spreads(settings, "start" if by_start else "block"))[-MAX_RUNS:]
    rows = [{"sd": sd, "mde": stats.minimum_detectable_effect(sd, n, df)} for sd in SPREADS]
    if past:
        sd = statistics.median(past)
        known = {"sd": sd, "mde": stats.minimum_detectable_effect(sd, n, df), "runs_here": len(past)}
        rows = [known, *rows]
    return rows


def past_spreads(settings: Settings, unit: str) -> Iterator[float]:
    """Spreads of the null arm in past runs of this machine: same scenario, lengths, isolation and kind of sample."""
    from pocketllm.bench.record import same_work
    from pocketllm.evidence.provenance.machine import hard_facts
    from pocketllm.evidence.store import list_records, search_dirs

    hard = hard_facts()
    for record in list_records(search_dirs(), kind="bench", on_problem=lambda problem: None):
        document = record.document
        here = document.get("machine", {}).get("hard", {})
        same = record.complete and {name: here.get(name) for name in hard} == hard
        if same and same_work(document, settings.scenario) and isolated_alike(document, settings):
            for result in document.get("results", []):
                is_null = result.get("role") == Role.NULL.value and result.get("metric") == settings.scenario.primary[0]
                if is_null and result.get("n_unit", "block") == unit and result.get("sd"):
                    yield float(result["sd"])


def isolated_alike(document: dict[str, Any], settings: Settings) -> bool:
    """Whether a recorded run kept its arms apart in the same way."""
    return bool(document.get("isolation") == settings.arm_set.isolation.value)


def time_words(settings: Settings, num_slots: int) -> str:
    """Minutes from the last record of this scenario and these lengths, or why they are not known."""
    recorded, budget_s = recorded_slot_s(settings), settings.budget_s
    fewest = whole_row_sets(MIN_BLOCKS, len(settings.arm_set.arms), settings.starts)
    known = (
        f"about {minutes(recorded * num_slots)}, as slots took {recorded:.1f} s in the last record of this scenario"
        if recorded is not None
        else "not known: no record of this scenario and these lengths is here; calibration will tell"
    )
    if settings.until is not None:
        known = f"at most {known} (--until may stop it after {max(fewest, settings.min_n)} blocks)"
    if budget_s is None:
        return known
    return (
        f"at most about {minutes(budget_s)} (--budget): calibration decides the number of blocks, at least {fewest}; "
        f"for the schedule above: {known}"
    )


def recorded_slot_s(settings: Settings) -> float | None:
    """Seconds a slot took in the newest complete record of this scenario and these lengths."""
    from pocketllm.bench.record import seconds_per_slot
    from pocketllm.evidence.store import list_records, search_dirs

    for record in reversed(list_records(search_dirs(), kind="bench", on_problem=lambda problem: None)):
        found = seconds_per_slot(record.document, settings.scenario)
        if record.complete and found is not None and isolated_alike(record.document, settings):
            return found
    return None


# -- what the run would refuse -----------------------------------------------------------------------------------------
def foresee(scenario: Scenario, arm_set: ArmSet, options: EngineOptions) -> list[str]:
    """Remarks on a run that could be made; PocketLLMError of some kind when it could not.

    Reads headers and looks for programs; loads no weights, fetches no model and asks no server.
    """
    own = []
    for arm in arm_set.arms:
        api_key(arm)
        if arm.launch is not None:
            require_program(arm.name, arm.launch.words({})[0])
        elif arm.path is not None:
            Checkout.at(arm.name, arm.path)
        elif arm.url is None:
            own.append(arm)
            refuse_needs(scenario, arm)
    asked = [effective_options(arm, options) for arm in own]
    paths = {model: local_path(model) for model in (options.model, *(effective.model for effective in asked))}
    remarks = [
        f"{model} is not here yet: the run fetches it, and its limits are not known before"
        for model, path in paths.items()
        if path is None
    ]
    contexts = [context_of(one, path) for one in asked if (path := paths[one.model]) is not None]
    left_out = scenario.within(min(contexts))[1] if contexts and scenario.meters is None else ()
    if left_out:
        remarks.append(f"left out, longer than a context of {min(contexts)}: {', '.join(left_out)}")
    return remarks


def refuse_needs(scenario: Scenario, arm: Arm) -> None:
    """OptionError when this engine, in process or served, lacks what the scenario needs."""
    in_process = arm.is_switchable or arm.via is Via.ENGINE
    refusal = scenario.refusal(arm.name, EngineTarget.has if in_process else DIALECTS["pocketllm"].has)
    if refusal:
        raise OptionError(refusal)


def context_of(options: EngineOptions, path: Path) -> int:
    """Longest prompt plus answer of an engine with these options; raises whatever says that it cannot run."""
    from pocketllm.engine.load import plan_and_open
    from pocketllm.engine.weights.catalog import model_name
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    try:
        plan, _ = plan_and_open(options, checkpoint, model_name(path))
        return plan.limits.max_model_len
    finally:
        checkpoint.close()


def local_path(model: str) -> Path | None:
    """Where a model lies on this machine; None for one that a run would fetch first. Asks no network.

    ModelNotFoundError when nothing answers to the name.
    """
    from pocketllm.engine.weights.catalog import CATALOG, HUB_PREFIX, is_cached, resolve_model

    if model.startswith(HUB_PREFIX):
        return hub_path(model)
    entry = CATALOG.get(model)
    if entry is not None and not is_cached(entry) and not Path(model).is_file():
        return None
    return resolve_model(model)


def hub_path(model: str) -> Path | None:
    """The first file of a hub model where all of them lie in the hub's cache."""
    from pocketllm.engine.weights.checkpoint import shard_paths
    from pocketllm.engine.weights.fetching import hub

    repository, file_name, revision = hub.parse(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return hub.fetch_from_hub(model)  # refuses, and says what to install
    folder = PurePosixPath(file_name).parent
    names = [str(folder / shard.name) for shard in shard_paths(Path(PurePosixPath(file_name).name))]
    try:
        found = [try_to_load_from_cache(repository, name, revision=revision) for name in names]
    except ValueError:  # a name that the hub cannot have
        return hub.fetch_from_hub(model)  # refuses, and says why
    here = [Path(path) for path in found if isinstance(path, str)]
    return here[0] if len(here) == len(names) else None
