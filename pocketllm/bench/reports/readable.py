"""Whether a run document holds what a report is written from: a record may be older than this version, or hostile."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pocketllm.bench.arm import Role
from pocketllm.errors import RecordError

Document = Mapping[str, Any]

ALWAYS = ("metric", "arm", "role", "primary", "ratio", "low", "high", "margin")
JUDGED = ("n", "floor", "mde", "reason")
"""What the sentence of a verdict tells besides."""
POSITIVE = ("ratio", "low", "high")
SHARES = ("margin", "floor", "mde")


def check_readable(document: Document) -> None:
    """RecordError naming the first thing that a report of this document would need and does not find."""
    wrong = next(faults(document), None)
    if wrong is not None:
        raise RecordError(f"record {document.get('run_id', '?')} cannot be shown: {wrong}")


def faults(document: Document) -> Iterator[str]:
    """What is missing or cannot be, in the order of the document."""
    if not document.get("scenario"):
        yield "it has no scenario"
    names = {arm.get("name") for arm in document.get("arms") or ()}
    strangers = {name for block in document.get("schedule") or () for name in block} - names
    if strangers:
        yield f"its schedule names {min(strangers)!r}, which is no arm of it"
    results = document.get("results") or ()
    if results and not document.get("arms"):
        yield "it has results and no arms"
    nulls = {result.get("metric") for result in results if result.get("role") == Role.NULL.value}
    for place, result in enumerate(results):
        where = f"results[{place}]"
        yield from faults_of(result, where)
        if result.get("verdict") is not None and result.get("metric") not in nulls:
            yield f"{where} has a verdict, and no null arm beside it"
    for place, check in enumerate(document.get("checks") or ()):
        yield from (f"checks[{place}] has no {name}" for name in ("code", "severity", "detail") if not check.get(name))


def faults_of(result: Mapping[str, Any], where: str) -> Iterator[str]:
    """What one result lacks, or holds and cannot be."""
    wanted = ALWAYS if result.get("verdict") is None else (*ALWAYS, *JUDGED)
    yield from (f"{where} has no {name}" for name in wanted if result.get(name) is None)
    for name in POSITIVE:
        value = result.get(name)
        if value is not None and not (0 < value < math.inf):
            yield f"{where}.{name} is {value!r}, which is no time ratio"
    for name in SHARES:
        value = result.get(name)
        if value is not None and not (0 <= value < math.inf):
            yield f"{where}.{name} is {value!r}, which is no share"
