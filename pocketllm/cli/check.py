"""`pocketllm check`: this machine, its backends, and whether a model would run on them, or every reason why not."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli.engine_options import (
    ActivationDtype,
    Backend,
    BatchInvariant,
    BlockSize,
    KVCacheBytes,
    KVDtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    PrefillChunk,
    Threads,
    engine_options,
)
from pocketllm.cli.output import command, reader_may_leave, say, write_json

if TYPE_CHECKING:
    from pocketllm.engine.backends.api.capability import BackendBid
    from pocketllm.engine.backends.api.device import DeviceFacts
    from pocketllm.engine.models.contract import ModelFamily
    from pocketllm.engine.options import EngineOptions
    from pocketllm.engine.weights.checkpoint import Checkpoint

CANNOT_RUN = 2


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command(
        "check",
        epilog="Examples: pocketllm check · pocketllm check --model smollm2-135m · "
        "pocketllm check --model model.gguf --max-num-seqs 64 --json",
    )(command(check))


def check(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Also say whether this model would run: catalog name, .gguf path, or hf:owner/repo/file.",
            show_default="none",
        ),
    ] = None,
    backend: Backend = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    prefill_chunk: PrefillChunk = None,
    block_size: BlockSize = None,
    kv_cache_bytes: KVCacheBytes = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show what this machine offers, what each installed backend would do with it, and what a model would become.

    Reads a checkpoint's header and no weights. Ends with 0 when it would run, and with 2 and every reason when not.
    In JSON, what of a backend depends on the model is null without one.
    """
    options = engine_options(
        model=model,
        backend=backend,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )
    report = report_on(options, with_model=model is not None)
    with reader_may_leave():
        if as_json:
            write_json(report)
        else:
            typer.echo(page(report), nl=False)
    if not report["runs"]:
        raise typer.Exit(CANNOT_RUN)


# -- the report ------------------------------------------------------------------------------------------------------
def report_on(options: "EngineOptions", with_model: bool) -> dict[str, Any]:
    """Machine, backends and, with a model, its plan or reasons; `runs` is the answer."""
    from pocketllm.engine.backends.select import require_known
    from pocketllm.engine.models.registry import family_or_reason
    from pocketllm.engine.weights.catalog import model_name, resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    require_known(options.backend, options.said("backend"))
    if not with_model:
        return machine_report(options, None)[0]
    path = resolve_model(options.model, say)
    with open_checkpoint(path) as checkpoint:
        family = family_or_reason(checkpoint.architecture)
        report, offers = machine_report(options, family)
        report["model"] = model_report(options, offers, family, checkpoint, model_name(path))
    plan = report["model"]["plan"]
    return report | {"backend": plan["backend"] if plan else report["backend"], "runs": plan is not None}


def machine_report(
    options: "EngineOptions", family: "ModelFamily | str | None"
) -> tuple[dict[str, Any], "list[BackendBid]"]:
    """Machine and backends, and the bids of those that are meant; family: of the model, which backends choose by."""
    from pocketllm.engine.backends.api.device import read_facts
    from pocketllm.engine.backends.select import AUTO, bids
    from pocketllm.engine.plan import backend_options

    wishes = backend_options(options, family)
    offers = bids(wishes)
    backends = [backend_report(bid) for bid in offers]
    if family is None or isinstance(family, str):
        demanding = bids(replace(wishes, least_activations="int16"))
        backends = without_model(backends, [backend_report(bid) for bid in demanding])
    meant = [bid for bid in offers if options.backend in (AUTO, bid.name)]
    best = meant[0].name if meant[0].capability else None
    report: dict[str, Any] = {
        "machine": machine(read_facts()),
        "backends": backends,
        "asked": options.backend,
        "backend": best,
        "runs": best is not None,
    }
    return report, meant


def without_model(backends: list[dict[str, Any]], demanding: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Backends with None for each fact that is another one for a model that demands more: the model decides it."""
    others = {backend["name"]: backend for backend in demanding if backend["runs"]}
    return [
        {key: value if others.get(one["name"], one)[key] == value else None for key, value in one.items()}
        for one in backends
    ]


def machine(facts: "DeviceFacts") -> dict[str, Any]:
    """What this process may use, and what it runs in; torch by its version, not imported."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {
        "cpu": facts.cpu_name,
        "architecture": facts.architecture,
        "num_cores": facts.num_cores,
        "memory_bytes": facts.memory_bytes,
        "available_bytes": facts.available_bytes,
        "gpus": list(facts.gpus),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": torch,
    }


def backend_report(bid: "BackendBid") -> dict[str, Any]:
    """One backend's answer."""
    capability = bid.capability
    report: dict[str, Any] = {"name": bid.name, "runs": capability is not None, "reason": bid.reason}
    if capability is not None:
        report |= {
            "device": capability.device,
            "isa": capability.isa,
            "threads": capability.threads,
            "activation_dtype": capability.activation_dtype,
            "kv_dtype": capability.kv_dtype,
            "quant_types": sorted(capability.quant_types),
            "ops": sorted(capability.ops),
            "batch_invariant_width": capability.batch_invariant_width,
            "numerics_version": capability.numerics_version,
        }
    return report


