"""The composition root: from options to an engine that runs. The only file that names every part."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pocketllm.engine.backends import select
from pocketllm.engine.backends.api.attention import Int32Array
from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.drawing import Drawer, drawer_of
from pocketllm.engine.backends.api.ops import Tensor
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.step_delay import SlowedRunner
from pocketllm.engine.lifecycle.steps.runner import Runner
from pocketllm.engine.models.contract import Model, logit_cap, paged_in, states_in
from pocketllm.engine.models.registry import family_or_reason, find_family
from pocketllm.engine.options import SWITCHABLE, EngineOptions
from pocketllm.engine.plan import EnginePlan, backend_options, make_plan, plan_first
from pocketllm.engine.plan.memory import gib
from pocketllm.engine.structured.compiler import Vocabulary
from pocketllm.engine.text.chat_template import ChatTemplate
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights import catalog
from pocketllm.engine.weights.checkpoint import Checkpoint, open_checkpoint
from pocketllm.engine.weights.reading import Amount, Reading
from pocketllm.errors import OptionError

Progress = Callable[[str], None]


@dataclass
class Engine:
    """A loaded model with its text side and its loop. Close it, or use it as a context manager."""

    options: EngineOptions
    plan: EnginePlan
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    checkpoint: Checkpoint
    model: Model
    model_name: str
    backend: Backend
    load_s: float
    """From the options to a loop that takes requests."""
    vocabulary: Vocabulary
    """The tokenizer's, for grammars; siblings share it."""
    loop: EngineLoop = field(init=False)
    owns_checkpoint: bool = True
    is_closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.loop = self._new_loop()

    def _new_loop(self) -> EngineLoop:
        spec, limits, ops = self.model.kv_spec, self.plan.limits, self.backend.ops
        sizes = limits.num_blocks, limits.block_size, limits.num_state_slots, limits.num_window_blocks
        cache = spec.allocate(ops, *sizes)
        forward = ops.capture(lambda batch: self.model.forward(batch, cache), limits.max_num_batched_tokens)
        states, paged = states_in(spec, cache), paged_in(spec, cache)

        def copy_states(sources: Int32Array, targets: Int32Array) -> None:
            for some in states:
                ops.copy_states(some, sources, targets)

        def copy_blocks(sources: Int32Array, targets: Int32Array) -> None:
            for some in paged:
                ops.copy_blocks(some, sources, targets)

        drawer = drawer_of(forward)
        apart = limits.answers_apart
        runner = Runner(forward, self.model.logits, limits.block_size, ops.take, copy_states, copy_blocks, apart)
        if drawer is not None:
            logits = partial(logits_on_device, self.model, drawer)
            runner.draw_by(drawer, logits, ops.to_numpy, limits.keeps_prompt_ends)
        seed = repr((self.plan.model, self.plan.numerics_version, spec, self.plan.kv_bytes_per_token)).encode()
        delay = self.options.test_step_delay
        steps = SlowedRunner(runner, delay, ops.synchronize) if delay else runner
        scheduler = Scheduler(limits, self.model.vocab_size, seed)
        return EngineLoop(scheduler, steps, self.tokenizer, lambda: getattr(ops, "num_compiles", 0), self.vocabulary)

    def sibling(self, **switchable: Any) -> "Engine":
        """A second engine over the same loaded weights, with its own cache and loop and other scheduler options.

        Raises OptionError for an option that is not one of `options.SWITCHABLE`. Close it before this one.
        """
        unknown = sorted(set(switchable) - SWITCHABLE)
        if unknown:
            raise OptionError(
                f"{unknown[0]} cannot be switched in a loaded engine; these can: {', '.join(sorted(SWITCHABLE))}"
            )
        start_s = time.perf_counter()
        sources = {**self.options.sources, **dict.fromkeys(switchable, "sibling")}
        options = replace(self.options, **switchable, sources=sources)
        # the same cache size, or an arm would differ in more than its option
        sized = replace(options, kv_cache_bytes=self.plan.kv_bytes, max_model_len=self.plan.limits.max_model_len)
        plan = make_plan(
            sized, find_family(self.plan.architecture), self.backend.capability, self.checkpoint, model=self.model_name
        )
        # shown as they were said, not as they are held to the other engine's cache
        said = {name: getattr(options, name) for name in ("kv_cache_bytes", "max_model_len")}
        notes = (*plan.notes, "shares the loaded weights of another engine")
        plan = replace(plan, options={**plan.options, **said}, notes=notes)
        engine = replace(self, options=options, plan=plan, owns_checkpoint=False)
        engine.load_s = time.perf_counter() - start_s
        return engine

    def close(self) -> None:
        """Cancel what runs and let go of the checkpoint."""
        self.is_closed = True  # first: who is refused by the loop asks why
        self.loop.stop()
        if self.owns_checkpoint:
            self.checkpoint.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def logits_on_device(model: Model, drawer: Drawer, hidden: Tensor) -> Tensor:
    """What `Model.logits` gives, left where it is."""
    logits, cap = model.ops.project(hidden, model.head)[0], logit_cap(model)
    return logits if cap is None else drawer.capped(logits, cap)


def load_engine(options: EngineOptions, progress: Progress | None = None, amount: Amount | None = None) -> Engine:
    """Resolve, open, plan, and only then read the weights.

    progress: called with one line at a time; amount: with the bytes read so far and in all, several times a second.
    """
    tell = progress or (lambda line: None)
    start_s = time.perf_counter()
    path = catalog.resolve_model(options.model, progress)
    checkpoint = open_checkpoint(path)
    try:
        name = catalog.model_name(path)
        plan, backend = plan_and_open(options, checkpoint, name)
        family = find_family(checkpoint.architecture)
        tell(f"loading {name} ({plan.architecture}, {gib(plan.weights_bytes)}) on {plan.backend}: {where(plan)}")
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        template = ChatTemplate.from_metadata(checkpoint.metadata)
        reading = Reading(checkpoint, amount or (lambda done, total: None))
        model = family.load(reading, backend.ops, plan.limits.max_model_len)
        backend.ops.synchronize()  # what reads the file by itself has done so
        reading.finish()
        vocabulary = Vocabulary(tokenizer)
        engine = Engine(options, plan, tokenizer, template, checkpoint, model, name, backend, 0.0, vocabulary)
    except BaseException:
        checkpoint.close()
        raise
    engine.load_s = time.perf_counter() - start_s
    for note in plan.notes:
        tell(f"note: {note}")
    tell(f"ready in {engine.load_s:.1f} s")
    return engine


def where(plan: EnginePlan) -> str:
    """The device, and what of it is used, in a few words."""
    parts = [plan.device_name, plan.isa, f"{plan.threads} threads" if plan.threads > 1 else "1 thread"]
    return ", ".join(part for part in parts if part)


def plan_and_open(options: EngineOptions, checkpoint: Checkpoint, name: str) -> tuple[EnginePlan, Backend]:
    """The plan of the first backend that can run the checkpoint, and that backend, opened.

    Raises UnsupportedFeatureError with every reason when none can, before one is opened.
    """
    family = family_or_reason(checkpoint.architecture)
    wishes = backend_options(options, family)
    select.require_known(options.backend, options.said("backend"))
    plan, notes = plan_first(options, family, select.offers(options.backend, wishes), checkpoint, model=name)
    assert not isinstance(family, str)  # plan_first has refused
    backend = select.open_backend(plan.backend, wishes)
    # what a backend bids is read from the machine; what it has is known once it is open
    return make_plan(options, family, backend.capability, checkpoint, model=name, notes=notes), backend
