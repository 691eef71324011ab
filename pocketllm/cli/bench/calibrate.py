"""`pocketllm bench calibrate`: A against A, many times: how often would this machine be wrong?"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import engine_options as flags
from pocketllm.cli.bench.command import refuse_before_loading
from pocketllm.cli.bench.progress import bar_or_lines
from pocketllm.cli.bench.values import (
    at_least_one,
    at_most,
    display,
    parse_duration,
    parse_margins,
    pick_scenario,
    share_cores,
)
from pocketllm.cli.output import EXIT_INTERRUPTED, command, say, write_json

if TYPE_CHECKING:
    from pocketllm.bench.run import Done, Outcome, Progress, Settings
    from pocketllm.bench.targets.rig import Rig
    from pocketllm.engine.options import EngineOptions
    from pocketllm.evidence.store import Record, RecordWriter

EPILOG = """Examples:

pocketllm bench calibrate --runs 40 --scenario decode --input-len 32 --output-len 32

pocketllm bench calibrate --runs 8 --budget 10m

pocketllm bench calibrate --resume 01K9ZQ --runs 40
"""


def register(bench: typer.Typer) -> None:
    """Add this subcommand to `bench`."""
    bench.command("calibrate", epilog=EPILOG)(calibrate)


@command
def calibrate(
    runs: Annotated[int, typer.Option("--runs", help="A/A runs in all.")] = 40,
    scenario: Annotated[str, typer.Option("--scenario", help="What to ask for.")] = "decode",
    arm: Annotated[
        str, typer.Option("--arm", help="What is run against itself, as in --arms: base:via=http, a url= ….")
    ] = "base",
    input_len: Annotated[
        int | None, typer.Option("--input-len", help="Prompt tokens.", show_default="the scenario's")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option("--output-len", help="Generated tokens.", show_default="the scenario's")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="Blocks a run, rounded up to whole row sets.", show_default="12")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Measured requests a slot.", show_default="by the first run")
    ] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Fit all runs together to a time, e.g. 20m.")] = None,
    margin: Annotated[
        str | None, typer.Option("--margin", help="What counts.", show_default="1% in process, 2% by URL")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first run; each further one has the next.")] = 1,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Go on with the calibration record of this id.", metavar="ID")
    ] = None,
    record_dir: Annotated[
        Path | None, typer.Option("--record-dir", help="Where the record goes.", show_default="records/local")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Summary and rows on stdout.")] = False,
    model: flags.Model = None,
    backend: flags.Backend = None,
    threads: flags.Threads = None,
    max_model_len: flags.MaxModelLen = None,
) -> None:
    """Run A against A many times and say how often it was called different, how noisy it is, and what it could find.

    One record holds the estimate, interval and verdict of every run. Later benchmarks on this machine take their noise
    floor from it. Ctrl-C keeps the finished runs; --resume goes on with them.
    """
    from pocketllm.bench.analysis.calibration import against_itself
    from pocketllm.bench.arm import make_arms
    from pocketllm.bench.run import Settings
    from pocketllm.bench.schedule import MAX_ASKED
    from pocketllm.evidence.store import record_dir as writable_dir

    at_least_one("--runs", runs)
    at_least_one("--requests", requests)
    at_most("--runs", runs, MAX_ASKED)
    at_most("--requests", requests, MAX_ASKED)
    options = flags.engine_options(model=model, backend=backend, threads=threads, max_model_len=max_model_len)
    chosen = pick_scenario(scenario, input_len, output_len)
    arm_set = against_itself(make_arms([arm], options))
    options = share_cores(arm_set, options)
    seconds = parse_duration(budget)
    directory = writable_dir(record_dir)
    settings = Settings(
        scenario=chosen,
        arm_set=arm_set,
        margins=parse_margins(margin, chosen, arm_set),
        directory=directory,
        seed=seed,
        blocks=blocks,
        budget_s=None if seconds is None else seconds / runs,
        runs=runs,
        requests=requests,
        arguments=options.as_dict(),
    )
    settings.wish.planned_blocks()
    earlier = None if resume is None else earlier_runs(resume, record_dir)
    calibration = Calibration(settings, runs, directory, earlier)
    refuse_before_loading(settings, options)
    interrupted = measure(calibration, options)
    if interrupted and not calibration.done:
        say("interrupted before the first run had ended: nothing is kept")
        raise typer.Exit(EXIT_INTERRUPTED)
    path, late = calibration.finish(complete=not interrupted)
    show(calibration, as_json)
    say(f"record: {display(path)}")
    if interrupted:
        say(f"interrupted: {calibration.done} of {runs} runs are kept; go on with --resume {path.stem[:14]}")
    elif late:
        say("interrupted: the record was whole by then")
    if interrupted or late:
        raise typer.Exit(EXIT_INTERRUPTED)


def earlier_runs(run_id: str, record_dir: Path | None) -> "Record":
    """The calibration record to go on with; OptionError for a record of another kind."""
    from pocketllm.errors import OptionError
    from pocketllm.evidence.store import read_record, search_dirs

    record = read_record(run_id, [*([record_dir] if record_dir else []), *search_dirs()])
    if record.kind != "calibration":
        raise OptionError(f"--resume {run_id}: a {record.kind} record, not a calibration")
    return record


@dataclass
class Calibration:
    """Runs so far and the record they go to, which is begun once the first run has ended."""

    settings: "Settings"
    runs: int
    directory: Path
    earlier: "Record | None" = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    writer: "RecordWriter | None" = None

    def __post_init__(self) -> None:
        if self.earlier is None:
            return
        self.rows = [dict(row) for row in self.earlier.row_dicts]
        self.done = 1 + max((row["run"] for row in self.rows), default=-1)
        told = self.earlier.document
        # the same question: blocks and requests as the first run fitted them
        self.settings = replace(
            self.settings,
            seed=int(told["seed"]),
            blocks=int(told["blocks"]),
            requests=int(told["workload"]["requests_per_slot"]),
            budget_s=None,
        )

    def next_settings(self, directory: Path) -> "Settings":
        """Settings of the next run: the next seed; after the first run, its blocks and requests."""
        return replace(self.settings, seed=self.settings.seed + self.done, directory=directory)

    def take(self, outcome: "Outcome") -> None:
        """Keep a finished run: its rows are durable when this returns."""
        from pocketllm.bench.analysis.calibration import rows_of_run

        document = outcome.document
        if self.writer is None:
            self.begin(document)
        found = list(rows_of_run(self.done, document))
        assert self.writer is not None
        self.writer.append(found)
        self.rows += found
        self.done += 1

    def begin(self, document: Any) -> None:
        """Begin the record from the first run's document, with the rows of the record that it goes on with."""
        from pocketllm.bench.analysis.history import history_key
        from pocketllm.errors import OptionError
        from pocketllm.evidence.store import RecordWriter

        names = ("device_class", "model", "scenario", "isolation", "claim", "arms", "plan", "margin", "workload")
        facts = {name: document[name] for name in (*names, "rules_version", "rules_sha256") if name in document}
        facts |= {"history_key": history_key(document), "runs": self.runs, "seed": self.settings.seed}
        facts |= {"blocks": len(document["schedule"]), "options": document.get("options", {})}
        same = ("history_key", "rules_sha256", "margin")
        earlier = self.earlier
        if earlier is not None:
            other = [name for name in same if earlier.document.get(name) != facts.get(name)]
            other += ["machine"] * (earlier.document["machine"]["hard"] != document["machine"]["hard"])
            if other:
                raise OptionError(
                    f"--resume {earlier.run_id}: these runs would differ from the earlier ones in {', '.join(other)}"
                )
            facts["supersedes"] = [earlier.run_id]
        self.writer = RecordWriter("calibration", facts, self.directory)
        own = ("run_id", "schema", "kind")
        self.writer.append([{name: row[name] for name in row if name not in own} for row in self.rows])
        workload = document["workload"]
        self.settings = replace(
            self.settings, blocks=facts["blocks"], requests=workload["requests_per_slot"], budget_s=None
        )

    def finish(self, complete: bool) -> tuple[Path, bool]:
        """Close the record of one run or more with its summary; that of before where none was added.

        And whether Ctrl-C came while it was summed up and written.
        """
        from pocketllm.bench.analysis.calibration import summarize

        if self.writer is None:
            assert self.earlier is not None, "no run has ended"
            return self.earlier.path, False
        return self.writer.finish_with(lambda: {"summary": summarize(self.rows)}, complete=complete)


