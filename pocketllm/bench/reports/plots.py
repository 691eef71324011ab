"""Still pictures of a record, PNG or SVG, through matplotlib (the extra `plots`)."""

import math
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from pocketllm.bench.arm import Role
from pocketllm.bench.latency import metric_of
from pocketllm.bench.reports import words
from pocketllm.bench.reports.series import Series
from pocketllm.bench.reports.text import reach_of
from pocketllm.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
BASELINE, NULL, BAND, INK, MUTED = "#4a4a45", "#a09f96", "#ece9dc", "#1d1d1a", "#66655d"
CANDIDATES = ("#0f766e", "#c2410c", "#6d28d9", "#0369a1", "#be185d")
WIDTH_IN = 8.0
DPI = 160
STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": "#c9c8c0",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "svg.fonttype": "none",
    # the same record gives the same file
    "svg.hashsalt": "pocketllm",
}


def render_plot(series: Series, kind: str) -> bytes:
    """Forest, slot timeline and, over several points, curves, in one picture of a kind, `png` or `svg`.

    OptionError without matplotlib, and for a record that has nothing to draw.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError("pictures need matplotlib, which is not installed: pip install 'pocketllm[plots]'") from error
    matplotlib.use("Agg")
    content = BytesIO()
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        draw(series).savefig(content, format=kind, dpi=DPI, metadata=metadata, facecolor="white")
    return content.getvalue()


def draw(series: Series) -> "Figure":
    """All panels under one another."""
    from matplotlib.figure import Figure

    document = series.document
    metrics = [metric for metric in words.judged_metrics(document) if words.results_of(document, metric)[0]["primary"]]
    bars, curves = series.timeline(), series.curves()
    heights = [0.42 * len(words.results_of(document, metric)) + 0.5 for metric in metrics]
    heights += [0.28 * len(series.arms) + 0.5] if bars else []
    heights += [2.2] * len(curves)
    if not heights:
        raise OptionError("this record has no contrast and no slot: there is nothing to draw")
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    figure.suptitle(words.headline(document), x=0.01, ha="left", fontsize=11, fontweight="bold")
    colors, left = arm_colors(document), list(panels)
    for metric in metrics:
        draw_forest(left.pop(0), document, metric, colors)
    if bars:
        draw_timeline(left.pop(0), series, colors)
    for name in curves:
        draw_curve(left.pop(0), series, name, colors)
    return figure


def arm_colors(document: Document) -> dict[str, str]:
    """A color for each arm."""
    found, number = {}, 0
    for arm in document.get("arms") or []:
        found[arm["name"]] = {Role.BASELINE.value: BASELINE, Role.NULL.value: NULL}.get(arm.get("role", ""), "")
        if not found[arm["name"]]:
            found[arm["name"]] = CANDIDATES[number % len(CANDIDATES)]
            number += 1
    return found


def draw_forest(axes: "Axes", document: Document, metric: str, colors: Mapping[str, str]) -> None:
    """One metric's intervals on a log axis, the null arm on top."""
    results = words.results_of(document, metric)
    told = [result for result in results if not words.hides_ratio(document, result)]
    reach = reach_of(document, metric)
    margin = results[0]["margin"]
    axes.axvspan(1 / (1 + margin), 1 + margin, color=BAND, zorder=0)
    axes.axvline(1, color=MUTED, linewidth=1, zorder=1)
    for place, result in enumerate(results):
        color = colors[result["arm"]]
        if result in told:
            axes.plot([result["low"], result["high"]], [place, place], color=color, linewidth=2)
            axes.plot([result["ratio"]], [place], "o", color=color, markersize=6)
        label = result.get("verdict") or (
            f"floor {words.percent(result['floor'])}" if result.get("floor") is not None else ""
        )
        axes.annotate(label, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    for floor in {result["floor"] for result in results if result.get("floor") is not None}:
        for edge in (1 / (1 + floor), 1 + floor):
            axes.axvline(edge, color=MUTED, linewidth=1, linestyle=":", zorder=1)
    axes.set_xscale("log")
    axes.set_xlim(math.exp(-1.05 * reach), math.exp(1.05 * reach))
    set_ratio_ticks(axes, reach)
    axes.set_yticks(range(len(results)), [result["arm"] for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_title(f"{words.metric_words(metric)}: time against {words.baseline_name(document)}, 95 % intervals")


def set_ratio_ticks(axes: "Axes", reach: float) -> None:
    """The ticks of the page's axis."""
    from pocketllm.bench.reports.html.drawing import ratio_ticks

    ticks = ratio_ticks(reach)
    axes.set_xticks(ticks, [f"{tick:.3g}×" for tick in ticks])
    axes.minorticks_off()


def draw_timeline(axes: "Axes", series: Series, colors: Mapping[str, str]) -> None:
    """Every slot as it ran, a lane an arm."""
    for place, arm in enumerate(series.arms):
        spans = [(bar.begin_s, bar.end_s - bar.begin_s) for bar in series.timeline() if bar.arm == arm]
        axes.broken_barh(spans, (place - 0.35, 0.7), color=colors[arm], linewidth=0)
    axes.set_yticks(range(len(series.arms)), series.arms)
    axes.set_ylim(len(series.arms) - 0.4, -0.6)
    axes.set_xlim(0, None)
    axes.set_title("slots as they ran, seconds")


def draw_curve(axes: "Axes", series: Series, name: str, colors: Mapping[str, str]) -> None:
    """One metric over the scenario's points, in the unit people use."""
    metric, spreads = metric_of(name), series.curve(name)
    labels = list(dict.fromkeys(one.label for one in spreads))
    for arm in series.arms:
        own = [one for one in spreads if one.arm == arm]
        places = [labels.index(one.label) for one in own]
        axes.plot(places, [metric.show(one.median) for one in own], "o-", color=colors[arm], markersize=4, label=arm)
        for place, one in zip(places, own, strict=True):
            axes.plot([place, place], [metric.show(one.low), metric.show(one.high)], color=colors[arm], alpha=0.5)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, None)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"{words.metric_words(name)}, {metric.shown}")
