"""From a record to one HTML page that explains itself: no file beside it, no request to any server."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.arm import Role
from pocketllm.bench.latency import metric_of
from pocketllm.bench.reports import words
from pocketllm.bench.reports.html import drawing
from pocketllm.bench.reports.operations import ceiling_words, lines_of
from pocketllm.bench.reports.series import QUANTILES, Series
from pocketllm.bench.reports.text import reach_of, word_title
from pocketllm.bench.reports.views import CAVEATS, view

Document = Mapping[str, Any]
TEMPLATE = "page.html.jinja"
WORD_CSS = {
    Word.FASTER: "faster",
    Word.SLOWER: "slower",
    Word.SAME: "same",
    Word.SMALL: "small",
    Word.NOT_DISTINGUISHABLE: "unknown",
    Word.INVALID: "slower",
}
MAX_CARDS = 4


def render_page(document: Document, rows: Sequence[Document], views: Sequence[str] = ()) -> str:
    """The page of a bench record; of an unfinished one, what it has."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    series = Series(document, rows)
    return environment.get_template(TEMPLATE).render(context(series, views))


def context(series: Series, views: Sequence[str]) -> dict[str, Any]:
    """All that the template says."""
    document = series.document
    css = arm_css(document)
    judged = [result for result in document.get("results") or [] if result.get("verdict") is not None]
    told = judged if document.get("valid") else []
    return {
        "document": document,
        "title": words.headline(document),
        "css": css,
        "baseline": words.baseline_name(document),
        "verdicts": [verdict(document, result, css) for result in told],
        "as_cards": len(told) <= MAX_CARDS,
        "sentences": [] if told else words.sentences(document),
        "is_bad": not document.get("valid", True) or not document.get("complete", True),
        "columns": min(max(len(css) - 1, 1), 3),
        "forest": [forest(document, metric, css) for metric in words.judged_metrics(document)],
        "rates": rates(series),
        "panels": panels(series, css),
        "clock": clock(series, css),
        "curves": curves(series, css),
        "latencies": latencies(series),
        "quantiles": QUANTILES,
        "operations": operations(series),
        "views": [{"name": name, "rows": view_rows(series, name), "caveat": CAVEATS[name]} for name in views],
        "checks": document.get("checks") or [],
        "notes": [*words.remarks(document), *words.outlier_notes(document)],
        "command": shlex.join(document.get("argv") or ()),
        "arms": [arm_facts(arm) for arm in document.get("arms") or []],
        "schedule": document.get("schedule") or [],
        "facts": facts(series),
        "code": code_facts(document),
        "machine": machine_facts(document),
        "figure": words.figure,
    }


def arm_css(document: Document) -> dict[str, str]:
    """A color class for each arm: the baseline and the null arm have their own."""
    found, number = {}, 0
    for arm in document.get("arms") or []:
        if arm.get("role") == Role.CANDIDATE.value:
            number += 1
            found[arm["name"]] = f"arm-{(number - 1) % 5 + 1}"
        else:
            found[arm["name"]] = f"arm-{arm.get('role', Role.BASELINE.value)}"
    return found


def verdict(document: Document, result: Document, css: Mapping[str, str]) -> dict[str, Any]:
    """One verdict, for a card or a line."""
    return {
        "arm": result["arm"],
        "css": css.get(result["arm"], ""),
        "metric": words.metric_words(result["metric"]),
        "word": result["verdict"],
        "word_css": WORD_CSS[Word(result["verdict"])],
        "speed": f"{words.short(1 / result['ratio'])}×",
        "speed_interval": f"{words.short(1 / result['high'])}–{words.short(1 / result['low'])}",
        "sentence": words.sentence(document, result),
    }


def forest(document: Document, metric: str, css: Mapping[str, str]) -> dict[str, Any]:
    """One metric's rows."""
    results = words.results_of(document, metric)
    reach = reach_of(document, metric)
    return {
        "title": words.metric_words(metric),
        "about": metric_of(metric).about,
        "unit": metric_of(metric).unit,
        "primary": results[0]["primary"],
        "axis": drawing.forest_axis(reach),
        "rows": [forest_row(document, result, reach, css) for result in results],
    }