def model_report(
    options: "EngineOptions",
    offers: "list[BackendBid]",
    family: "ModelFamily | str",
    checkpoint: "Checkpoint",
    name: str,
) -> dict[str, Any]:
    """A model's plan on the first of these backends that can run it, or every reason why none would."""
    from pocketllm.engine.plan import plan_first
    from pocketllm.errors import UnsupportedFeatureError

    report: dict[str, Any] = {"name": name, "architecture": checkpoint.architecture, "plan": None, "reasons": []}
    if not any(bid.capability for bid in offers):
        unmet = [family] if isinstance(family, str) else family.unmet(checkpoint)
        report["reasons"] = [*unmet, *(f"backend {bid.name}: {bid.reason}" for bid in offers)]
        return report
    try:
        plan, _ = plan_first(options, family, offers, checkpoint, model=name)
        report["plan"] = plan.as_dict()
    except UnsupportedFeatureError as error:
        report["reasons"] = list(error.reasons)
    return report


# -- the page --------------------------------------------------------------------------------------------------------
def page(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = ["Machine", *indented(machine_facts(report["machine"])), "", "Backends"]
    for backend in report["backends"]:
        mark = "*" if backend["name"] == report["backend"] else " "
        lines.append(f" {mark}{backend['name']}  {'' if backend['runs'] else 'cannot run: '}{backend['reason']}")
    if report["backend"] is None:
        is_one = any(backend["runs"] for backend in report["backends"])
        lines.append(
            f"  {report['asked']}, which was asked for, would not run" if is_one else "  none of these would run"
        )
    if "model" in report:
        lines += ["", f"Model {report['model']['name']} ({report['model']['architecture']})"]
        lines += indented(plan_facts(report["model"]["plan"])) if report["runs"] else ["  would not run:"]
        lines += [f"  - {reason}" for reason in report["model"]["reasons"]]
    return "\n".join(lines) + "\n"


def indented(facts: list[tuple[str, str]]) -> list[str]:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in facts) + 2
    return [f"  {name:<{width}}{value}" for name, value in facts]


def machine_facts(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """The machine, line by line."""
    from pocketllm.engine.plan.memory import gib

    return [
        ("cpu", f"{machine['cpu']} ({machine['architecture']}), {machine['num_cores']} cores usable"),
        ("memory", f"{gib(machine['available_bytes'])} available of {gib(machine['memory_bytes'])}"),
        ("gpu", ", ".join(machine["gpus"]) or "none that a driver lists"),
        ("system", machine["os"]),
        ("python", machine["python"]),
        ("torch", machine["torch"] or "not installed"),
    ]


def plan_facts(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """What the model would become."""
    from pocketllm.engine.plan.memory import gib

    facts = [
        ("would run on", f"{plan['backend']} on {plan['device_name']}, {how(plan)}"),
        ("weights", gib(plan["weights_bytes"])),
        ("context", f"{plan['max_model_len']:,} tokens of the checkpoint's {plan['context_length']:,}"),
        ("cache", f"{gib(plan['kv_bytes'])}, {plan['num_blocks']:,} blocks of {plan['block_size']} tokens"),
        *window_facts(plan),
        *([("states", f"{gib(plan['state_bytes'])} for recurrent layers")] if plan["state_bytes"] else []),
        ("working memory", gib(plan["scratch_bytes"])),
        ("step", f"at most {plan['max_num_seqs']} requests and {plan['max_num_batched_tokens']} tokens"),
        *ready_facts(plan),
        ("exactness", exactness(plan)),
    ]
    return facts + [("note", note) for note in plan["notes"]]


def exactness(plan: dict[str, Any]) -> str:
    """What an answer does not depend on."""
    if plan["options"]["batch_invariant"]:
        return f"batch-invariant in steps of up to {plan['batch_invariant_width']} rows"
    return f"a row is independent of its neighbors up to {plan['batch_invariant_width']} rows a step"


def ready_facts(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """Numbers of requests whose steps a server captures or compiles first; nothing where one does for all."""
    widths = ", ".join(map(str, plan["step_widths"]))
    return (
        [("made ready", f"steps of {widths} requests, before a server serves")] if len(plan["step_widths"]) > 1 else []
    )


def window_facts(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """What the cache's layers that see a window come to; nothing of a model without such layers."""
    if not plan["window"]:
        return []
    most = f"{plan['window_bytes_per_request'] / (1 << 20):.1f} MiB a request at most"
    what = f"{plan['num_window_blocks']:,} blocks of the cache, {most}"
    return [("windows", f"{plan['window']:,} tokens: {what}")]


def how(plan: dict[str, Any]) -> str:
    """Instruction set, threads and dtypes in a few words."""
    isa = f"{plan['isa']}, " if plan["isa"] else ""
    dtypes = f"activations {plan['activation_dtype']}, cache {plan['kv_dtype']}"
    return f"{isa}{plan['threads']} threads, {dtypes}"
