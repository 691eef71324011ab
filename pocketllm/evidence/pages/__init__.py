"""From a record to text a person reads: lines of 80 columns, tables whole in a pipe; measures nothing."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pocketllm.evidence.device_class import recorded_device_class
from pocketllm.evidence.pages.layout import facts, join_pairs, number, printable, section, table
from pocketllm.evidence.pages.sections import SECTIONS
from pocketllm.evidence.store import LOCAL, Record

SHORT_SHA = 12
MIN_PREFIX = 10
"""Letters of an id that are its time."""


# -- the list ----------------------------------------------------------------------------------------------------------
def listing(records: Sequence[Record]) -> list[str]:
    """One line a record, oldest first: id prefix that names it, time, kind, where it lies, what came out."""
    length = prefix_length([record.run_id for record in records])
    rows = [
        (
            record.run_id[:length],
            str(record.document.get("started_utc", ""))[:16].replace("T", " "),
            record.kind,
            "local" if record.path.parent.name == LOCAL else "kept" if "year=" in str(record.path) else "",
            summary(record),
        )
        for record in records
    ]
    lines = table(("id", "started (UTC)", "kind", "where", "what came out"), rows, indent="")
    return [printable(line) for line in lines]


def prefix_length(ids: Sequence[str]) -> int:
    """Shortest prefix length, at least the time's letters, at which all ids differ."""
    longest = max((len(run_id) for run_id in ids), default=MIN_PREFIX)
    lengths = range(MIN_PREFIX, longest)
    return next((length for length in lengths if len({run_id[:length] for run_id in ids}) == len(set(ids))), longest)


def summary(record: Record) -> str:
    """What came out of a run, in a few words."""
    state = "" if record.complete else "incomplete: "
    name = model_of(record.document).get("name")
    return f"{state}{OUTCOMES[record.kind](record)}{f' ({name})' if name else ''}"


def bench_outcome(record: Record) -> str:
    """The verdict of every candidate, or INVALID with the rules that broke."""
    document = record.document
    scenario = str(document.get("scenario", "?"))
    if "valid" not in document:
        return f"{scenario}, no results"
    if not record.complete:
        return f"{scenario}, no verdict"
    if not document["valid"]:
        codes = [str(check.get("code")) for check in document.get("checks", []) if check.get("severity") == "run"]
        return f"{scenario} INVALID {' '.join(dict.fromkeys(codes))}".rstrip()
    results = [r for r in document.get("results", []) if r.get("verdict")]
    words = [f"{r['arm']} {r['verdict']}" + f" in {r['metric']}" * (r["metric"] != scenario) for r in results]
    return f"{scenario}: {', '.join(words) or 'no verdict'}"


def golden_outcome(record: Record) -> str:
    """How many rows had which outcome."""
    counts = Counter(row.get("outcome") or "?" for row in record.row_dicts)
    return ", ".join(f"{number} {word}" for word, number in sorted(counts.items())) or "nothing compared"


def parity_outcome(record: Record) -> str:
    """How many comparisons stayed inside their tolerance."""
    passed = sum(row.get("passed") is True for row in record.row_dicts)
    return f"{passed} of {len(record.row_dicts)} inside tolerance"


def inspect_outcome(record: Record) -> str:
    """How many errors an inspection found."""
    errors = (record.document.get("report") or {}).get("errors")
    return "not told" if errors is None else f"{len(errors) or 'no'} error{'s' * (len(errors) != 1)}"


def ladder_outcome(record: Record) -> str:
    """How many models a ladder speaks of."""
    return f"{len(record.row_dicts)} rows"


def calibration_outcome(record: Record) -> str:
    """How many A/A runs there are, and how many of them were called different."""
    rows = [row for row in record.row_dicts if row["verdict"]]
    calls = sum(row["verdict"] in ("FASTER", "SLOWER") for row in rows)
    return f"{record.document.get('scenario', '?')} A/A: {calls} of {len(rows)} called different"


def imported_outcome(record: Record) -> str:
    """Which tool's figures these are."""
    return f"{len(record.row_dicts)} figures of {record.document.get('source', '?')}, no verdict"


def soak_outcome(record: Record) -> str:
    """How long, what was wrong, and how much the server's memory grew."""
    outcome = record.document.get("outcome")
    if not isinstance(outcome, Mapping):
        return "not told"
    minutes, growth = number(outcome.get("seconds", 0) / 60, ".0f"), number(outcome.get("rss_growth"), "+.1%")
    num_faults = outcome.get("num_faults", 0)
    return f"{minutes} min: {num_faults or 'no'} fault{'s' * (num_faults != 1)}, memory {growth}"


OUTCOMES: Mapping[str, Callable[[Record], str]] = {
    "bench": bench_outcome,
    "golden": golden_outcome,
    "parity": parity_outcome,
    "inspect": inspect_outcome,
    "ladder": ladder_outcome,
    "calibration": calibration_outcome,
    "imported": imported_outcome,
    "soak": soak_outcome,
}


# -- the page ----------------------------------------------------------------------------------------------------------
def page(record: Record) -> list[str]:
    """Everything a reader asks of one record: what was run, what came out, checks, machine and code."""
    document = record.document
    tool = document.get("tool") or {}
    lines = [
        f"{record.kind} {record.run_id}",
        *facts(
            ("state", "complete" if record.complete else incomplete(document)),
            ("made by", f"{tool.get('name', '?')} {tool.get('version', '')}"),
            ("time", f"{document.get('started_utc')} to {document.get('finished_utc') or '(no end)'}"),
            ("command", " ".join(document.get("argv") or [])),
            ("model", model_line(document)),
            ("device", recorded_device_class(document) if document.get("device_class") else None),
        ),
        *SECTIONS[record.kind](record),
        *section("Machine", machine_facts(document)),
        *section("Code", code_facts(document)),
        "",
        f"{len(record.row_dicts)} rows in {record.path.name}",
    ]
    return [printable(line) for line in lines]


def incomplete(document: Mapping[str, Any]) -> str:
    """Why a record has no end, as far as it says."""
    ended = document.get("ended_by")
    return f"INCOMPLETE: ended by {ended}" if ended else "INCOMPLETE: killed, still running, or results missing"


def model_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model facts of a document, empty when it has none."""
    model = document.get("model")
    return model if isinstance(model, Mapping) else {}


def model_line(document: Mapping[str, Any]) -> str:
    """Name, architecture, quant types and the beginning of the digest."""
    model = model_of(document)
    sha256 = str(model.get("sha256") or "")
    parts = [model.get("name"), model.get("architecture"), "+".join(model.get("quant_types") or ())]
    return ", ".join(str(part) for part in (*parts, sha256 and f"sha256 {sha256[:SHORT_SHA]}…") if part)


def machine_facts(document: Mapping[str, Any]) -> list[str]:
    """Hard facts, then volatile ones."""
    machine = document.get("machine") or {}
    both = {**(machine.get("hard") or {}), **(machine.get("volatile") or {})}
    return facts(*((name.replace("_", " "), value) for name, value in both.items()))


def code_facts(document: Mapping[str, Any]) -> list[str]:
    """Commit, difference from it, Python and package versions."""
    code = document.get("code") or {}
    dirty = code.get("dirty")
    difference = str(code.get("diff_sha256") or "")[:SHORT_SHA]
    tree = None if dirty is None else f"uncommitted changes, digest {difference}…" if dirty else "as committed"
    packages = join_pairs(code.get("packages"), separator=" ")
    return facts(("commit", code.get("commit")), ("tree", tree), ("python", code.get("python")), ("packages", packages))