def forest_row(document: Document, result: Document, reach: float, css: Mapping[str, str]) -> dict[str, Any]:
    """One arm's numbers, bar and word."""
    own = css.get(result["arm"], "")
    row = {
        "arm": result["arm"],
        "css": own,
        "hidden": words.hides_ratio(document, result),
        "word": result.get("verdict"),
    }
    row["word_css"] = WORD_CSS[Word(result["verdict"])] if row["word"] else "none"
    if not row["word"] and result["role"] == Role.NULL.value and result.get("floor") is not None:
        row["word"] = f"floor {words.percent(result['floor'])}"
    if row["hidden"]:
        return row
    return {
        **row,
        "time": f"{words.short(result['ratio'])}×",
        "interval": f"{words.short(result['low'])}–{words.short(result['high'])}",
        "speed": f"{words.short(1 / result['ratio'])}×",
        "bar": drawing.forest_bar(result, reach, own),
    }


def rates(series: Series) -> list[dict[str, Any]]:
    """Absolute medians by metric and arm, in the unit people use."""
    if series.is_operations:
        return []
    return [
        {
            "title": words.metric_words(metric),
            "unit": metric_of(metric).shown,
            "values": [words.shown(metric, values.get(arm)) for arm in series.arms],
        }
        for metric, values in series.medians().items()
    ]


def panels(series: Series, css: Mapping[str, str]) -> list[dict[str, Any]]:
    """Paired differences of every judged metric and arm; the arms of one metric on one scale."""
    found = []
    for metric in words.judged_metrics(series.document):
        shown = [
            (points, result)
            for result in words.results_of(series.document, metric)
            if result["primary"] and not words.hides_ratio(series.document, result)
            if len(points := series.differences(metric, result["arm"])) > 1
        ]
        for points, result in shown:
            own = css.get(result["arm"], "")
            drawn = drawing.differences(points, result, own, drawing.span(shown))
            found.append({"metric": words.metric_words(metric), "arm": result["arm"], "css": own, "svg": drawn})
    return found


def clock(series: Series, css: Mapping[str, str]) -> dict[str, Any] | None:
    """The slot timeline with what was recorded of the machine."""
    bars = series.timeline()
    if not bars:
        return None
    total_s = max(bar.end_s for bar in bars)
    lanes = [{"arm": arm, "css": css.get(arm, ""), "svg": drawing.lane(bars, arm, total_s, css[arm])} for arm in css]
    strips = [
        {
            "name": one.name,
            "low": words.figure(min(value for _, value in one.points)),
            "high": words.figure(max(value for _, value in one.points)),
            "unit": one.unit,
            "svg": drawing.strip(one, total_s),
        }
        for one in series.strips()
    ]
    return {"lanes": lanes, "strips": strips, "axis": drawing.clock_axis(total_s)}


