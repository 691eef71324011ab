"""The targets of one run, opened: a sibling loop an arm over one engine, a client an endpoint, or a process an arm."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.bench.arm import Arm, ArmSet, Isolation, effective_options
from pocketllm.bench.targets.contract import Target
from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.evidence.device_class import device_class

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine
    from pocketllm.engine.options import EngineOptions
    from pocketllm.engine.weights.checkpoint import Checkpoint

Say = Callable[[str], None]
RESEAT_SHARE = 0.1
"""Arms that share weights get new memory before every block where that takes at most this share of it."""


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
    """Whether the baseline is our own server, of this code, with the checkpoint that `model` names."""
    last_start: int = 0
    """Number of the start that the processes are of."""
    renew_s: float = 0.0
    """What starting every arm's process took, the last time."""
    start_arm: "Callable[[Arm, int], Target] | None" = None
    """Starts an arm afresh, where each is a process: (arm, number of the start) → its target."""
    seat_arm: "Callable[[Arm], Target] | None" = None
    """Gives an arm a loop and memory of its own, where all share loaded weights; None: they keep what they have."""
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

    def renew(self, arm_set: ArmSet, start: int) -> None:
        """End every arm's process and start all of them afresh: those of one start live together, and no others."""
        assert self.start_arm is not None, "these arms are not processes"
        begun = time.perf_counter()
        self.close_targets()
        for arm in arm_set.arms:
            self.targets = {**self.targets, arm.name: self.start_arm(arm, start)}
        self.last_start, self.renew_s = start, time.perf_counter() - begun

    def reseat(self, arms: Sequence[Arm], block_s: float, say: Say) -> None:
        """New loops in new memory for arms that share weights, in this order, as long as it is cheap beside a block.

        Where a loop's memory lies in the caches makes it up to 2 % faster or slower for as long as it lives. An arm
        that kept its memory would carry that into its ratio, and no number of blocks would make it smaller.
        """
        if self.seat_arm is None:
            return
        begun = time.perf_counter()
        self.close_targets()  # all of them first: else each would be given back what it had
        for arm in arms:
            self.targets = {**self.targets, arm.name: self.seat_arm(arm)}
        took_s = time.perf_counter() - begun
        if took_s > RESEAT_SHARE * block_s:
            self.seat_arm = None
            say(
                f"arms keep their memory from here on: new memory takes {took_s:.2g} s, a block {block_s:.2g} s; "
                "where an arm's memory lies may count for 1 or 2 %"
            )

    def close_targets(self) -> None:
        """Let go of all targets, the last one opened first."""
        targets, self.targets = self.targets, {}
        for target in reversed(list(targets.values())):
            target.close()

    def close(self) -> None:
        self.close_targets()
        self.on_close()


def open_rig(arm_set: ArmSet, options: "EngineOptions", say: Say, logs: Path | None = None) -> Rig:
    """Load the engine, reach the servers, or start a process an arm. Raises PocketLLMError of some kind.

    logs: where what the processes print is kept; None: `logs/` in the default folder of records.
    """
    match arm_set.isolation:
        case Isolation.TOGGLE:
            return open_engine(arm_set, options, say)
        case Isolation.ATTACH:
            return open_servers(arm_set, options, say)
        case Isolation.PROCESS:
            return open_processes(arm_set, options, say, logs)


def open_engine(arm_set: ArmSet, options: "EngineOptions", say: Say) -> Rig:
    """One set of weights; every arm, the baseline too, gets a loop made the same way."""
    from pocketllm.bench.targets.engine import EngineTarget
    from pocketllm.engine.load import load_engine
    from pocketllm.golden.subject import model_document

    engine = load_engine(beside_others(options, len(arm_set.arms) + 2, say), say)

    def seat(arm: Arm) -> Target:
        return EngineTarget(engine.sibling(**arm.options))

    tokenizer = engine.tokenizer
    return Rig(
        targets={arm.name: seat(arm) for arm in arm_set.arms},
        # on a CPU alone: it is its caches that memory lies well or badly in, and graphs captured anew take seconds
        seat_arm=seat if engine.backend.capability.device == "cpu" else None,
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special=False),
        model=model_document(engine.checkpoint),
        device_class=device_class(engine.plan.as_dict()),
        engine=engine,
        on_close=engine.close,
    )


