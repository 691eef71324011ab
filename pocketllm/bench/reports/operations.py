"""Every case of `op_latency` as a line: what it is, its time and rate, its share of a ceiling, and beside a peer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pocketllm.bench.reports.series import Series


@dataclass(frozen=True)
class Line:
    """One case. Of records that tell less of it, `op` is its whole name and what is unknown is empty."""

    op: str
    kind: str
    shape: str
    rows: str
    costs: Mapping[str, float]
    """Seconds of a call, by arm; the rest is the baseline's."""
    rate: str = ""
    """Of whatever ceiling it is nearest to."""
    share: str = ""
    """Of that ceiling."""
    times_peer: str = ""
    """Times as fast as the other library's."""
    is_called: bool = False
    """Whether the calls were timed one after another where others are one launch, the host's time included."""

    @property
    def is_told(self) -> bool:
        """Whether type, shape and rows are known."""
        return bool(self.rows)


def lines_of(series: Series) -> list[Line]:
    """All cases that were measured, in their order."""
    if not series.is_operations or not series.slots:
        return []
    cases, ceilings = series.meter.get("cases") or {}, series.meter.get("ceilings")
    arm, found = series.arms[0], list[Line]()
    for case, costs in series.operations().items():
        known = cases.get(case)
        found.append(line(case, costs, known, nearest(costs.get(arm), known, ceilings)))
    return found


def line(case: str, costs: Mapping[str, float], known: Mapping[str, Any] | None, reached: tuple[str, str]) -> Line:
    """One case of a record; known: what the meter told of it; reached: its rate and share."""
    if known is None or "op" not in known:
        return Line(case, "", "", "", costs, *reached)
    times_peer = f"{known['peer_s'] / known['own_s']:.2f}×" if known.get("peer_s") else ""
    about = known["op"], known.get("type", ""), known.get("shape", ""), str(known["rows"])
    is_called = known.get("timed", "captured") != "captured"
    return Line(*about, costs, *reached, times_peer, is_called)


def nearest(
    cost: float | None, known: Mapping[str, Any] | None, ceilings: Mapping[str, float] | None
) -> tuple[str, str]:
    """The rate of a call and its share of the ceiling that it is nearest to; bytes a second where there is none."""
    if not cost or not known:
        return "", ""
    gbs, gflops = known["bytes"] / cost / 1e9, known["flops"] / cost / 1e9
    if not ceilings:
        return rate(gbs, "B/s"), ""
    moved, multiplied = gbs / memory_gbs(ceilings), gflops / product_gflops(ceilings)
    return (rate(gflops, "F/s"), f"{multiplied:.0%}") if multiplied > moved else (rate(gbs, "B/s"), f"{moved:.0%}")


def rate(giga: float, unit: str) -> str:
    """10⁹ a second in three digits, with its unit.

    >>> rate(40, "B/s"), rate(3870, "B/s"), rate(0.344, "F/s")
    ('40.0 GB/s', '3.87 TB/s', '344 MF/s')
    """
    number, prefix = (giga / 1e3, "T") if giga >= 1e3 else (giga, "G") if giga >= 1 else (giga * 1e3, "M")
    return f"{number:#.3g}".rstrip(".") + f" {prefix}{unit}"


def memory_gbs(ceilings: Mapping[str, float]) -> float:
    """Of a CPU read, of a device copied."""
    return ceilings["copy_gbs"] if "copy_gbs" in ceilings else ceilings["read_gbs"]


def product_gflops(ceilings: Mapping[str, float]) -> float:
    """Of a CPU in float32, of a device in bfloat16."""
    return ceilings["bf16_gflops"] if "bf16_gflops" in ceilings else ceilings["matmul_gflops"]


def ceiling_words(ceilings: Mapping[str, float]) -> str:
    """`4.30 TB/s copied, 790 TF/s bfloat16`"""
    is_device = "copy_gbs" in ceilings
    moved, multiplied = rate(memory_gbs(ceilings), "B/s"), rate(product_gflops(ceilings), "F/s")
    return f"{moved} {'copied' if is_device else 'read'}, {multiplied} {'bfloat16' if is_device else 'float32'}"