def curves(series: Series, css: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each metric over the scenario's points."""
    found = []
    for name, spreads in series.curves().items():
        metric = metric_of(name)
        title = f"{words.metric_words(name)}, {metric.shown}"
        found.append({"title": title, "about": metric.about, "svg": drawing.curve(spreads, css, metric.show)})
    return found


def latencies(series: Series) -> list[dict[str, Any]]:
    """Quantiles of the latency words by point and arm, in milliseconds."""
    if series.is_operations:
        return []
    rows = []
    for point in series.points:
        for word in series.latency_words:
            for arm in series.arms:
                found = series.quantiles(word, point, arm)
                if found:
                    told = [one.refusal if one.value is None else words.figure(1e3 * one.value) for one in found]
                    most = words.figure(1e3 * max(one.maximum for one in found))
                    rows.append({"word": word_title(series, word), "point": point, "arm": arm, "values": [*told, most]})
    return rows


def view_rows(series: Series, name: str) -> list[dict[str, Any]]:
    """A tool's numbers: one row a number, one column an arm, ours below theirs."""
    rows: dict[tuple[Any, str], dict[str, Any]] = {}
    for row in view(series, name):
        at = f" at {row['point']}" if row["point"] else ""
        about = {key: row[key] for key in ("definition", "ours", "ours_definition")}
        kept = rows.setdefault((row["point"], row["name"]), {**about, "name": row["name"] + at, "arms": {}})
        beside = row["ours_value"]
        kept["arms"][row["arm"]] = {
            "theirs": f"{words.figure(row['value'])} {row['unit']}",
            "ours": "" if beside is None else f"{words.figure(beside)} {row['ours_unit']}",
        }
    return list(rows.values())


def operations(series: Series) -> dict[str, Any] | None:
    """Cases of op_latency with what they moved and computed."""
    lines, ceilings = lines_of(series), series.meter.get("ceilings")
    if not lines:
        return None
    rows = [
        {
            "line": line,
            "values": [words.figure(1e6 * line.costs[arm]) if arm in line.costs else "n/a" for arm in series.arms],
        }
        for line in lines
    ]
    return {"rows": rows, "ceilings": ceiling_words(ceilings) if ceilings else "", "peer": series.meter.get("peer")}


# -- what was run ------------------------------------------------------------------------------------------------------
def facts(series: Series) -> list[tuple[str, str]]:
    """The run in pairs of a name and what it was; what is not recorded is left out."""
    document = series.document
    work = document.get("workload") or {}
    model = document.get("model") or {}
    blocks = f"{series.num_blocks} valid of {len(document.get('schedule') or ())}"
    pairs = [
        ("scenario", f"{document.get('scenario')}: {work.get('about', '')}".rstrip(": ")),
        ("model", f"{model.get('name', 'unknown')} ({', '.join(model.get('quant_types') or ())})".removesuffix(" ()")),
        ("model digest", str(model.get("sha256") or "")[:16]),
        ("isolation", str(document.get("isolation", ""))),
        ("blocks", blocks),
        ("requests a slot", str(work.get("requests_per_slot", ""))),
        ("prompts", str(work.get("prompts", ""))),
        ("sampling", str(work.get("sampling", ""))),
        ("seed", str(document.get("seed", ""))),
        (
            "margin",
            ", ".join(f"{words.metric_words(k)} {words.percent(v)}" for k, v in (document.get("margin") or {}).items()),
        ),
        ("started", str(document.get("started_utc") or "")),
        ("took", f"{document['wall_s']:.0f} s" if document.get("wall_s") else ""),
    ]
    return [(name, value) for name, value in pairs if value]


def arm_facts(arm: Document) -> dict[str, str]:
    """One arm: what it was and what made it differ."""
    differs = [f"{name}={value}" for name, value in (arm.get("options") or {}).items()]
    differs += [str(arm[name]) for name in ("url", "command", "path") if arm.get(name)]
    plan = arm.get("plan") or {}
    return {
        "name": str(arm["name"]),
        "role": str(arm.get("role", "")),
        "served_by": str(arm.get("served_by") or arm.get("target") or ""),
        "backend": str(plan.get("backend") or ""),
        "differs": ", ".join(differs),
    }


def code_facts(document: Document) -> list[tuple[str, str]]:
    """Version, commit and packages."""
    code, tool = document.get("code") or {}, document.get("tool") or {}
    commit = str(code.get("commit") or "")[:12] + (" and uncommitted changes" if code.get("dirty") else "")
    packages = ", ".join(f"{name} {version}" for name, version in (code.get("packages") or {}).items())
    pairs = [
        ("pocketllm", str(tool.get("version", ""))),
        ("commit", commit),
        ("python", str(code.get("python", ""))),
        ("packages", packages),
    ]
    return [(name, value) for name, value in pairs if value]


def machine_facts(document: Document) -> list[tuple[str, str]]:
    """Hard facts first, then those that change."""
    machine = document.get("machine") or {}
    merged = {**(machine.get("hard") or {}), **(machine.get("volatile") or {})}
    return [
        (name.replace("_", " "), plain_value(value)) for name, value in merged.items() if value not in (None, [], {})
    ]


def plain_value(value: Any) -> str:
    """A recorded fact as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain_value(item)}" for name, item in value.items())
    return ", ".join(map(plain_value, value)) if isinstance(value, list | tuple) else str(value)
