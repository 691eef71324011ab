"""The pages under docs/models/ and the README: tables written from records, and claims held against them; pure.

A generated part stands between two markers and is replaced as a whole:

    <!-- generated: ladder smollm2-135m -->        (ladder or performance; a model's name, or * for all of them)
    <!-- end -->
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import RecordError
from pocketllm.evidence.ladder import WORDS, Evidence, LadderRow

BEGIN = re.compile(r"^<!-- generated: (\w+) (\S+) -->$")
END = "<!-- end -->"
MARKER = re.compile(r"^<!-- (generated|end)\b")
SPOKEN = re.compile(r"\brung\s+(\d)\b", re.IGNORECASE)
TABULATED = re.compile(r"^\|\s*`?([^|`]+?)`?\s*\|[^|]*\|\s*([\w-]+)\s*\|\s*(\d) ")
EVERY_MODEL = "*"
NO_RECORDS = "No records yet: nothing is claimed."
LADDER_HEAD = (
    "| model | architecture | device | rung | next rung lacks | records |\n| --- | --- | --- | --- | --- | --- |"
)
SPEED_HEAD = (
    "| measured | arm | tokens/s | time against the baseline (95 %) | verdict | record |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Source:
    """What pages are written from. `pinned` is the sha256 of each model that the catalog knows by name.

    `root` leads from the page to the repository: links to records start there.
    """

    rows: Sequence[LadderRow]
    evidence: Sequence[Evidence]
    pinned: Mapping[str, str]
    root: str = "../../"

    def link(self, path: str, run_id: str) -> str:
        """A Markdown link to a record."""
        return f"[{run_id[:12]}]({self.root}records/{path})"

    def name_of(self, sha256: str, name: str) -> str:
        """The catalog's name of these weights, else the one the records use."""
        return next((known for known, pin in self.pinned.items() if pin == sha256), name)

    def is_model(self, wanted: str, sha256: str, name: str) -> bool:
        """Whether weights are the model of that name: by digest where the catalog pins one."""
        return wanted == EVERY_MODEL or (sha256 == self.pinned[wanted] if wanted in self.pinned else name == wanted)

    def whole_ladder(self) -> list[LadderRow]:
        """All rows under the catalog's names, then catalog models that no record speaks of, as unproven."""
        found = [row.renamed(self.name_of(row.sha256, row.model)) for row in self.rows]
        seen = {row.sha256 for row in found}
        return found + [LadderRow.unproven(name, pin) for name, pin in self.pinned.items() if pin not in seen]


# -- writing -----------------------------------------------------------------------------------------------------------
def regenerate(page: str, text: str, source: Source) -> str:
    """A page's text with every generated part written anew; RecordError when its markers do not pair."""
    lines: list[str] = []
    inside: str | None = None
    for place, line in enumerate(text.splitlines(), 1):
        begin = BEGIN.match(line)
        if MARKER.match(line) and (bool(begin) == bool(inside) or not (begin or line == END)):
            raise RecordError(
                f"{page}:{place}: unexpected marker {line!r}: `generated: WHAT MODEL` and `end` take turns"
            )
        if begin:
            inside, model = begin.groups()
            if inside not in PARTS:
                raise RecordError(f"{page}:{place}: no generated part {inside!r}; known: {', '.join(PARTS)}")
            lines += [line, "", *PARTS[inside](model, source), ""]
        if line == END:
            inside = None
        if inside is None:
            lines.append(line)
    if inside:
        raise RecordError(f"{page}: the generated part {inside!r} has no {END!r}")
    return "\n".join(lines) + "\n"


def ladder_part(model: str, source: Source) -> Iterator[str]:
    """The ladder table of one model or of all; freshness is left to `pocketllm models`, for it changes by the day."""
    rows = source.whole_ladder()
    shown = [row for row in rows if source.is_model(model, row.sha256, row.model)]
    if not shown:
        yield NO_RECORDS
        return
    yield LADDER_HEAD
    for row in shown:
        links = ", ".join(dict.fromkeys(source.link(proof.path, proof.run_id) for proof in row.proofs))
        cells = (f"`{row.model}`", row.architecture, row.device_class, f"{row.rung} {row.words}", row.missing, links)
        yield "| " + " | ".join(cells) + " |"


