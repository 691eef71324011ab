"""Speeds of a model: what was measured, under which conditions, and what the run concluded; pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from pocketllm.evidence.ladder import Evidence
from pocketllm.evidence.ladder.freshness import machine_words
from pocketllm.evidence.model_pages.source import Source
from pocketllm.evidence.model_pages.tables import NO_RECORDS, SHORT_ID, table, targets

HEAD = ("metric", "arm", "speed", "time against the baseline (95 %)", "verdict")
SHORT_COMMIT = 10
Document = Mapping[str, Any]


def performance_part(model: str, source: Source) -> Iterator[str]:
    """The newest valid bench run of each device class, workload and set of arms: its conditions, then its figures."""
    newest: dict[tuple[str, str], Evidence] = {}
    for item in source.evidence_of(model):
        if item.kind == "bench" and item.document.get("valid") is True and not item.is_staged:
            key = (item.device_class, workload(item.document))
            newest.pop(key, None)  # a later run stands where it was made, behind those of other workloads
            newest[key] = item
    if not newest:
        yield NO_RECORDS
        return
    for (device_class, _), item in sorted(newest.items(), key=lambda found: found[0][0]):
        yield from heading(item, device_class)
        yield ""
        yield from table(HEAD, list(speed_rows(item.document)))
        yield ""
    labels = {item.run_id[:SHORT_ID]: source.address(item.path) for item in newest.values()}
    yield from list(targets(labels))[1:]


def workload(document: Document) -> str:
    """What makes two bench runs comparable enough for the newer one to stand for both."""
    arms = "/".join(str(arm.get("name")) for arm in document.get("arms") or [])
    return (
        f"{document.get('scenario')} {lengths(document)} {arms} {'served' if document.get('served') else 'in process'}"
    )


def lengths(document: Document) -> str:
    """Tokens in and out, where the workload has one pair of them."""
    load = document.get("workload") or {}
    return f"{load['n_prompt']} in / {load['n_out']} out" if {"n_prompt", "n_out"} <= set(load) else ""


def heading(item: Evidence, device_class: str) -> Iterator[str]:
    """The conditions of a run, in one paragraph of short lines."""
    document = item.document
    load = document.get("workload") or {}
    what = ", ".join(filter(None, (str(document.get("scenario")), lengths(document))))
    width = load.get("concurrency")
    asked = f"{width} request{'s' * (width != 1)} at a time" if width else ""
    how = "over HTTP" if document.get("served") else "in process"
    yield f"**{what}** on `{device_class}`, {', '.join(filter(None, (asked, how, sampling(load))))}"
    yield f"({', '.join(filter(None, (*engine_words(item), machine_line(document))))};"
    yield f"{', '.join(run_words(item))}; [record][{item.run_id[:SHORT_ID]}]):"


def sampling(load: Document) -> str:
    """How tokens were chosen."""
    return str(load.get("sampling") or "")


def engine_words(item: Evidence) -> Iterator[str]:
    """Kernels, threads and number formats of our own arm."""
    plan = item.plan
    if plan.get("isa"):
        yield str(plan["isa"])
    if plan.get("threads"):
        yield f"{plan['threads']} thread{'s' * (plan['threads'] != 1)}"
    if plan.get("activation_dtype"):
        yield f"activations {plan['activation_dtype']}"
    if plan.get("kv_dtype"):
        yield f"cache {plan['kv_dtype']}"


def run_words(item: Evidence) -> Iterator[str]:
    """How much was run, when, with which code, and what the null arm saw."""
    document = item.document
    if document.get("schedule"):
        yield f"{document.get('valid_blocks', len(document['schedule']))} blocks"
    if document.get("starts"):
        yield f"{document['starts']} start{'s' * (document['starts'] != 1)}"
    for entry in document.get("results") or []:
        if entry.get("role") == "null" and entry.get("primary") and entry.get("ratio"):
            yield f"null arm {entry['ratio'] - 1:+.1%}"
    if document.get("started_utc"):
        yield str(document["started_utc"])[:10]
    commit = (document.get("code") or {}).get("commit")
    if commit:
        yield f"commit {str(commit)[:SHORT_COMMIT]}"


def speed_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """One row for each arm of each judged metric; the null arm is one of the conditions."""
    judged = [entry for entry in document.get("results") or [] if entry.get("verdict")]
    results = {(entry.get("metric"), entry.get("arm")): entry for entry in judged}
    arms = {arm.get("name"): arm for arm in document.get("arms") or [] if arm.get("role") != "null"}
    for metric, medians in (document.get("medians") or {}).items():
        unit = next((entry.get("unit") for entry in judged if entry.get("metric") == metric), None)
        if not any(found == metric for found, _ in results):
            continue
        for name, arm in arms.items():
            if not medians.get(name):
                continue
            entry = results.get((metric, name))
            against = f"{entry['ratio']:.3f}× ({entry['low']:.3f}–{entry['high']:.3f})" if entry else "1"
            verdict = str(entry["verdict"]) if entry else str(arm.get("role") or "baseline")
            yield str(metric), who(arm), speed(medians[name], unit), against, verdict


def who(arm: Document) -> str:
    """An arm, by what served it and what it was told to do otherwise."""
    options = ", ".join(f"{name}={value}" for name, value in (arm.get("options") or {}).items())
    beside = ", ".join(filter(None, (arm.get("served_by"), options)))
    return f"{arm.get('name')} ({beside})" if beside else str(arm.get("name"))


def speed(seconds: float, unit: str | None) -> str:
    """A median in the unit that people use: tokens per second for a cost per token, else a time.

    >>> speed(0.0025, "s/token"), speed(0.0025, "s")
    ('400.0 tokens/s', '2.500 ms')
    """
    if unit is None or unit == "s/token":
        return f"{1 / seconds:.1f} tokens/s"
    return f"{seconds * 1000:.3f} ms{unit[1:]}"


def machine_line(document: Document) -> str:
    """The machine of a record in a few words."""
    return machine_words((document.get("machine") or {}).get("hard") or {}) or "a machine that could not be read"
