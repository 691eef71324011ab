"""What a reviewer sees of one proposal: the first divergence aligned, as tokens and as text, and what it cost."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pocketllm.golden.compare import first_difference, first_divergence, tau
from pocketllm.golden.files.document import case_document
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import Answer, Case, HardKey
from pocketllm.golden.judging.words import TokenText, token

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BEFORE, AFTER = 3, 4
"""Positions shown around the first divergence."""
BAR_WIDTH = 24
BAR_FULL_NAT = 1.0
TEXT_BEFORE, TEXT_AFTER = 60, 120


@dataclass(frozen=True)
class Proposed:
    """One pending answer beside the accepted one of the same device, where there is one."""

    case: Case
    old_case: Case | None
    new: Answer
    old: Answer | None

    @property
    def position(self) -> int | None:
        """First output position whose token differs; None where none does, or there is nothing to compare with."""
        if self.old is None:
            return None
        return first_difference(self.old.expected.token_ids, self.new.expected.token_ids)


def proposals(folder: FixtureFolder, key: HardKey) -> list[Proposed]:
    """What is pending for this hard key's device, by case; RecordError for a broken file."""
    found = []
    for name in folder.pending_names():
        new = folder.pending_answer(name, key)
        if new is None:
            continue
        old_case = folder.case(name) if name in folder.names() else None
        case = folder.pending_case(name) or old_case
        if case is not None:
            found.append(Proposed(case, old_case, new, folder.answer_on(name, key)))
    return found


def sentence(proposed: Proposed) -> str:
    """What the proposal changes, in one sentence."""
    old, new = proposed.old, proposed.new
    if old is None:
        return f"first answer for {new.hard_key.label}"
    found = first_divergence(old, new.expected.token_ids, proposed.case.is_greedy)
    if found is None:
        same_end = (old.expected.text, old.expected.finish_reason) == (new.expected.text, new.expected.finish_reason)
        return "the same tokens" if same_end else "the same tokens, another text or ending"
    limit = tau(old.noise)
    cost = (found.margin, found.regret)
    if all(value is not None and value <= limit for value in cost):
        return f"tokens differ from {found.position} on; there the record calls both as likely: a tie"
    return f"tokens differ from {found.position} on"