def performance_part(model: str, source: Source) -> Iterator[str]:
    """Speeds and ratios from the newest valid bench record of each workload and set of arms."""
    newest: dict[str, Evidence] = {}
    for item in sorted(source.evidence, key=lambda item: item.run_id):
        facts = item.model
        ours = source.is_model(model, str(facts.get("sha256")), str(facts.get("name")))
        if item.kind == "bench" and item.document.get("valid") is True and ours and not is_staged(item.document):
            newest[workload(item.document)] = item
    if not newest:
        yield NO_RECORDS
        return
    yield SPEED_HEAD
    for item in newest.values():
        yield from speed_rows(item, source)
    yield ""
    for machine in dict.fromkeys(machine_line(item.document) for item in newest.values()):
        yield f"Measured on {machine}."


PARTS: Mapping[str, Callable[[str, Source], Iterator[str]]] = {"ladder": ladder_part, "performance": performance_part}


def is_staged(document: Mapping[str, Any]) -> bool:
    """Whether an arm was slowed on purpose: such a run tells of the instrument, not of the model."""
    return any((arm.get("options") or {}).get("test_step_delay") for arm in document.get("arms") or [])


def workload(document: Mapping[str, Any]) -> str:
    """What makes two bench runs comparable enough for the newer one to stand for both."""
    load = document.get("workload") or {}
    lengths = f"{load['n_prompt']} in / {load['n_out']} out" if {"n_prompt", "n_out"} <= set(load) else ""
    arms = "/".join(str(arm.get("name")) for arm in document.get("arms") or [])
    return f"{document.get('scenario')} {lengths} {arms} {'served' if document.get('served') else 'in process'}"


def speed_rows(item: Evidence, source: Source) -> Iterator[str]:
    """One table row for each metric and arm of a bench record."""
    document = item.document
    load = document.get("workload") or {}
    served_by = {arm.get("name"): arm.get("served_by") for arm in document.get("arms") or []}
    results = {(entry.get("metric"), entry.get("arm")): entry for entry in document.get("results") or []}
    lengths = f", {load['n_prompt']} in / {load['n_out']} out" if {"n_prompt", "n_out"} <= set(load) else ""
    for metric, arms in (document.get("medians") or {}).items():
        for arm, seconds in arms.items():
            entry = results.get((metric, arm), {})
            interval = f"{entry['ratio']:.3f}× ({entry['low']:.3f}–{entry['high']:.3f})" if entry.get("ratio") else "1"
            verdict = entry.get("verdict") or entry.get("role") or "baseline"
            who = f"{arm} ({served_by[arm]})" if served_by.get(arm) else arm
            record = source.link(item.path, item.run_id)
            cells = (f"{metric}{lengths}", who, f"{1 / seconds:.1f}", interval, verdict, record)
            yield "| " + " | ".join(cells) + " |"


def machine_line(document: Mapping[str, Any]) -> str:
    """The machine of a record in a few words."""
    hard = (document.get("machine") or {}).get("hard") or {}
    parts = [hard.get("cpu"), *(hard.get("gpus") or ())]
    parts += [f"{hard['cores_usable']} cores"] if "cores_usable" in hard else []
    parts += [f"{hard['memory_gib']} GiB"] if "memory_gib" in hard else []
    return ", ".join(str(part) for part in parts if part) or "a machine that could not be read"


# -- checking ----------------------------------------------------------------------------------------------------------
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


def words(rung: int) -> str:
    """A rung's words."""
    return WORDS[rung] if rung < len(WORDS) else "no such rung"


def overclaims(page: str, text: str, source: Source) -> Iterator[Overclaim]:
    """Every `rung N` in a page, and every ladder table row, that claims more than is proved.

    A table row speaks of its own model and device. `rung N` in prose speaks of the model the page is named after; on a
    page of no model (an index) of the best one there is.
    """
    rows = source.whole_ladder()
    named = page.removesuffix(".md")
    subject = named if any(source.is_model(named, row.sha256, row.model) for row in rows) else EVERY_MODEL
    for place, line in enumerate(text.splitlines(), 1):
        spoken = [(subject, None, int(match)) for match in SPOKEN.findall(line)]
        tabulated = [(model, device, int(rung)) for model, device, rung in TABULATED.findall(line)]
        for model, device, claimed in (*spoken, *tabulated):
            matching = [row for row in rows if source.is_model(model, row.sha256, row.model)]
            proved = max((row.rung for row in matching if device in (None, row.device_class)), default=0)
            if claimed > proved:
                who = "any model" if model == EVERY_MODEL else f"{model} on {device}" if device else model
                yield Overclaim(page, place, claimed, proved, who)
