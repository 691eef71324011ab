"""A run document in sentences: what was run, what may be said of each arm, and what readers should know besides."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.arm import Role
from pocketllm.bench.latency import metric_of
from pocketllm.bench.scenarios import find_scenario, known

NULL_COPIES = {
    "toggle": "the same process relabelled",
    "attach": "the same endpoint relabelled",
    "process": "started separately",
}
THIS_RUN = "this run's null arm"
"""What a record calls the floor's source when it is no history."""
Document = Mapping[str, Any]


def headline(document: Document) -> str:
    """Scenario, load and model in a line."""
    return f"{document['scenario']}: {load_words(document)} · {model_name(document)}"


def load_words(document: Document) -> str:
    """What a slot asked for: lengths, and how requests came."""
    work = document.get("workload") or {}
    if document.get("meter") is not None and work.get("about"):
        return str(work["about"])
    points = work.get("points") or ([work] if "n_prompt" in work else [])
    if not points or not all({"n_prompt", "n_out"} <= point.keys() for point in points):
        return "lengths not recorded"
    lengths = [listed(point[name] for point in points) for name in ("n_prompt", "n_out")]
    return f"{lengths[0]} tokens in, {lengths[1]} out, {arrival_words(points)}"


def arrival_words(points: Sequence[Document]) -> str:
    """How the requests of a slot came."""
    arrivals = points[0].get("arrivals")
    if arrivals == "wave":
        return f"{listed(point['num_requests'] for point in points)} requests arriving at once"
    if arrivals == "poisson":
        rates = listed(f"{point['rate_per_s']:g}" for point in points)
        return f"{points[0]['num_requests']} requests arriving by chance, {rates} a second"
    in_flight = listed(point.get("concurrency", 1) for point in points)
    return "one request at a time" if in_flight == "1" else f"{in_flight} requests in flight"


def listed(values: Iterable[Any]) -> str:
    """Different values in their order.

    >>> listed([512, 2048, 512]), listed([1, 2, 4])
    ('512 and 2048', '1, 2 and 4')
    """
    *first, last = dict.fromkeys(map(str, values))
    return f"{', '.join(first)} and {last}" if first else last


def model_name(document: Document) -> str:
    """The model's name, or that none is known."""
    return str((document.get("model") or {}).get("name", "unknown model"))


def baseline_name(document: Document) -> str:
    """The arm that others are measured against."""
    return str(document["arms"][0]["name"])


def judged_metrics(document: Document) -> list[str]:
    """Metrics with contrasts, judged ones first."""
    results = sorted(document.get("results") or [], key=lambda result: not result["primary"])
    return list(dict.fromkeys(result["metric"] for result in results))


def results_of(document: Document, metric: str) -> list[Document]:
    """Results of one metric, the null arm's first."""
    found = [result for result in document.get("results") or [] if result["metric"] == metric]
    return sorted(found, key=lambda result: result["role"] != Role.NULL.value)


def hides_ratio(document: Document, result: Document) -> bool:
    """An invalid run shows no ratio but the null arm's, which says why."""
    return not document.get("valid", True) and result["role"] != Role.NULL.value


def metric_words(metric: str) -> str:
    """A metric's full name as people read it.

    >>> metric_words("first_decode"), metric_words("decode@16k"), metric_words("op@rms_norm")
    ('first decode', 'decode at 16k', 'rms_norm')
    """
    name, _, label = metric.partition("@")
    if name == "op" and label:
        return label
    return name.replace("_", " ") + (f" at {label}" if label else "")


def sentences(document: Document) -> list[str]:
    """One sentence for each judged contrast, or why there is none."""
    if document.get("kind") == "imported":
        return ["Imported from another tool: no arms were interleaved, so no verdict is given."]
    if document.get("ended_by"):
        kept = f"{document.get('valid_blocks', 0)} whole blocks are kept, and no verdict is given."
        if document["ended_by"] == "KeyboardInterrupt":
            return [f"Interrupted: {kept}"]
        return [f"Ended by {document['ended_by']}: {kept}"]
    if "results" not in document:
        return ["The run did not come to its end: what was measured is kept, and no verdict is given."]
    if not document.get("valid"):
        broken = [f"{c['code']} {c['detail']}" for c in document.get("checks") or [] if c["severity"] == "run"]
        return [f"INVALID, nothing is concluded: {reason}." for reason in broken]
    results = document["results"] or []
    judged = [result for result in results if result.get("verdict") is not None]
    if not judged and any(r["role"] == Role.CANDIDATE.value for r in results):
        return ["No null arm ran (--no-null): intervals only, no verdict."]
    if not judged:
        return ["Only the baseline and its null arm ran: this is a check of the instrument."]
    return [sentence(document, result) for result in judged]


