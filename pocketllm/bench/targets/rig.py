"""The targets of one run, opened: an engine loaded once with a sibling loop an arm, or a client an endpoint."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pocketllm.bench.arm import ArmSet, Isolation
from pocketllm.bench.targets.contract import Target
from pocketllm.errors import NotJudgedError
from pocketllm.evidence.device_class import device_class

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine
    from pocketllm.engine.options import EngineOptions
    from pocketllm.engine.weights.checkpoint import Checkpoint

Say = Callable[[str], None]


@dataclass
class Rig:
    """Targets by arm name, and what makes prompts for them. `engine` is set where it runs in this process."""

    targets: Mapping[str, Target]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    model: Mapping[str, Any] = field(default_factory=dict)
    device_class: str = "cpu"
    engine: "Engine | None" = None
    served: bool = False
    """Whether the baseline is our own server, with the checkpoint that `model` names."""
    on_close: Callable[[], None] = lambda: None

    def fingerprints(self) -> dict[str, str]:
        return {name: target.fingerprint() for name, target in self.targets.items()}

    def last_fingerprints(self) -> dict[str, str]:
        """Fingerprints after the last slot; a target that no longer answers has none."""
        found = {}
        for name, target in self.targets.items():
            with suppress(NotJudgedError):
                found[name] = target.fingerprint()
        return found

    def close(self) -> None:
        for target in self.targets.values():
            target.close()
        self.on_close()


def open_rig(arm_set: ArmSet, options: "EngineOptions", say: Say) -> Rig:
    """Load the engine, or reach the servers. Raises what they raise: PocketLLMError of some kind."""
    match arm_set.isolation:
        case Isolation.TOGGLE:
            return open_engine(arm_set, options, say)
        case Isolation.ATTACH:
            return open_servers(arm_set, options, say)


def open_engine(arm_set: ArmSet, options: "EngineOptions", say: Say) -> Rig:
    """One set of weights; every arm, the baseline too, gets a loop made the same way."""
    from pocketllm.bench.targets.engine import EngineTarget
    from pocketllm.engine.load import load_engine
    from pocketllm.golden.subject import model_document

    engine = load_engine(options, say)
    targets = {arm.name: EngineTarget(engine.sibling(**arm.options)) for arm in arm_set.arms}
    tokenizer = engine.tokenizer
    return Rig(
        targets=targets,
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special=False),
        model=model_document(engine.checkpoint),
        device_class=device_class(engine.plan.as_dict()),
        engine=engine,
        on_close=engine.close,
    )


def open_servers(arm_set: ArmSet, options: "EngineOptions", say: Say) -> Rig:
    """A client for each arm; prompts are made with the tokenizer of `--model`, read from its header alone."""
    from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
    from pocketllm.engine.text.tokenizer import Tokenizer
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from pocketllm.golden.subject import model_document

    checkpoint = open_checkpoint(resolve_model(options.model, say))
    tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    targets = {arm.name: OpenAIHTTPTarget(arm.url) for arm in arm_set.arms if arm.url is not None}
    baseline = targets[arm_set.baseline.name]
    return Rig(
        targets=targets,
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special=False),
        model=model_document(checkpoint),
        device_class=device_class(baseline.describe().get("plan") or {}),
        served=baseline.is_ours and has_tensors_of(checkpoint, baseline.describe().get("plan") or {}),
        on_close=checkpoint.close,
    )


def has_tensors_of(checkpoint: "Checkpoint", plan: Mapping[str, Any]) -> bool:
    """Whether a served plan counts the tensors and bytes of this file, by quant type: as much as a server tells of it.

    A record names the file of `--model`; what another file did behind an address proves nothing about that one.
    """
    found = {name: {"tensors": count, "bytes": size} for name, (count, size) in checkpoint.quant_histogram().items()}
    return plan.get("quant_types") == found