def measure(calibration: Calibration, options: "EngineOptions") -> bool:
    """Open the arms once and make the runs; returns whether somebody interrupted them.

    A run whose process is killed loses itself alone: the others are in the record's journal.
    """
    from pocketllm.bench.run import Run
    from pocketllm.bench.targets.rig import open_rig

    scratch_dir = tempfile.TemporaryDirectory(prefix="pocketllm-calibrate-")
    with bar_or_lines() as bar, scratch_dir as scratch:
        progress = Counted(bar, calibration)
        try:
            rig = open_rig(calibration.settings.arm_set, options, bar.say, calibration.directory / "logs")
            try:
                while calibration.done < calibration.runs:
                    progress.begin()
                    settings = calibration.next_settings(Path(scratch))
                    outcome = Run(settings, rig, gate(calibration, options), progress).run()
                    if outcome.document["complete"]:
                        calibration.take(outcome)
                    if outcome.interrupted:
                        return True
            finally:
                rig.close()
        except KeyboardInterrupt:
            return True
    return False


def gate(calibration: Calibration, options: "EngineOptions") -> Callable[["Rig", Any], Any]:
    """The golden check of the first run; the further ones run the same thing."""
    from pocketllm.bench.targets.gate import GateAnswer, GateState, golden_gate

    if calibration.writer is None:
        return lambda rig, arm: golden_gate(rig, arm, options)
    return lambda rig, arm: GateAnswer(GateState.GREEN, "golden: checked before the first run")


