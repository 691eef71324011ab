"""From a verification to what a person or a program reads; judges nothing."""

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pocketllm.golden.compare import Identical, NotJudged, Outcome, Regression, Unrecorded
from pocketllm.golden.verify import Report, Row, describe

if TYPE_CHECKING:
    from rich.console import Console

    from pocketllm.golden.subject import Subject

STYLES = {"IDENTICAL": "green", "REGRESSION": "bold red", "UNRECORDED": "yellow", "NOT JUDGED": "magenta"}


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as one JSON-able document; an infinite regret is null, and the detail says so."""
    return {
        "model": report.subject.model["name"],
        "hard_key": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(report.subject.hard_key).items()
        },
        "mutate": report.mutate,
        "counts": dict(Counter(row.outcome.word for row in report.rows)),
        "rows": [_json_row(row) for row in report.rows],
        "notes": list(report.notes),
        "record": str(report.record) if report.record else None,
        "exit_code": report.exit_code,
    }


def _json_row(row: Row) -> dict[str, Any]:
    outcome, told = row.outcome, row.outcome if isinstance(row.outcome, Regression) else None
    return {
        "case": row.case,
        "path": str(row.path),
        "check": row.check,
        "outcome": outcome.word,
        "what": told.what if told else None,
        "position": told.position if told else None,
        "expected": told.expected if told else None,
        "got": told.got if told else None,
        "margin": told.margin if told else None,
        "regret": told.regret if told and told.regret is not None and math.isfinite(told.regret) else None,
        "detail": describe(outcome),
        "n_out": row.observed.num_output_tokens,
        "e2el_s": row.observed.e2el_s,
    }


def headline(report: Report) -> str:
    """One sentence: what was found, and on what."""
    counts = Counter(row.outcome.word for row in report.rows)
    found = ", ".join(f"{counts[word]} {word}" for word in STYLES if counts[word]) or "NOTHING COMPARED"
    mutated = f" (one {report.mutate} of each case changed on purpose: red is right)" if report.mutate else ""
    return f"{report.subject.name} on {report.subject.hard_key.label}: {found}{mutated}"


def show(report: Report, console: "Console | None" = None) -> None:
    """Print the table, then a paragraph for everything that did not come back identical; readable in 80 columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
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
        if row.outcome != Identical("ids"):
            name = str(row.path) if row.check == "tokens" else row.check
            found.setdefault((row.case, row.outcome), []).append(name)
    return found


def explain(outcome: Outcome, token_text: Callable[[int], str], cause: str = "") -> str:
    """An outcome with its tokens as text: first divergence, the recorded lead there, and what the other choice cost."""
    if isinstance(outcome, Unrecorded):
        return f"{outcome.reason}; `pocketllm golden record` proposes one"
    if not isinstance(outcome, Regression):
        return describe(outcome)
    parts = [outcome.what]
    if outcome.position is not None:
        parts[0] += f" at {outcome.position}: expected {_token(outcome.expected, token_text)}"
        parts[0] += f", served {_token(outcome.got, token_text)}"
    if outcome.margin is not None:
        parts.append(f"recorded lead of the most likely token {outcome.margin:.3f} nat")
    if outcome.regret is not None:
        is_far = math.isinf(outcome.regret)
        parts.append("served token outside the recorded top" if is_far else f"regret {outcome.regret:.3f} nat")
    if outcome.detail:
        parts.append(outcome.detail)
    if outcome.what == "prompt ids" and cause:
        parts.append(cause)
    return "; ".join(parts)


def _token(token_id: int | None, token_text: Callable[[int], str]) -> str:
    return "the end" if token_id is None else f"{token_id} {token_text(token_id)!r}"


def prompt_cause(report: Report, name: str) -> str:
    """Why prompt ids may differ: another template, or the same one and another tokenizer."""
    template = report.fixtures.case(name).template_sha256
    if template is None:
        return "no template is involved: the tokenizer, or how the server uses it, has changed"
    if template != report.subject.model["template_sha256"]:
        return "the checkpoint's chat template is another one than the recorded one"
    return "the chat template is the recorded one: its rendering or the tokenizer has changed"


def _token_text(report: Report) -> Callable[[int], str]:
    """Text of a token id, by the checkpoint's own tokenizer; opened only where something has to be explained."""
    if not any(isinstance(row.outcome, Regression) and row.outcome.position is not None for row in report.rows):
        return str
    tokenizer = open_tokenizer(report.subject)
    size = tokenizer.vocab_size
    return lambda token_id: str(tokenizer.token_text(token_id)) if token_id < size else "outside the vocabulary"


def open_tokenizer(subject: "Subject") -> Any:
    """The tokenizer of a checkpoint, from its metadata."""
    from pocketllm.engine.text.tokenizer import Tokenizer
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    if subject.engine is not None:
        return subject.engine.tokenizer
    checkpoint = open_checkpoint(subject.path)
    try:
        return Tokenizer.from_metadata(checkpoint.metadata)
    finally:
        checkpoint.close()
