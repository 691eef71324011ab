"""SVG that fits any width: places across are percentages, heights are pixels, so that text keeps its size.

Elements carry classes instead of colors; the page's style gives them one for light and one for dark.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from pocketllm.bench.reports.series import Bar, Spread, Strip
from pocketllm.bench.reports.words import figure, percent, short

Element = ElementTree.Element
ROW = 30
LANE = 20
PANEL = 150
CURVE = 200
TOP, BOTTOM = 14, 24
"""Pixels that a panel keeps for its labels."""
EDGE = "84%"
"""Where a panel ends and the labels of its lines begin."""
STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
RATIOS = (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)


def canvas(height: float, label: str) -> Element:
    """An empty drawing as wide as its place, described for those who do not see it."""
    return Element("svg", {"width": "100%", "height": f"{height:g}", "role": "img", "aria-label": label})


def put(parent: Element, tag: str, css: str, tip: str | None = None, **places: Any) -> Element:
    """Add an element; `x1=` and the like become attributes, a tip shows up under the pointer."""
    attributes = {name.replace("_", "-"): str(value) for name, value in places.items()}
    element = ElementTree.SubElement(parent, tag, {"class": css, **attributes})
    if tip is not None:
        ElementTree.SubElement(element, "title").text = tip
    return element


def write(parent: Element, text: str, x: str, y: float, css: str = "tick", anchor: str = "middle") -> None:
    """Add text."""
    put(parent, "text", css, x=x, y=f"{y:g}", text_anchor=anchor).text = text


def markup(element: Element) -> str:
    """The drawing as text; ElementTree escapes what names and tips hold."""
    return ElementTree.tostring(element, encoding="unicode")


def across(value: float, low: float, high: float, pad: float = 0.0) -> str:
    """A value's place from left to right, in per cent."""
    share = (value - low) / (high - low) if high > low else 0.5
    return f"{pad + share * (100 - 2 * pad):.3f}%"


