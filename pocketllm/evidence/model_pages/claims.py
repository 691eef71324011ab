"""Pages held against the records: a rung that is not proved, and a generated part that says something else; pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pocketllm.evidence.ladder import WORDS
from pocketllm.evidence.model_pages import PARTS, generated_parts
from pocketllm.evidence.model_pages.source import EVERY_MODEL, Source

SPOKEN = re.compile(r"\brung\s+(\d)\b", re.IGNORECASE)
TABULATED = re.compile(r"^\|\s*\[?`?([^|`\]]+?)`?(?:\]\([^)]*\))?\s*\|[^|]*\|\s*([\w-]+)\s*\|\s*(\d) ")
DEFINITION = re.compile(r"^\| \d [a-z]")
"""A line of a table that says what a rung is."""
WORDED = {words: rung for rung, words in enumerate(WORDS) if rung >= 3}
"""Rungs whose words mean nothing else in a sentence."""


@dataclass(frozen=True)
class Overclaim:
    """A line of a page that says more than the records prove."""

    page: str
    line: int
    claimed: int
    proved: int
    model: str

    def __str__(self) -> str:
        return (
            f"{self.page}:{self.line}: claims rung {self.claimed} ({words(self.claimed)}) for {self.model}, "
            f"records prove {self.proved} ({words(self.proved)})"
        )


@dataclass(frozen=True)
class Discrepancy:
    """A line of a generated part that the records do not give."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return (
            f"{self.page}:{self.line}: the records do not say {self.text!r}; write it anew with `pocketllm models docs`"
        )


def words(rung: int) -> str:
    """A rung's words."""
    return WORDS[rung] if rung < len(WORDS) else "no such rung"


def overclaims(page: str, text: str, source: Source) -> Iterator[Overclaim]:
    """Every `rung N` in a page, every ladder table row and every rung's own words, that claims more than is proved.

    A table row speaks of its own model and device. Prose speaks of the model the page is named after; on a page of no
    model (an index) of the best one there is.
    """
    rows = source.whole_ladder()
    named = page.removesuffix(".md")
    subject = named if source.rows_of(named) else EVERY_MODEL
    for place, line in enumerate(text.splitlines(), 1):
        tabulated = [(model, device, int(rung)) for model, device, rung in TABULATED.findall(line)]
        spoken = {int(match) for match in SPOKEN.findall(line)}
        if not tabulated and not DEFINITION.match(line):
            spoken |= {rung for told, rung in WORDED.items() if told in line}
        for model, device, claimed in (*((subject, None, rung) for rung in sorted(spoken)), *tabulated):
            matching = [row for row in rows if source.is_model(model, row.sha256, row.model)]
            proved = max((row.rung for row in matching if device in (None, row.device_class)), default=0)
            if claimed > proved:
                who = "any model" if model == EVERY_MODEL else f"{model} on {device}" if device else model
                yield Overclaim(page, place, claimed, proved, who)


def discrepancies(page: str, text: str, source: Source) -> Iterator[Discrepancy]:
    """Lines of generated parts that a part written from the records would not have."""
    for (what, model), lines in generated_parts(text).items():
        given = set(PARTS[what](model, source)) if what in PARTS else set()
        for place, line in lines:
            if line not in given:
                yield Discrepancy(page, place, line)