def page(proposed: Proposed, token_text: TokenText) -> "RenderableType":
    """All of it, top to bottom; readable in 80 columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(sentence(proposed), "bold")]
    if proposed.case.purpose:
        parts.append(Text(proposed.case.purpose, "dim"))
    changed = list(request_changes(proposed))
    if changed:
        parts += [Text("\nthe request was changed", "bold yellow"), *(Text("  " + line) for line in changed)]
    parts += [
        Text(""),
        tokens(proposed, token_text),
        Text(""),
        *texts(proposed),
        Text(""),
        *costs(proposed, token_text),
    ]
    parts += [Text("\nfingerprint", "bold"), *(Text("  " + line) for line in fingerprint(proposed))]
    return Group(*parts)


def request_changes(proposed: Proposed) -> Iterator[str]:
    """Keys of the case file that the proposal changes."""
    if proposed.old_case is None:
        return
    was, now = case_document(proposed.old_case), case_document(proposed.case)
    for key in dict.fromkeys([*was, *now]):
        if was.get(key) != now.get(key):
            yield f"{key}: {was.get(key)!r:.60} → {now.get(key)!r:.60}"


def tokens(proposed: Proposed, token_text: TokenText) -> "RenderableType":
    """Accepted and proposed tokens side by side around the first divergence, each with its lead there."""
    from rich.table import Table

    at = proposed.position
    first = max(0, (at or 0) - BEFORE)
    length = max(len(answer.expected.token_ids) for answer in (proposed.old, proposed.new) if answer)
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("", justify="right")
    for title in ("accepted", "proposed"):
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=26)
        table.add_column("lead", justify="right")
    for index in range(first, min(length, first + BEFORE + AFTER + 1)):
        cells = [cell for answer in (proposed.old, proposed.new) for cell in token_cells(answer, index, token_text)]
        table.add_row(f"▶ {index}" if index == at else str(index), *cells, style="bold red" if index == at else "")
    return table


def token_cells(answer: Answer | None, index: int, token_text: TokenText) -> tuple[str, str]:
    """A token and its lead over the next, of one side."""
    if answer is None:
        return "", ""
    ids = answer.expected.token_ids
    if index >= len(ids):
        return ("the end" if index == len(ids) else ""), ""
    lead = f"{answer.positions[index].margin:.3f}" if answer.positions else ""
    return token(ids[index], token_text), lead


def texts(proposed: Proposed) -> Iterator["Text"]:
    """Both texts from a little before where they part."""
    new = proposed.new.expected.text
    old = proposed.old.expected.text if proposed.old else None
    at = first_difference(old, new) if old is not None else 0
    for name, text in (("accepted", old), ("proposed", new)):
        if text is not None:
            yield text_line(name, text, len(text) if at is None else at)


def text_line(name: str, text: str, at: int) -> "Text":
    """One text, marked from where it parts from the other."""
    from rich.text import Text

    first, last = max(0, at - TEXT_BEFORE), at + TEXT_AFTER
    line = Text(f"{name}  ", "bold").append("…" * (first > 0) + escaped(text[first:at]), "not bold")
    return line.append(escaped(text[at:last]) + "…" * (len(text) > last), "not bold red")


def escaped(text: str) -> str:
    """A text in one line, with what a terminal would act on spelled out."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def costs(proposed: Proposed, token_text: TokenText) -> Iterator["Text"]:
    """Margin and regret at the divergence as bars, against what counts as a tie."""
    from rich.text import Text

    if proposed.old is None:
        yield bar("margin", proposed.new.smallest_margin, "the smallest lead of the proposed answer")
        return
    found = first_divergence(proposed.old, proposed.new.expected.token_ids, proposed.case.is_greedy)
    if found is None:
        yield Text("no token differs: nothing was given up")
        return
    limit = f"a tie up to {tau(proposed.old.noise):.2g} nat"
    if found.margin is not None:
        yield bar("margin", found.margin, f"the recorded lead of {token(found.expected, token_text)}; {limit}")
    if found.regret is not None:
        yield bar("regret", found.regret, f"what {token(found.got, token_text)} gave up by the record")


def bar(name: str, value: float, meaning: str) -> "Text":
    """A value in nat as a bar that is full at BAR_FULL_NAT; infinite: the token is outside the recorded ones."""
    from rich.text import Text

    filled = BAR_WIDTH if math.isinf(value) else min(BAR_WIDTH, round(BAR_WIDTH * max(value, 0.0) / BAR_FULL_NAT))
    number = "outside the recorded top" if math.isinf(value) else f"{value:.4f} nat"
    line = Text(f"{name:7}", "bold").append("█" * filled, "red").append("░" * (BAR_WIDTH - filled), "dim")
    return line.append(f" {number}", "bold").append(f"  {meaning}", "not bold dim")


def fingerprint(proposed: Proposed) -> Iterator[str]:
    """What differs between how both were made; of a first answer, how it was."""
    new, old = facts(proposed.new), facts(proposed.old) if proposed.old else None
    if old is None:
        yield from (f"{key} {value}" for key, value in new.items() if value not in (None, ""))
        return
    changed = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    if not changed:
        yield "both were made alike"
    yield from (f"{key} {short(old.get(key))} → {short(new.get(key))}" for key in changed)


def facts(answer: Answer) -> Mapping[str, Any]:
    """Hard key, soft facts, noise and provenance of an answer in one mapping."""
    noise = answer.noise
    return {
        **{key: "+".join(value) if isinstance(value, tuple) else value for key, value in vars(answer.hard_key).items()},
        **answer.soft,
        "noise p99": noise.floor.p99,
        "repeats": f"{noise.repeats} {'bit-identical' if noise.is_bit_identical else 'not equal in bits'}",
        **{key: value for key, value in answer.provenance.items() if key not in ("reason", "command")},
    }


def short(value: Any) -> str:
    """A value for one line; a digest by its beginning."""
    text = str(value)
    return text[:12] if len(text) in (40, 64) and " " not in text else text
