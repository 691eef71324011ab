"""No speed on a red gate: an arm's golden check, asked the way the arm runs, before anything is timed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pocketllm.bench.arm import Arm
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
    from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
    from pocketllm.golden.compare import Identical, NotJudged, Regression, Unrecorded
    from pocketllm.golden.verify import gate, gate_url

    target = rig.targets[arm.name]
    if isinstance(target, OpenAIHTTPTarget):
        if not target.is_ours:
            return GateAnswer(GateState.ABSENT, f"tokens not compared: {target.dialect.name} has no fixture here")
        result = gate_url(target.url, target.model, options)
    elif rig.engine is not None:
        # a loop of its own, so that the timed ones have seen nothing yet
        with rig.engine.sibling(**arm.options) as engine:
            result = gate(engine)
    else:
        return GateAnswer(GateState.ABSENT, "tokens not compared: no engine")
    match result.outcome:
        case Identical():
            return GateAnswer(GateState.GREEN, result.detail)
        case Regression():
            return GateAnswer(GateState.RED, result.detail)
        case Unrecorded():
            return GateAnswer(GateState.ABSENT, result.detail)
        case NotJudged():
            return GateAnswer(GateState.NOT_JUDGED, result.detail)
