"""`pocketllm bench`: is B different from A, by how much, and could this run have known?"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import engine_options as flags
from pocketllm.cli.bench.progress import bar_or_lines
from pocketllm.cli.bench.terminal import paint, show
from pocketllm.cli.bench.values import (
    at_least,
    at_least_one,
    at_most,
    check_gates,
    display,
    parse_duration,
    parse_margins,
    parse_until,
    pick_scenario,
    share_cores,
)
from pocketllm.cli.output import EXIT_INTERRUPTED, command, reader_may_leave, say, write_json

if TYPE_CHECKING:
    from pocketllm.bench.run import Outcome, Settings
    from pocketllm.engine.options import EngineOptions

EPILOG = """Examples:

pocketllm bench --scenario prefill --input-len 256 --arms base --arms chunk-64:prefill_chunk=64 --budget 150s

pocketllm bench --arms ours:via=http --arms llama.cpp:recipe=llama-server --starts 5

pocketllm bench --arms now --arms new:path=../worktree --until half-width=1%

pocketllm bench --arms ours:url=http://127.0.0.1:8000 --arms llama:url=http://127.0.0.1:8080

pocketllm bench --arms 'other:cmd=my-server --model {model_path} --port {port}' --arms arms.toml

pocketllm bench --scenario decode --arms base --arms narrow:max_num_seqs=1 --plan
"""


@command
def bench(
    context: typer.Context,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            "--arms",
            help="NAME[:key=value,…] or a TOML file of arms; repeatable; the first is the baseline. Keys: engine "
            "options (one that cannot be switched over loaded weights gives each arm a process), via=http, "
            "path= another checkout, recipe= or cmd= a server to start, url= a running one (key_env= its key).",
        ),
    ] = None,
    scenario: Annotated[
        str, typer.Option("--scenario", help="What to ask for; an unknown name lists them all.")
    ] = "decode",
    points: Annotated[
        str | None, typer.Option("--points", help="Some of the scenario's points, e.g. 1,8.", show_default="all")
    ] = None,
    input_len: Annotated[
        int | None, typer.Option("--input-len", help="Prompt tokens.", show_default="the scenario's")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--output-len", help="Generated tokens.", show_default="the scenario's")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="Blocks, rounded up to whole row sets.", show_default="about 12")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Fit the run to a time, e.g. 150s or 5m (loading set apart).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Measured requests a slot.", show_default="1 to 5, by calibration")
    ] = None,
    starts: Annotated[
        int | None,
        typer.Option(
            "--starts", help="Fresh starts of every arm where each is a process.", show_default="5, or 1 in one process"
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until", help="half-width=1%: stop, at a row set's end, once every judged interval is so narrow."
        ),
    ] = None,
    min_n: Annotated[int, typer.Option("--min-n", help="Blocks before --until may stop a run; at least 7.")] = 7,
    soak: Annotated[
        str | None,
        typer.Option("--soak", help="Longest heat soak; 0 for none.", show_default="5m, at most a fifth of the run"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides the order of arms and the prompts.")] = 1,
    margin: Annotated[
        str | None,
        typer.Option("--margin", help="What counts: 1%, or decode=1%.", show_default="1% in one process, 2% over HTTP"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="The arm that others are measured against.", show_default="the first"),
    ] = None,
    no_null: Annotated[bool, typer.Option("--no-null", help="No null arm: intervals, and no verdict.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print schedule, time and power; run nothing.")] = False,
    fail_on: Annotated[str | None, typer.Option("--fail-on", help="`slower`: exit 1 when an arm is SLOWER.")] = None,
    require: Annotated[
        str | None,
        typer.Option("--require", help="`same-or-faster`: exit 1 when SLOWER, 4 when the run cannot rule it out."),
    ] = None,
    record_dir: Annotated[
        Path | None, typer.Option("--record-dir", help="Where the record goes.", show_default="records/local")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole run document on stdout.")] = False,
    model: flags.Model = None,
    backend: flags.Backend = None,
    threads: flags.Threads = None,
    activation_dtype: flags.ActivationDtype = None,
    kv_dtype: flags.KVDtype = None,
    batch_invariant: flags.BatchInvariant = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    prefill_chunk: flags.PrefillChunk = None,
    kv_cache_bytes: flags.KVCacheBytes = None,
) -> None:
    """Compare arms, interleaved and paired, with a null arm; say what can be said, and keep a record.

    The null arm (the baseline again) joins by itself: a difference between A and A of more than half the margin makes
    the run INVALID, a smaller one counts against every verdict. Verdicts: FASTER, SLOWER, SAME, SMALL,
    NOT DISTINGUISHABLE, INVALID. Any valid verdict exits 0; 3 is INVALID or not judged.
    """
    if context.invoked_subcommand is not None:
        refuse_own_flags(context)
        return
    options = flags.engine_options(
        model=model,
        backend=backend,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        kv_cache_bytes=kv_cache_bytes,
    )
    from pocketllm.bench.arm import SameCodeError, default_starts, make_arms
    from pocketllm.bench.run import SOAK_S, Settings
    from pocketllm.bench.schedule import MAX_ASKED, MAX_BLOCKS
    from pocketllm.evidence.store import record_dir as writable_dir

    arms = arms or []
    chosen = pick_scenario(scenario, input_len, output_len, points)
    try:
        arm_set = make_arms(arms, options, baseline, with_null=not no_null)
    except SameCodeError:
        if context.obj is None:
            raise
        # a gate passes what changes no code
        context.obj({"scenario": chosen.name, "same_code": True})
        return
    options = share_cores(arm_set, options)
    check_gates(fail_on, require, no_null, len(arm_set.arms) - (arm_set.null is not None))
    at_least_one("--requests", requests)
    at_most("--requests", requests, MAX_ASKED)
    at_least("--min-n", min_n, 7)
    at_most("--min-n", min_n, MAX_BLOCKS)
    settings = Settings(
        scenario=chosen,
        arm_set=arm_set,
        margins=parse_margins(margin, chosen, arm_set),
        directory=Path() if plan else writable_dir(record_dir),
        seed=seed,
        blocks=blocks,
        budget_s=parse_duration(budget),
        requests=requests,
        starts=default_starts(arm_set.isolation, starts),
        until=parse_until(until),
        min_n=min_n,
        soak_s=SOAK_S if soak is None else parse_duration(soak, "--soak", least=0.0) or 0.0,
        arguments={**options.as_dict(), "blocks": blocks, "requests": requests, "until": until, "budget": budget},
    )
    settings.wish.planned_blocks()
    if plan:
        show_plan(settings, options, as_json)
        return
    finish(settings, options, as_json, fail_on is not None, require, context.obj)


def refuse_own_flags(context: typer.Context) -> None:
    """OptionError for a flag of `bench` itself before a subcommand, which would not see it."""
    from pocketllm.errors import OptionError

    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise OptionError(
                f"{parameter.opts[0]} stands before {context.invoked_subcommand}: flags follow the subcommand"
            )


def finish(
    settings: "Settings",
    options: "EngineOptions",
    as_json: bool,
    fail_on_slower: bool,
    require: str | None,
    on_end: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Run, print, and end with the exit code of the verdicts; `on_end` gets the run document (`bench gate`)."""
    from pocketllm.bench.analysis.verdict import Require, exit_code
    from pocketllm.bench.record import judged_words
    from pocketllm.bench.reports.text import render
    from pocketllm.evidence.pages.layout import columns

    refuse_before_loading(settings, options)
    outcome = measure(settings, options)
    with reader_may_leave():
        if as_json:
            write_json({**outcome.document, "record": outcome.path.name})
        else:
            show(render(outcome.document, paint(), width=columns()))
    say(f"record: {display(outcome.path)}")
    if on_end is not None:
        on_end(outcome.document)
    if outcome.interrupted:
        say("interrupted" + ": the record was whole by then" * bool(outcome.document["complete"]))
        raise typer.Exit(EXIT_INTERRUPTED)
    code = exit_code(judged_words(outcome.document), fail_on_slower, Require(require) if require else None)
    raise typer.Exit(code)


