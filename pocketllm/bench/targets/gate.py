"""No speed on a red gate: an arm's golden check, asked the way the arm runs, before anything is timed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pocketllm.bench.arm import Arm, effective_options
from pocketllm.bench.targets.contract import Target
from pocketllm.bench.targets.rig import Rig


class GateState(Enum):
    """What a golden check says before anything is timed."""

    GREEN = "green"
    RED = "red"
    ABSENT = "absent"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class GateAnswer:
    """One arm's golden check."""

    state: GateState
    detail: str


Gate = Callable[[Rig, Arm], GateAnswer]


def golden_gate(rig: Rig, arm: Arm, options: Any) -> GateAnswer:
    """The arm's shortest recorded case, asked the way the arm runs. A peer has no fixture of ours to answer to."""
    from pocketllm.bench.targets.engine import EngineTarget
    from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
    from pocketllm.golden.compare import Diverged, Drift, Identical, NotJudged, Regression, Stale, Tie, Unrecorded
    from pocketllm.golden.judging.gate import gate, gate_url

    target = rig.targets[arm.name]
    if isinstance(target, OpenAIHTTPTarget):
        if not target.is_ours:
            return GateAnswer(GateState.ABSENT, f"tokens not compared: {target.dialect.name} has no fixture here")
        if arm.path is not None and other_numerics(target, effective_options(arm, options)):
            return GateAnswer(GateState.ABSENT, "tokens not compared: that checkout computes with other numerics")
        result = gate_url(target.url, target.model, effective_options(arm, options), api_key=target.api_key)
    elif isinstance(target, EngineTarget):
        # a loop of its own, so that the timed ones have seen nothing yet
        with target.engine.sibling() as engine:
            result = gate(engine)
    else:
        return GateAnswer(GateState.ABSENT, "tokens not compared: no engine")
    match result.outcome:
        case Identical() | Tie():
            return GateAnswer(GateState.GREEN, result.detail)
        case Regression() | Drift() | Diverged():
            return GateAnswer(GateState.RED, result.detail)
        case Unrecorded() | Stale():
            return GateAnswer(GateState.ABSENT, result.detail)
        case NotJudged():
            return GateAnswer(GateState.NOT_JUDGED, result.detail)


def other_numerics(target: Target, options: Any) -> bool:
    """Whether a served plan names another backend or numerics version than this code would run: no fixture holds it."""
    from pocketllm.golden.subject import open_subject

    theirs, ours = target.describe().get("plan") or {}, open_subject(options).plan.as_dict()
    return any(theirs.get(name) != ours[name] for name in ("backend", "numerics_version"))
