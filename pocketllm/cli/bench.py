"""`pocketllm bench`: is B different from A, by how much, and could this run have known?"""

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import engine_options as flags
from pocketllm.cli.output import EXIT_INTERRUPTED, command, say, write_json

if TYPE_CHECKING:
    from pocketllm.bench.arm import ArmSet
    from pocketllm.bench.run import Progress, Settings
    from pocketllm.bench.scenarios.contract import Scenario
    from pocketllm.engine.options import EngineOptions

EPILOG = """Examples:

pocketllm bench --scenario prefill --input-len 256 --arms base --arms chunk-64:prefill_chunk=64 --budget 150s

pocketllm bench --scenario decode --arms ours:url=http://127.0.0.1:8000 --arms llama:url=http://127.0.0.1:8080

pocketllm bench --scenario decode --arms base --arms narrow:max_num_seqs=1 --plan
"""

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command("bench", epilog=EPILOG)(bench)


@command
def bench(
    arms: Annotated[
        list[str],
        typer.Option(
            "--arms",
            help="NAME[:key=value,…], repeatable; the first is the baseline. Keys: switchable engine options "
            "(prefill_chunk, max_num_seqs, max_num_batched_tokens, watermark, reserve), or url= of a running server.",
        ),
    ],
    scenario: Annotated[str, typer.Option("--scenario", help="What to ask for: decode or prefill.")] = "decode",
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
    seed: Annotated[int, typer.Option("--seed", help="Decides the order of arms and the prompts.")] = 1,
    margin: Annotated[
        str | None,
        typer.Option("--margin", help="What counts: 1%, or decode=1%.", show_default="1% in process, 2% by URL"),
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
    max_model_len: flags.MaxModelLen = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    prefill_chunk: flags.PrefillChunk = None,
    kv_cache_bytes: flags.KVCacheBytes = None,
) -> None:
    """Compare arms, interleaved and paired, with a null arm; say what can be said, and keep a record.

    The null arm (the baseline again) joins by itself: a difference between A and A makes the run INVALID. Verdicts:
    FASTER, SLOWER, SAME, SMALL, NOT DISTINGUISHABLE, INVALID. Any valid verdict exits 0; 3 is INVALID or not judged.
    """
    options = flags.engine_options(
        model=model,
        backend=backend,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        kv_cache_bytes=kv_cache_bytes,
    )
    from pocketllm.bench.arm import make_arms

    check_gates(fail_on, require, no_null, len(arms))
    chosen = pick_scenario(scenario, input_len, output_len)
    arm_set = make_arms(arms, options, baseline, with_null=not no_null)
    margins = parse_margins(margin, chosen, arm_set)
    seconds = parse_duration(budget)
    at_least_one("--requests", requests)
    if plan:
        show_plan(chosen, arm_set, blocks, seconds, seed, as_json)
        return
    from pocketllm.bench.run import Settings, whole_blocks
    from pocketllm.evidence.store import record_dir as writable_dir

    whole_blocks(blocks, len(arm_set.arms))
    settings = Settings(
        scenario=chosen,
        arm_set=arm_set,
        margins=margins,
        directory=writable_dir(record_dir),
        seed=seed,
        blocks=blocks,
        budget_s=seconds,
        requests=requests,
        arguments={**options.as_dict(), "budget_s": seconds, "blocks": blocks, "requests": requests},
    )
    finish(settings, options, as_json, fail_on is not None, require)


def finish(
    settings: "Settings", options: "EngineOptions", as_json: bool, fail_on_slower: bool, require: str | None
) -> None:
    """Run, print, and end with the exit code of the verdicts."""
    from pocketllm.bench.analysis.verdict import Require, exit_code
    from pocketllm.bench.record import judged_words
    from pocketllm.bench.reports.text import colored, plain, render
    from pocketllm.bench.run import Run
    from pocketllm.bench.targets.gate import golden_gate
    from pocketllm.bench.targets.rig import open_rig

    with bar_or_lines() as progress:
        rig = open_rig(settings.arm_set, options, progress.say)
        try:
            outcome = Run(settings, rig, lambda rig, arm: golden_gate(rig, arm, options), progress).run()
        finally:
            rig.close()
    if as_json:
        write_json({**outcome.document, "record": outcome.path.name})
    else:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        typer.echo(render(outcome.document, colored if color else plain))
    say(f"record: {display(outcome.path)}")
    if outcome.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    code = exit_code(judged_words(outcome.document), fail_on_slower, Require(require) if require else None)
    raise typer.Exit(code)


def show_plan(
    scenario: "Scenario", arm_set: "ArmSet", blocks: int | None, budget_s: float | None, seed: int, as_json: bool
) -> None:
    """Print what would run; loads no weights and asks no server."""
    from pocketllm.bench.reports.preview import preview
    from pocketllm.bench.reports.text import render_plan

    document = preview(scenario, arm_set, blocks, budget_s, seed)
    if as_json:
        write_json(document)
    else:
        typer.echo(render_plan(document))


# -- reading the flags -------------------------------------------------------------------------------------------------
def check_gates(fail_on: str | None, require: str | None, no_null: bool, num_arms: int) -> None:
    """Refuse gates that are unknown, or that have no verdict to read."""
    from pocketllm.bench.analysis.verdict import Require
    from pocketllm.errors import OptionError

    if fail_on not in (None, "slower"):
        raise OptionError(f"--fail-on {fail_on!r}: the one gate is `slower`")
    known = [item.value for item in Require]
    if require is not None and require not in known:
        raise OptionError(f"--require {require!r}: known is {', '.join(known)}")
    if no_null and (fail_on or require):
        raise OptionError("--no-null gives no verdict, so --fail-on and --require have nothing to read")
    if num_arms < 2 and (fail_on or require):
        raise OptionError("one arm and its null arm give no verdict, so --fail-on and --require have nothing to read")


def pick_scenario(name: str, input_len: int | None, output_len: int | None) -> "Scenario":
    """The scenario with the lengths asked for."""
    from dataclasses import replace

    from pocketllm.bench.scenarios import find_scenario
    from pocketllm.errors import OptionError

    scenario = find_scenario(name)
    at_least_one("--input-len", input_len)
    at_least_one("--output-len", output_len)
    chosen = replace(scenario, n_prompt=input_len or scenario.n_prompt, n_out=output_len or scenario.n_out)
    if "decode" in chosen.primary and chosen.n_out < 3:
        raise OptionError(
            f"--output-len {chosen.n_out}: decode is the gaps after the second token, so it needs 3 tokens"
        )
    return chosen


def at_least_one(flag: str, value: int | None) -> None:
    """Refuse what counts nothing."""
    from pocketllm.errors import OptionError

    if value is not None and value < 1:
        raise OptionError(f"{flag} {value} must be at least 1")


def parse_duration(text: str | None) -> float | None:
    """Seconds of `150s`, `2.5m`, `1h` or a bare number; OptionError for anything else."""
    from pocketllm.errors import OptionError

    if text is None:
        return None
    match = DURATION.fullmatch(text.strip())
    if not match or float(match[1]) <= 0:
        raise OptionError(f"--budget {text!r} is not a time such as 150s, 5m or 1h")
    return float(match[1]) * UNITS[match[2]]


def parse_margins(text: str | None, scenario: "Scenario", arm_set: "ArmSet") -> dict[str, float]:
    """Margin by primary metric; OptionError for a metric that this scenario does not judge."""
    from pocketllm.bench.analysis.verdict import DEFAULT_MARGINS
    from pocketllm.errors import OptionError

    margins = dict.fromkeys(scenario.primary, DEFAULT_MARGINS[arm_set.isolation])
    for part in [] if text is None else text.split(","):
        metric, equals, value = part.rpartition("=")
        share = parse_share(value)
        if not equals:
            margins = dict.fromkeys(scenario.primary, share)
        elif metric in margins:
            margins[metric] = share
        else:
            raise OptionError(f"--margin {part!r}: {scenario.name} judges {', '.join(scenario.primary)}")
    return margins


def parse_share(text: str) -> float:
    """`1%` or `0.01` as 0.01; OptionError outside (0, 1)."""
    from pocketllm.errors import OptionError

    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise OptionError(f"--margin {text!r} is not a share such as 1% or 0.01")
    return share


def display(path: Path) -> str:
    """A path as seen from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# -- progress ----------------------------------------------------------------------------------------------------------
class Lines:
    """Progress as plain lines on stderr, at most one every few seconds."""

    every_s = 10.0

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def say(self, text: str) -> None:
        say(text)

    def slot_done(self, done: int, total: int, left_s: float) -> None:
        now = time.monotonic()
        if now - self.last_s >= self.every_s or done == total:
            self.last_s = now
            say(f"slot {done} of {total}, {left_s:.0f} s left")


class Bar:
    """Progress as a bar on a terminal's stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("slots"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
        self.rich = RichProgress(*columns, console=Console(stderr=True), transient=True)
        self.task: Any = None

    def __enter__(self) -> "Progress":
        self.rich.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.rich.stop()

    def say(self, text: str) -> None:
        self.rich.console.print(text, markup=False, highlight=False)

    def slot_done(self, done: int, total: int, left_s: float) -> None:
        left = f"{left_s:.0f} s left"
        if self.task is None:
            self.task = self.rich.add_task("slots", total=total, left=left)
        self.rich.update(self.task, completed=done, left=left)


def bar_or_lines() -> "Lines | Bar":
    """A bar where somebody watches, lines where not."""
    return Bar() if sys.stderr.isatty() else Lines()