def measure(settings: "Settings", options: "EngineOptions") -> "Outcome":
    """Open the arms, run, close them. Ctrl-C once the record is written hides nothing of it."""
    from pocketllm.bench.run import Run
    from pocketllm.bench.targets.gate import golden_gate
    from pocketllm.bench.targets.rig import open_rig

    outcome = None
    try:
        with bar_or_lines() as progress:
            rig = open_rig(settings.arm_set, options, progress.say, settings.directory / "logs")
            try:
                outcome = Run(settings, rig, lambda rig, arm: golden_gate(rig, arm, options), progress).run()
            finally:
                rig.close()
    except KeyboardInterrupt:
        if outcome is None:
            raise
        outcome = replace(outcome, interrupted=True)
    return outcome


def refuse_before_loading(settings: "Settings", options: "EngineOptions") -> None:
    """Refuse what the header alone shows to be impossible, such as a prompt beyond the context, before weights load.

    Of arms in one process: processes plan for themselves, on a device that this one has not opened.
    """
    from pocketllm.bench.arm import Isolation
    from pocketllm.bench.reports.preview import foresee

    if settings.arm_set.isolation is Isolation.TOGGLE:
        foresee(settings.scenario, settings.arm_set, options)


def show_plan(settings: "Settings", options: "EngineOptions", as_json: bool) -> None:
    """Print what would run, or refuse as the run would; loads no weights and asks no server."""
    from pocketllm.bench.reports.preview import foresee, preview
    from pocketllm.bench.reports.text import render_plan

    document = preview(settings, foresee(settings.scenario, settings.arm_set, options))
    if as_json:
        write_json(document)
    else:
        typer.echo(render_plan(document))