# -- the forest --------------------------------------------------------------------------------------------------------
def ratio_ticks(reach: float) -> list[float]:
    """Ratios to label on an axis from exp(−reach) to exp(reach): 1, and one or two on each side."""
    if reach > math.log(1.5):
        upper = [ratio for ratio in RATIOS if 0 < math.log(ratio) <= 0.9 * reach]
        picked = upper[-1:] if len(upper) < 3 else [upper[len(upper) // 2 - 1], upper[-1]]
        return [*(1 / ratio for ratio in reversed(picked)), 1.0, *picked]
    fitting = [step for step in STEPS if math.log1p(step) <= 0.9 * reach]
    step = fitting[-1] if fitting else STEPS[0]
    return [1 / (1 + step), 1.0, 1 + step]


def forest_axis(reach: float) -> str:
    """Labels over the bars."""
    svg = canvas(16, "axis of time ratios")
    for ratio in ratio_ticks(reach):
        write(svg, f"{ratio:.3g}×", across(math.log(ratio), -reach, reach, 2), 12)
    return markup(svg)


def forest_bar(result: Mapping[str, Any], reach: float, css: str) -> str:
    """One interval: margin band, floor ticks, line at 1, estimate."""
    label = (
        f"{result['arm']}: {short(result['ratio'])}×, 95 % interval {short(result['low'])} to {short(result['high'])}"
    )
    svg = canvas(ROW, label)

    def at(log_ratio: float) -> str:
        return across(max(-reach, min(reach, log_ratio)), -reach, reach, 2)

    margin = math.log1p(result["margin"])
    width = float(at(margin)[:-1]) - float(at(-margin)[:-1])
    put(
        svg,
        "rect",
        "margin",
        f"margin ±{percent(result['margin'])}",
        x=at(-margin),
        y=2,
        width=f"{width:.3f}%",
        height=ROW - 4,
    )
    for ratio in ratio_ticks(reach):
        css_line = "one" if ratio == 1 else "grid"
        put(svg, "line", css_line, x1=at(math.log(ratio)), x2=at(math.log(ratio)), y1=0, y2=ROW)
    if result.get("floor") is not None:
        for end in (-1, 1):
            place = at(end * math.log1p(result["floor"]))
            put(svg, "line", "floor", f"noise floor {percent(result['floor'])}", x1=place, x2=place, y1=5, y2=ROW - 5)
    low, high = at(math.log(result["low"])), at(math.log(result["high"]))
    put(svg, "line", f"interval {css}", label, x1=low, x2=high, y1=ROW / 2, y2=ROW / 2)
    for tip in (low, high):
        put(svg, "line", f"cap {css}", x1=tip, x2=tip, y1=ROW / 2 - 4, y2=ROW / 2 + 4)
    put(svg, "circle", f"dot {css}", label, cx=at(math.log(result["ratio"])), cy=ROW / 2, r=5)
    return markup(svg)


# -- blocks ------------------------------------------------------------------------------------------------------------
Differences = Sequence[tuple[int, float]]
"""Blocks, each with the log of how many times the baseline's cost an arm's was."""


def span(drawn: Sequence[tuple[Differences, Mapping[str, Any]]]) -> tuple[float, float]:
    """The log ratios from bottom to top of panels that shall be compared by eye: all dots and intervals, and room."""
    logs = [value for points, _ in drawn for _, value in points]
    ends = [math.log(result[end]) for _, result in drawn for end in ("low", "high")]
    low, high = min(*logs, *ends), max(*logs, *ends)
    if low < 0 < high or min(abs(low), abs(high)) < (high - low):
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.08 * max(high - low, 0.002)
    return low - room, high + room


def differences(points: Differences, result: Mapping[str, Any], css: str, reach: tuple[float, float]) -> str:
    """A dot a block: how many times the baseline's cost the arm's was; the band is the 95 % interval.

    reach: what `span` says of this panel and those beside it.
    """
    ends = [math.log(result["low"]), math.log(result["high"])]
    low, high = reach

    def down(value: float) -> float:
        return round(TOP + (high - value) / (high - low) * (PANEL - TOP - BOTTOM), 2)

    svg = canvas(PANEL, f"paired differences of {result['arm']} over {len(points)} blocks")
    band = down(ends[0]) - down(ends[1])
    put(svg, "rect", f"band {css}", "95 % interval", x="0", y=down(ends[1]), width=EDGE, height=f"{max(band, 1):.2f}")
    if low <= 0 <= high:
        put(svg, "line", "one", x1="0", x2=EDGE, y1=down(0), y2=down(0))
        write(svg, "1×", "100%", down(0) + 4, anchor="end")
    estimate = math.log(result["ratio"])
    put(svg, "line", f"interval {css}", x1="0", x2=EDGE, y1=down(estimate), y2=down(estimate))
    if not low <= 0 <= high or abs(down(estimate) - down(0)) > 14:
        write(svg, f"{short(result['ratio'])}×", "100%", down(estimate) + 4, anchor="end")
    last = max(block for block, _ in points)
    for block, value in points:
        tip = f"block {block}: {short(math.exp(value))}×"
        put(svg, "circle", f"dot {css}", tip, cx=f"{3 + 78 * block / max(last, 1):.3f}%", cy=down(value), r=4)
    write(svg, "block 0", "0", PANEL - 6, anchor="start")
    write(svg, f"block {last}", EDGE, PANEL - 6, anchor="end")
    return markup(svg)


# -- the run's clock ---------------------------------------------------------------------------------------------------
def lane(bars: Sequence[Bar], arm: str, total_s: float, css: str) -> str:
    """One arm's slots over the run's clock."""
    svg = canvas(LANE, f"slots of {arm}")
    put(svg, "line", "grid", x1="0", x2="100%", y1=LANE / 2, y2=LANE / 2)
    for one in bars:
        if one.arm == arm:
            tip = f"{arm}, block {one.block}, slot {one.slot}: {one.end_s - one.begin_s:.2f} s"
            width = max(100 * (one.end_s - one.begin_s) / total_s, 0.15)
            put(
                svg,
                "rect",
                f"slot {css}",
                tip,
                x=across(one.begin_s, 0, total_s),
                y=3,
                width=f"{width:.3f}%",
                height=LANE - 6,
            )
    return markup(svg)


def clock_axis(total_s: float) -> str:
    """Seconds or minutes under the lanes."""
    svg = canvas(18, "time since the first slot")
    unit, name = (60.0, "min") if total_s >= 180 else (1.0, "s")
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        write(svg, f"{share * total_s / unit:.{1 if share else 0}f} {name}", f"{100 * share:g}%", 13, anchor=anchor)
    return markup(svg)


def strip(one: Strip, total_s: float) -> str:
    """A condition over the run's clock, between its own least and most."""
    values = [value for _, value in one.points]
    low, high = min(values), max(values)
    svg = canvas(2 * LANE, f"{one.name}: {figure(low)} to {figure(high)} {one.unit}")
    inner = put(svg, "svg", "", width="100%", height=2 * LANE, viewBox="0 0 100 100", preserveAspectRatio="none")
    spread = (high - low) or 1.0
    path = " ".join(f"{100 * at / total_s:.3f},{90 - 80 * (value - low) / spread:.2f}" for at, value in one.points)
    put(inner, "polyline", "strip", points=path, vector_effect="non-scaling-stroke")
    return markup(svg)


# -- points ------------------------------------------------------------------------------------------------------------
def curve(spreads: Sequence[Spread], arms: Mapping[str, str], show: Callable[[float], float]) -> str:
    """A metric over a scenario's points, in the unit people use: a line an arm, whiskers over blocks."""
    labels = list(dict.fromkeys(one.label for one in spreads))
    top = max(max(show(one.low), show(one.high)) for one in spreads) * 1.05
    svg = canvas(CURVE, "a metric over the points of the scenario")

    def down(value: float) -> float:
        return round(TOP + (1 - value / top) * (CURVE - TOP - BOTTOM), 2)

    def right(label: str) -> str:
        return across(labels.index(label), 0, max(len(labels) - 1, 1), 8)

    for value in nice_ticks(top):
        put(svg, "line", "one" if value == 0 else "grid", x1="0", x2="100%", y1=down(value), y2=down(value))
        write(svg, f"{value:g}", "0", down(value) - 3, anchor="start")
    for label in labels:
        write(svg, label, right(label), CURVE - 6)
    for arm, css in arms.items():
        own = [one for one in spreads if one.arm == arm]
        for before, after in pairwise(own):
            ends = {"x1": right(before.label), "x2": right(after.label)}
            put(svg, "line", f"interval {css}", **ends, y1=down(show(before.median)), y2=down(show(after.median)))
        for one in own:
            x, tip = right(one.label), f"{arm} at {one.label}: {figure(show(one.median))}"
            put(svg, "line", f"whisker {css}", x1=x, x2=x, y1=down(show(one.low)), y2=down(show(one.high)))
            put(svg, "circle", f"dot {css}", tip, cx=x, cy=down(show(one.median)), r=4)
    return markup(svg)


def nice_ticks(top: float) -> list[float]:
    """Zero and one to five round values up to top.

    >>> nice_ticks(470.0), nice_ticks(0.9)
    ([0.0, 100.0, 200.0, 300.0, 400.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    size = 10.0 ** math.floor(math.log10(top))
    step = next(size * factor for factor in (0.2, 0.5, 1, 2, 5, 10) if top / (size * factor) < 5)
    return [round(index * step, 12) for index in range(int(top / step) + 1)]
