"""What a golden record proves: which cases a model must answer, in which ways, and what a record lacks of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.errors import RecordError

Row = Mapping[str, Any]
Case = Mapping[str, Any]
PASSED = frozenset({"IDENTICAL", "TIE"})
PREFILL_CHUNK = 256
"""Tokens of a prompt past which it is computed in several pieces, by default."""
DECODE_STEPS = 64


@dataclass(frozen=True)
class Suite:
    """The accepted cases of one model."""

    pairs: frozenset[tuple[str, str]] = frozenset()
    """(case, entry point) pairs."""
    lacks: tuple[str, ...] = ()
    """Kinds of case that every suite has and this one has not."""


NO_SUITE = Suite()


# -- the fixtures of a model -------------------------------------------------------------------------------------------
def is_beyond_ascii(case: Case) -> bool:
    """Whether a prompt has other letters than ASCII's."""
    texts = [case.get("prompt"), *(message.get("content") for message in case.get("messages") or ())]
    return any(isinstance(text, str) and not text.isascii() for text in texts)


def is_sampled(case: Case) -> bool:
    """Whether a case draws, from a seed that it names."""
    return bool(sampling(case).get("temperature")) and sampling(case).get("seed") is not None


def sampling(case: Case) -> Mapping[str, Any]:
    """A case's sampling parameters."""
    found = case.get("sampling")
    return found if isinstance(found, Mapping) else {}


PARTS: Mapping[str, Callable[[Case], bool]] = {
    "a prompt of several prefill chunks": lambda case: len(case.get("prompt_token_ids") or ()) > PREFILL_CHUNK,
    "text beyond ASCII": is_beyond_ascii,
    "a stop string": lambda case: bool(sampling(case).get("stop")),
    f"{DECODE_STEPS} decode steps": lambda case: int(sampling(case).get("max_tokens") or 0) >= DECODE_STEPS,
    "a sampled case with a seed": is_sampled,
}
"""Kinds of case that no suite may leave out."""
SECOND_TURN = "a second turn"


def suites_of(records: Path) -> dict[str, Suite]:
    """The suite of each model that has fixtures under a `records/` folder, by the model's name.

    Raises RecordError for a case file that cannot be read.
    """
    found: dict[str, list[Case]] = {}
    for path in sorted((records / "fixtures").glob("*/*.json")):
        case = read_case(path)
        if case.get("paths"):
            found.setdefault(path.parent.name, []).append(case)
    return {model: suite_of(cases) for model, cases in found.items()}


def unanswered(records: Path, model: str, backend: str | None, numerics: str) -> list[str]:
    """Cases of a model that have no kept answer by this backend's arithmetic: nothing here could be compared with it.

    Raises RecordError for a file that cannot be read.
    """
    cases, answered = set(), set()
    for path in sorted((records / "fixtures" / model).glob("*.json")):
        found = read_case(path)
        key = found.get("hard_key")
        if found.get("paths"):
            cases.add(str(found.get("case")))
        elif isinstance(key, Mapping) and (key.get("backend"), key.get("numerics_version")) == (backend, numerics):
            answered.add(str(found.get("case")))
    return sorted(cases - answered)


def suite_of(cases: Sequence[Case]) -> Suite:
    """What these cases ask, and what they leave out."""
    pairs = {(str(case.get("case")), entry_point(str(way))) for case in cases for way in case.get("paths") or ()}
    lacks = [part for part, is_one in PARTS.items() if not any(is_one(case) for case in cases)]
    chats = [case["messages"] for case in cases if case.get("messages")]
    if chats and not any(len(messages) > 2 for messages in chats):
        lacks.append(SECOND_TURN)
    return Suite(frozenset(pairs), tuple(lacks))


def read_case(path: Path) -> Case:
    """One JSON file of a fixture folder; answers (which have no `paths`) are read too and say nothing here."""
    try:
        case = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the fixture {path.name}: {error}") from error
    if not isinstance(case, dict):
        raise RecordError(f"the fixture {path.name} is not a JSON object")
    return case


def entry_point(way: str) -> str:
    """The entry point of a way of asking.

    >>> [entry_point(way) for way in ("generate", "http_chat:stream@2")]
    ['generate', 'http_chat']
    """
    return way.partition("@")[0].partition(":")[0]


# -- the rows of a golden record ---------------------------------------------------------------------------------------
def suite_lacks(rows: Sequence[Row], suite: Suite, entry_points: Sequence[str]) -> list[str]:
    """Cases of the suite that a record does not prove through every one of these entry points they are asked by."""
    passed = {(row.get("case"), row.get("entry_point")) for row in rows if row.get("outcome") in PASSED}
    return sorted({case for case, way in suite.pairs if way in entry_points and (case, way) not in passed})


def proves_generate(rows: Sequence[Row]) -> bool:
    """Whether a golden record has rows through `generate` and all of them passed."""
    outcomes = [row.get("outcome") for row in rows if row.get("entry_point") == "generate" and is_tokens(row)]
    return bool(outcomes) and PASSED.issuperset(outcomes)


def is_tokens(row: Row) -> bool:
    """Whether a golden row compares tokens; an unnamed check does."""
    return row.get("check") in (None, "tokens")


def is_http(row: Row) -> bool:
    """Whether a golden row came through a server."""
    return str(row.get("entry_point")).startswith("http_")


HTTP_WAYS: Mapping[str, Callable[[Row], bool]] = {
    "tokens without streaming": lambda row: is_tokens(row) and row.get("stream") is False,
    "tokens streamed": lambda row: is_tokens(row) and row.get("stream") is True,
    "tokens at concurrency 2": lambda row: is_tokens(row) and (row.get("concurrency") or 1) >= 2,
    "cancel": lambda row: row.get("check") == "cancel",
    "shutdown": lambda row: row.get("check") == "shutdown",
}
"""What a golden record must have passed through HTTP, each by the rows that speak of it."""


def http_lacks(rows: Sequence[Row]) -> list[str]:
    """Which ways of HTTP a golden record does not prove: no row speaks of it, or one that does has not passed."""
    served = [row for row in rows if is_http(row)]
    outcomes = {way: [row.get("outcome") for row in served if speaks(row)] for way, speaks in HTTP_WAYS.items()}
    return [way for way, found in outcomes.items() if not found or not PASSED.issuperset(found)]