def beside_others(options: "EngineOptions", caches: int, say: Say) -> "EngineOptions":
    """Options under which so many engines lie in one GPU's memory at once: all caches together take twice what that of
    an engine by itself does, unless their size was said."""
    from pocketllm.engine.load import plan_and_open
    from pocketllm.engine.weights.catalog import model_name, resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    if options.kv_cache_bytes is not None:
        return options
    path = resolve_model(options.model, say)
    with closing(open_checkpoint(path)) as checkpoint:
        plan, _ = plan_and_open(options, checkpoint, model_name(path))
    if plan.device == "cpu":
        return options
    each = 2 * plan.kv_bytes // caches
    say(f"{caches} caches share the GPU's memory, {each / 2**30:.1f} GiB each; --kv-cache-bytes says otherwise")
    return replace(options, kv_cache_bytes=each, sources={**options.sources, "kv_cache_bytes": "bench"})


def open_servers(arm_set: ArmSet, options: "EngineOptions", say: Say) -> Rig:
    """A client for each arm; prompts are made with the tokenizer of `--model`, read from its header alone."""
    from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(resolve_model(options.model, say))
    rig = headless_rig(checkpoint)
    rig.targets = {
        arm.name: OpenAIHTTPTarget(arm.url, api_key=api_key(arm)) for arm in arm_set.arms if arm.url is not None
    }
    tell_baseline(rig, arm_set.baseline, checkpoint)
    return rig


def open_processes(arm_set: ArmSet, options: "EngineOptions", say: Say, logs: Path | None) -> Rig:
    """A process an arm, all started once; `renew` starts them again."""
    from pocketllm.bench.targets.engine import EngineTarget
    from pocketllm.bench.targets.process import Site, require_program, start_arm
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.weights.catalog import model_name, resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from pocketllm.evidence.store import new_ulid, record_dir

    for arm in arm_set.arms:
        if arm.launch is not None:
            require_program(arm.name, arm.launch.words({})[0])  # before another arm is started for nothing
        elif "model" in arm.options:  # a process would fetch it silently, and be waited for
            resolve_model(str(arm.options["model"]), say)
    path = resolve_model(options.model, say)
    checkpoint = open_checkpoint(path)
    folder = logs or record_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    if any(arm.runs_here for arm in arm_set.arms):  # with a loop more for its golden check
        options = beside_others(options, len(arm_set.arms) + 1, say)
    site = Site(path.resolve(), model_name(path), options, folder, new_ulid())

    def start(arm: Arm, number: int) -> Target:
        say(f"starting {arm.name}" + (f", start {number + 1}" if number else ""))
        if arm.runs_here:
            return EngineTarget(load_engine(effective_options(arm, options)))
        return start_arm(arm, site, number)

    rig = headless_rig(checkpoint)
    rig.start_arm = start
    try:
        rig.renew(arm_set, 0)
        tell_baseline(rig, arm_set.baseline, checkpoint)
    except BaseException:
        rig.close()
        raise
    return rig


def headless_rig(checkpoint: "Checkpoint") -> Rig:
    """A rig that knows the model by its header, and has no targets yet."""
    from pocketllm.engine.text.tokenizer import Tokenizer
    from pocketllm.golden.subject import model_document

    tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    return Rig(
        targets={},
        encode=tokenizer.encode,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special=False),
        model=model_document(checkpoint),
        on_close=checkpoint.close,
    )


def tell_baseline(rig: Rig, baseline: Arm, checkpoint: "Checkpoint") -> None:
    """What ran, and whether it was this engine, by the baseline's own word."""
    facts = rig.targets[baseline.name].describe()
    plan = facts.get("plan") or {}
    rig.device_class = device_class(plan)
    is_this_code = facts.get("served_by") == "pocketllm" and baseline.path is None and baseline.launch is None
    rig.served = is_this_code and has_tensors_of(checkpoint, plan)


def api_key(arm: Arm) -> str | None:
    """The key that an arm's variable holds; OptionError when the variable is not set."""
    if arm.key_env is None:
        return None
    key = os.environ.get(arm.key_env, "").strip()
    if not key:
        raise OptionError(f"--arms {arm.name}: the environment variable {arm.key_env} is empty or not set")
    return key


def has_tensors_of(checkpoint: "Checkpoint", plan: Mapping[str, Any]) -> bool:
    """Whether a served plan counts the tensors and bytes of this file, by quant type: as much as a server tells of it.

    A record names the file of `--model`; what another file did behind an address proves nothing about that one.
    """
    found = {name: {"tensors": count, "bytes": size} for name, (count, size) in checkpoint.quant_histogram().items()}
    return plan.get("quant_types") == found