def sentence(document: Document, result: Document) -> str:
    """A verdict in words, with the null arm beside it."""
    arm, base = result["arm"], baseline_name(document)
    does, do = metric_of(result["metric"]).verb
    at = point_words(document, result["metric"])
    numbers = (
        f"{short(result['ratio'])}× time, 95 % CI {short(result['low'])}–{short(result['high'])} "
        f"({short(1 / result['ratio'])}× speed, {short(1 / result['high'])}–{short(1 / result['low'])}), "
        f"{sample_words(document, result)}; {null_words(document, result)}"
    )
    margin = percent(result["margin"])
    match Word(result["verdict"]):
        case Word.FASTER:
            return f"{arm} {does} faster than {base}{at}: {numbers}."
        case Word.SLOWER:
            return f"{arm} {does} slower than {base}{at}: {numbers}."
        case Word.SAME:
            return f"{arm} {does} as fast as {base}{at} within ±{margin}: {numbers}."
        case Word.SMALL:
            return f"{arm} and {base} differ in {do}{at} by less than this rig can defend: {numbers}."
        case Word.NOT_DISTINGUISHABLE:
            return f"{arm} and {base} could not be told apart in {do}{at}: {numbers}. {power_words(result)}"
        case Word.INVALID:
            return f"INVALID, nothing is concluded: {result['reason']}."


def point_words(document: Document, metric: str) -> str:
    """` with 8 in flight`, as the scenario says it; nothing where it has a single point."""
    label, name = metric.partition("@")[2], str(document.get("scenario"))
    form = find_scenario(name).point_words if name in known() else "at {}"
    return f" {form.format(label)}" if label else ""


def sample_words(document: Document, result: Document) -> str:
    """What the interval is made of."""
    blocks = f"{document.get('valid_blocks', result['n'])} blocks"
    return f"{blocks}, {result['n']} starts" if result.get("n_unit") == "start" else blocks


def null_words(document: Document, result: Document) -> str:
    """What A against A showed, and what the null arm was."""
    null = next(r for r in document["results"] if r["role"] == Role.NULL.value and r["metric"] == result["metric"])
    copy = NULL_COPIES.get(document.get("isolation", ""), "the baseline again")
    return f"null {percent(null['ratio'] - 1, sign='+')} ({copy}; {floor_words(result)})"


def floor_words(result: Document) -> str:
    """The noise floor, and where it comes from when that is not this run."""
    source = result.get("floor_source")
    told = "" if source in (None, THIS_RUN) else f", {source}"
    return f"floor {percent(result['floor'])}{told}"


def power_words(result: Document) -> str:
    """What this run could have seen, and what it would take to see the margin."""
    seen = f"It would have found a change of {percent(result['mde'])} (80 % power)"
    if result["mde"] <= result["margin"]:
        return f"{seen}."
    needed = [f"{n} {what}s" for what in ("block", "start") if (n := result.get(f"{what}s_to_resolve"))]
    cure = f"about {needed[0]} would, or a quieter machine" if needed else "only a quieter machine would"
    return f"{seen}: the machine was too noisy in this run to judge a change of {percent(result['margin'])}; {cure}."


def notes(document: Document) -> list[str]:
    """All remarks: what may be claimed, what the run tells, rules that did not hold, outliers."""
    checks = document.get("checks") or []
    broken = [f"{check['code']} {check['detail']}" for check in checks if check["severity"] != "run"]
    return [*remarks(document), *broken, *outlier_notes(document)]


def remarks(document: Document) -> list[str]:
    """What the isolation allows to be claimed, and what the run tells of itself."""
    claim = [f"{document['isolation']}: {document['claim']}"] if document.keys() >= {"isolation", "claim"} else []
    return [*claim, *map(str, document.get("notes") or [])]


def outlier_notes(document: Document) -> list[str]:
    """Blocks that lie far from the others, and whether they decide anything."""
    lines = []
    for result in document.get("results") or []:
        if result["primary"] and result.get("outlying_blocks"):
            flips = f"the verdict would {'' if result.get('flips_without_outliers') else 'not '}change"
            count = f"{result['outlying_blocks']} outlying block(s)"
            ending = f"; {flips} without" if result.get("verdict") is not None else ""
            lines.append(f"{metric_words(result['metric'])}, {result['arm']}: {count}, kept{ending}")
    return lines


def percent(value: float, sign: str = "") -> str:
    """A share as `0.7 %`; with sign="+" a positive one says so.

    >>> percent(0.0072), percent(0.01), percent(0.01, sign="+")
    ('0.7 %', '1.0 %', '+1.0 %')
    """
    return f"{value:{sign}.1%}".replace("%", " %")


def short(ratio: float) -> str:
    """A ratio in about four digits.

    >>> short(0.9684), short(12.345), short(123.4)
    ('0.968', '12.35', '123')
    """
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def figure(value: float) -> str:
    """A number in about three digits, for tables.

    >>> figure(1234.5), figure(171.27), figure(3.14159), figure(0.01234)
    ('1234', '171.3', '3.14', '0.0123')
    """
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.3g}"


def shown(metric: str, cost: float | None) -> str:
    """A cost as people read it, without its unit."""
    return "n/a" if cost is None else figure(metric_of(metric).show(cost))