class Counted:
    """Progress over all runs: slots of the run at hand, counted among those of all runs; chatter of the first only."""

    def __init__(self, bar: "Progress", calibration: Calibration) -> None:
        self.bar = bar
        self.calibration = calibration
        self.first = calibration.done
        self.begun_s = time.monotonic()

    def begin(self) -> None:
        """A run begins."""
        done, runs = self.calibration.done, self.calibration.runs
        mean_s = (time.monotonic() - self.begun_s) / max(done - self.first, 1)
        left = f", about {mean_s * (runs - done) / 60:.1f} min left" if done > self.first else ""
        self.bar.say(f"run {done + 1} of {runs}{left}")

    def say(self, text: str) -> None:
        if self.calibration.done == self.first:
            self.bar.say(text)

    def slot_done(self, done: "Done") -> None:
        total = done.total
        ahead = self.calibration.runs - self.calibration.done - 1
        # by whole runs: each warms up before its slots, which a mean over the first few slots would count for every one
        run_s = (time.monotonic() - self.begun_s + done.left_s) / (self.calibration.done - self.first + 1)
        slots = self.calibration.done * total + done.slots
        left_s = done.left_s + ahead * run_s
        self.bar.slot_done(replace(done, slots=slots, total=self.calibration.runs * total, left_s=left_s))


def show(calibration: Calibration, as_json: bool) -> None:
    """Summary on stdout."""
    from pocketllm.bench.analysis.calibration import summarize

    summary = summarize(calibration.rows)
    if as_json:
        from pocketllm.evidence.schema import plain

        write_json(plain({"runs": calibration.done, "summary": summary, "rows": calibration.rows}))
        return
    for entry in summary:
        for line in lines_of(entry):
            typer.echo(line)


def lines_of(entry: dict[str, Any]) -> list[str]:
    """One metric's summary for people."""

    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.2%}".replace("%", " %")

    lines = [f"{entry['metric']}: {entry['runs']} A/A runs of {entry['n'] or 0:g} observations"]
    if entry["primary"]:
        words = ", ".join(f"{count} {word}" for word, count in entry["words"].items())
        lines += [
            f"  false calls: {entry['called']} of {entry['judged']} verdicts, so at most "
            f"{percent(entry['called_at_most'])} (95 %); {entry['invalid']} INVALID",
            f"  verdicts: {words}; 95 % intervals without 1: {entry['excluding']}",
        ]
    return [
        *lines,
        f"  noise floor (90 % of nulls): {percent(entry['floor'])}; largest difference: {percent(entry['largest'])}",
        f"  smallest change found with 80 % power: {percent(entry['mde'])}, margin {percent(entry['margin'])}",
    ]
