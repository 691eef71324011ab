"""From a verification to what a person or a program reads; judges nothing."""

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pocketllm.golden.compare import WORDS, Diverged, Drift, Identical, NotJudged, Outcome, Regression, Stale
from pocketllm.golden.files.folder import CHANGED
from pocketllm.golden.judging.judge import Row
from pocketllm.golden.judging.words import TokenText, describe, explain
from pocketllm.golden.reports.console import open_console
from pocketllm.golden.verify import Report, place_of

if TYPE_CHECKING:
    from rich.console import Console

STYLES = dict(zip(WORDS, ("green", "cyan", "bold red", "red", "red", "yellow", "magenta", "yellow"), strict=True))


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as one JSON-able document; an infinite regret is null, and the detail says so."""
    return {
        "model": report.subject.model["name"],
        "hard_key": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(report.subject.hard_key).items()
        },
        "mutate": report.mutate,
        "counts": dict(Counter(outcome.word for outcome in report.outcomes)),
        "rows": [_json_row(row) for row in report.rows],
        "stale": [{"file": file.path.name, "reason": file.outcome.reason} for file in report.stale],
        "notes": list(report.notes),
        "record": str(report.record) if report.record else None,
        "exit_code": report.exit_code,
    }


def _json_row(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    told = outcome if isinstance(outcome, Regression | Diverged) else None
    position, margin, regret = place_of(outcome)
    shift = outcome.shift if isinstance(outcome, Drift) else row.shift
    return {
        "case": row.case,
        "path": str(row.path),
        "check": row.check,
        "outcome": outcome.word,
        "what": outcome.what if isinstance(outcome, Regression) else None,
        "position": position,
        "expected": told.expected if told else None,
        "got": told.got if told else None,
        "margin": margin,
        "regret": regret if regret is not None and math.isfinite(regret) else None,
        "dlogprob_mean": shift.mean if shift else None,
        "dlogprob_p99": shift.p99 if shift else None,
        "detail": describe(outcome),
        "n_out": row.observed.num_output_tokens,
        "n_cached": row.observed.num_cached_tokens,
        "e2el_s": row.observed.e2el_s,
    }


def headline(report: Report) -> str:
    """One sentence: what was found, and on what."""
    counts = Counter(outcome.word for outcome in report.outcomes)
    found = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    found = found if report.rows else "NOTHING COMPARED" + (f", {found}" if found else "")
    mutated = f" (one {report.mutate} of each case changed on purpose: red is right)" if report.mutate else ""
    return f"{report.subject.name} on {report.subject.hard_key.label}: {found}{mutated}"


def show(report: Report, console: "Console | None" = None) -> None:
    """Print the table, then a paragraph for everything that did not come back identical; readable in 80 columns."""
    from rich.table import Table
    from rich.text import Text

    console = console or open_console()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("case", "path", "check", "outcome"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    table.add_column("out", justify="right")
    table.add_column("s", justify="right")
    for row in report.rows:
        seconds = row.observed.e2el_s
        table.add_row(
            row.case,
            str(row.path),
            row.check,
            Text(row.outcome.word, STYLES[row.outcome.word]),
            str(row.observed.num_output_tokens or ""),
            f"{seconds:.1f}" if seconds is not None else "",
        )
    if report.rows:
        console.print(table)
    token_text = _token_text(report)
    for (case, outcome), names in grouped(report.rows).items():
        cause = prompt_cause(report, case) if isinstance(outcome, Regression) else ""
        console.print(Text(f"\n{case}: {', '.join(names)}", STYLES[outcome.word]), highlight=False)
        for line in Text(explain(outcome, token_text, cause)).wrap(console, console.width - 2):
            line.rstrip()
            console.print(Text("  ").append_text(line), highlight=False)
    for file in report.stale:
        console.print(Text(f"\nSTALE {file.path.name}: {file.outcome.reason}; `golden prune` deletes it", "yellow"))
    for note in report.notes:
        console.print(Text("\n" + note, "yellow"))
    console.print(Text("\n" + headline(report), "bold"), highlight=False)
    if report.record is not None:
        console.print(f"record: {report.record}", highlight=False, soft_wrap=True)


def grouped(rows: tuple[Row, ...]) -> dict[tuple[str, Outcome], list[str]]:
    """Paths of what is not identical: an entry for a finding of a case, or one in all when nothing could be judged."""
    found: dict[tuple[str, Outcome], list[str]] = {}
    outcomes = {row.outcome for row in rows}
    if len(outcomes) == 1 and isinstance(rows[0].outcome, NotJudged):
        return {("all cases", rows[0].outcome): list(dict.fromkeys(str(row.path) for row in rows))}
    for row in rows:
        if row.outcome not in (Identical("ids"), Identical("scores")):
            name = str(row.path) if row.check == "tokens" else f"{row.path} {row.check}"
            found.setdefault((row.case, row.outcome), []).append(name)
    return found


def prompt_cause(report: Report, name: str) -> str:
    """Why prompt ids may differ: an edited case, another template, or the same one and another tokenizer."""
    if any(file.outcome == Stale(CHANGED) and file.path.name.startswith(f"{name}.") for file in report.stale):
        return f"{CHANGED}: undo that, or record it again"
    template = report.fixtures.case(name).template_sha256
    if template is None:
        return "no template is involved: the tokenizer, or how the server uses it, has changed"
    if template != report.subject.model["template_sha256"]:
        return "the checkpoint's chat template is another one than the recorded one"
    return "the chat template is the recorded one: its rendering or the tokenizer has changed"


def _token_text(report: Report) -> TokenText:
    """Text of a token id, by the checkpoint's own tokenizer; made only where something has to be explained."""
    told = [row.outcome for row in report.rows if isinstance(row.outcome, Regression | Diverged)]
    return report.subject.prompts.token_text if any(one.position is not None for one in told) else str
