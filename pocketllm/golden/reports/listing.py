"""What is recorded: all cases of a checkpoint at a glance, or one of them position by position; judges nothing."""

from typing import TYPE_CHECKING, Any

from pocketllm.golden.compare import drift_limit, tau
from pocketllm.golden.files.document import answer_document, case_document
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import Answer, Case

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from pocketllm.golden.judging.words import TokenText


def as_json(folder: FixtureFolder, cases: list[Case]) -> list[dict[str, Any]]:
    """Cases with all their answers, as their files have them."""
    return [
        {**case_document(case), "answers": [answer_document(answer) for answer in folder.answers(case.name)]}
        for case in cases
    ]


def show_all(folder: FixtureFolder, cases: list[Case], console: "Console") -> None:
    """A line for each answer of each case."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("case", "answer for", "ends"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for title in ("out", "margin", "τ", "floor p99"):
        table.add_column(title, justify="right")
    for case in cases:
        answers: list[Answer | None] = [*folder.answers(case.name)]
        for answer in answers or [None]:
            table.add_row(case.name, *_cells(answer))
    console.print(table)
    for file in folder.stale():
        console.print(f"STALE {file.path.name}: {file.outcome.reason}", style="yellow")
    if pending := folder.pending_names():
        console.print(f"proposed, not accepted: {', '.join(pending)}; see `pocketllm golden review`", style="yellow")


def _cells(answer: Answer | None) -> tuple[str, ...]:
    if answer is None:
        return ("nothing recorded", "", "", "", "", "")
    margin = f"{answer.smallest_margin:.3f}" if answer.positions else "unknown"
    expected, noise = answer.expected, answer.noise
    return (
        answer.hard_key.label,
        expected.finish_reason,
        str(expected.num_output_tokens),
        margin,
        f"{tau(noise):.2g}",
        f"{noise.floor.p99:.2g}",
    )


def show_one(folder: FixtureFolder, case: Case, token_text: "TokenText", console: "Console") -> None:
    """A case in full, and each of its answers: text, noise, provenance, and every position."""
    from rich.text import Text

    console.print(Text(f"{case.name}: {case.purpose}", "bold"))
    for message in case.messages:
        console.print(Text(f"  {message['role']}: {message['content']}"))
    if case.prompt:
        console.print(Text(f"  prompt: {case.prompt}"))
    sampling = ", ".join(f"{key}={value}" for key, value in case.sampling.items())
    console.print(Text(f"  {sampling}; {len(case.prompt_token_ids)} prompt tokens"))
    console.print(Text(f"  {', '.join(map(str, case.paths))}"))
    for answer in folder.answers(case.name):
        console.print(Text(f"\n{answer.hard_key.label}", "bold"), answer_table(answer, token_text))
        for line in answer_facts(answer):
            console.print(Text("  " + line))


def answer_facts(answer: Answer) -> list[str]:
    """Text, noise and provenance in lines."""
    noise, limit = answer.noise, drift_limit(answer.noise)
    bits = "bit-identical" if noise.is_bit_identical else "not equal in bits"
    lines = [
        f"text {answer.expected.text!r}, ends by {answer.expected.finish_reason}",
        f"{noise.repeats} repeats {bits}; noise p99 {noise.floor.p99:.2g} nat over {', '.join(noise.variations)}",
        f"a tie up to {tau(noise):.2g} nat, a drift beyond {limit.mean:.2g} on average or {limit.p99:.2g} at p99",
    ]
    if noise.reference:
        lines.append(f"{noise.reference.p99:.2g} nat from the reference backend at p99")
    lines += [f"{key} {value}" for key, value in {**answer.soft, **answer.provenance}.items() if value is not None]
    return lines


def answer_table(answer: Answer, token_text: "TokenText") -> "RenderableType":
    """Position, token, logprob, margin, and what came second."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("", justify="right")
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=30)
    for title in ("logprob", "margin"):
        table.add_column(title, justify="right")
    table.add_column("before", no_wrap=True, overflow="ellipsis", max_width=30)
    for index, position in enumerate(answer.positions):
        chosen = answer.expected.token_ids[index]
        second = next((one for one in position.top_ids if one != chosen), None)
        table.add_row(
            str(index),
            f"{chosen} {token_text(chosen)!r}",
            f"{position.logprob:.3f}",
            f"{position.margin:.3f}",
            "" if second is None else f"{second} {token_text(second)!r}",
        )
    return table
