"""Validity of the conditions a run was measured in: V08 throttling, V09 client lag, V10 concurrency, V13 compilation,
V14 the server's own clock, V15 heat soak; pure.

Each speaks only where its input was read. What the arms did not share in a block (V08, V09, V10, V13) costs that block
for every arm.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pocketllm.bench.analysis.validity import Check, Measured, Severity, blocks_of
from pocketllm.bench.targets.contract import Sample

MAX_LAG_SHARE = 0.01
LAG_QUANTILE = 0.99
MIN_ACHIEVED = 0.95
MAX_CLOCK_DISAGREEMENT = 0.05
SOAK_SLOTS = 5
HARMLESS_THROTTLE = 0x1 | 0x2 | 0x10 | 0x100
"""NVML's reasons that are not throttling: idle, application clocks, sync boost, display clocks."""


def condition_checks(measured: Sequence[Measured], primary: Sequence[str]) -> list[Check]:
    """All rules of this file but V15, over requests that succeeded."""
    good = [item for item in measured if item.sample.error is None and item.sample.n_out > 0]
    return [
        *throttling(good),
        *client_lag(good, primary),
        *concurrency(good),
        *admission(good),
        *compilation(good),
        *server_clock(good, primary),
    ]


def slots_of(items: Sequence[Measured]) -> Iterator[list[Measured]]:
    """Requests of each block, arm and point together."""
    grouped: dict[tuple[int, str, str], list[Measured]] = {}
    for item in items:
        grouped.setdefault((item.block, item.arm, item.point), []).append(item)
    yield from grouped.values()


def throttling(good: Sequence[Measured]) -> list[Check]:
    """V08: in one block the arms were throttled for different reasons; value: how many blocks."""
    masks: dict[int, dict[str, int]] = {}
    for item in good:
        if item.throttle_mask is not None:
            by_arm = masks.setdefault(item.block, {})
            by_arm[item.arm] = by_arm.get(item.arm, 0) | (item.throttle_mask & ~HARMLESS_THROTTLE)
    unequal = [block for block, by_arm in masks.items() if len(set(by_arm.values())) > 1]
    if not unequal:
        return []
    shown = ", ".join(f"{arm} {mask:#x}" for arm, mask in masks[unequal[0]].items())
    text = f"throttle reasons differ between arms in {len(unequal)} blocks, first in block {unequal[0]}: {shown}"
    return [Check("V08", Severity.BLOCK, float(len(unequal)), text, tuple(sorted(unequal)))]


def client_lag(good: Sequence[Measured], primary: Sequence[str]) -> list[Check]:
    """V09: the client's loop lag (p99 of a slot) is over 1 % of the time that a judged metric spans.

    Value: the worst share. A stamp that is late by the lag moves a time of that length by that share.
    """
    worst, late = 0.0, []
    for slot in slots_of(good):
        lags = [item.loop_lag_ms for item in slot if item.loop_lag_ms is not None]
        spans = [span for item in slot for metric in primary if (span := span_s(item.sample, metric))]
        if not lags or not spans:
            continue
        share = float(np.quantile(lags, LAG_QUANTILE)) / 1e3 / float(np.median(spans))
        worst = max(worst, share)
        if share > MAX_LAG_SHARE:
            late.append(slot[0])
    if not late:
        return []
    remedy = "leave a core to the client (fewer --threads)"
    if late[0].offered > 1:
        remedy = f"use fewer streams a client process, or {remedy}"
    text = (
        f"the client's own loop lagged by {worst:.1%} of what it timed in {len(blocks_of(late))} blocks, "
        f"first arm {late[0].arm}, block {late[0].block}: {remedy}"
    )
    return [Check("V09", Severity.BLOCK, worst, text, blocks_of(late))]


def span_s(sample: Sample, metric: str) -> float | None:
    """Seconds between the two stamps that a metric is made of, in one request; None where it has not both."""
    times = sample.chunk_t_ns
    if not times:
        return None
    spans: dict[str, Callable[[], int]] = {
        "decode": lambda: times[-1] - times[1] if len(times) > 2 else times[-1] - times[0],
        "tpot": lambda: times[-1] - times[0],
        "first_decode": lambda: times[1] - times[0] if len(times) > 1 else 0,
        "itl": lambda: (times[-1] - times[0]) // max(len(times) - 1, 1),
        "prefill": lambda: times[0] - sample.t_start_ns,
        "ttft": lambda: times[0] - sample.t_send_ns,
    }
    name = metric.partition("@")[0]
    stem = name.rpartition("_p")[0] if name.rpartition("_p")[0] in spans else name
    read = spans.get(stem, lambda: times[-1] - sample.t_send_ns)
    return max(read(), 0) / 1e9 or None


def concurrency(good: Sequence[Measured]) -> list[Check]:
    """V10: the client had fewer requests in flight than offered, by over 5 %; value: the worst achieved share."""
    worst, short = 1.0, []
    for slot in slots_of(good):
        offered = slot[0].offered
        if offered > 1 and len(slot) >= offered:
            achieved = achieved_concurrency([item.sample for item in slot], offered) / offered
            worst = min(worst, achieved)
            if achieved < MIN_ACHIEVED:
                short.append(slot[0])
    if not short:
        return []
    text = (
        f"the client had {worst:.0%} of the offered requests in flight at the least, first arm {short[0].arm}, "
        f"block {short[0].block}"
    )
    return [Check("V10", Severity.BLOCK, worst, text, blocks_of(short))]


def admission(good: Sequence[Measured]) -> list[Check]:
    """V10, a note: by its own gauge a server computed over 5 % fewer requests at a time than its client kept in flight.

    A note for each arm, value: its worst share. The block stays: to make requests wait is the server's own doing, and
    their waiting is in the times that are compared.
    """
    worst: dict[str, tuple[float, Measured]] = {}
    for slot in slots_of(good):
        told, first = [item.sample.srv_running for item in slot if item.sample.srv_running is not None], slot[0]
        share = float(np.median(told)) / first.offered if told else 1.0
        if first.offered > 1 and share < min(MIN_ACHIEVED, worst.get(first.arm, (1.0, first))[0]):
            worst[first.arm] = share, first
    return [
        Check(
            "V10",
            Severity.NOTE,
            share,
            f"{arm}: by its own count the server computed {share:.0%} of the {first.offered} requests in flight at a "
            f"time (block {first.block}): the others waited there",
        )
        for arm, (share, first) in worst.items()
    ]


def achieved_concurrency(samples: Sequence[Sample], offered: int) -> float:
    """Mean requests in flight while there was still something to admit: from the `offered`-th send to the last one.

    Where all leave at once that is an instant, and what counts is how many were in flight then.
    """
    sends = sorted(sample.t_send_ns for sample in samples)
    begin, end = sends[offered - 1], sends[-1]
    lives = [(sample.t_send_ns, sample.t_last_ns or sample.t_send_ns) for sample in samples]
    if begin == end:
        return float(sum(send <= begin <= last for send, last in lives))
    return sum(max(0, min(last, end) - max(send, begin)) for send, last in lives) / (end - begin)


def compilation(good: Sequence[Measured]) -> list[Check]:
    """V13: something was compiled or captured inside a measured window; value: how many times at least.

    Of each slot the most that a request saw: requests that overlap see the same ones.
    """
    found = [item for item in good if item.compiles]
    if not found:
        return []
    total = sum(max(item.compiles or 0 for item in slot) for slot in slots_of(found))
    text = (
        f"{total} or more compilations or graph captures inside measured requests, first arm {found[0].arm}, "
        f"block {found[0].block}: warm up longer"
    )
    return [Check("V13", Severity.BLOCK, float(total), text, blocks_of(found))]


def server_clock(good: Sequence[Measured], primary: Sequence[str]) -> list[Check]:
    """V14: a server's own timing and the client's differ by over 5 %, at the median over an arm's requests.

    For decode the run falls: both time the same gaps. For the time to the first token it is a note: the client's figure
    holds transport that the server's leaves out.
    """
    names = {metric.partition("@")[0] for metric in primary}
    checks = []
    for arm in dict.fromkeys(item.arm for item in good):
        samples = [item.sample for item in good if item.arm == arm]
        rules = (
            ("decode", Severity.RUN, [decode_ratio(sample) for sample in samples]),
            ("prefill", Severity.NOTE, [prefill_ratio(sample) for sample in samples]),
        )
        for what, severity, ratios in rules:
            known = [ratio for ratio in ratios if ratio is not None]
            off = float(np.median(known)) - 1 if known else 0.0
            judged = any(name.startswith(METRICS_OF[what]) for name in names)
            if judged and abs(off) > MAX_CLOCK_DISAGREEMENT:
                text = f"{arm}: the client times {what} {off:+.1%} against what the server says of itself"
                checks.append(Check("V14", severity, off, text))
    return checks


METRICS_OF = {"decode": ("decode", "tpot", "itl"), "prefill": ("prefill", "ttft")}
"""First letters of the metrics that a timing of a server speaks of."""


def decode_ratio(sample: Sample) -> float | None:
    """First token to last, the client's seconds over the server's; None where there is no such figure."""
    if not sample.srv_decode_s or len(sample.chunk_t_ns) < 2:
        return None
    return (sample.chunk_t_ns[-1] - sample.chunk_t_ns[0]) / 1e9 / sample.srv_decode_s


def prefill_ratio(sample: Sample) -> float | None:
    """Sent to first token, the client's seconds over the server's queue and prefill; None where not told."""
    if not sample.srv_prefill_s or not sample.chunk_t_ns:
        return None
    return (sample.chunk_t_ns[0] - sample.t_send_ns) / 1e9 / (sample.srv_prefill_s + (sample.srv_queue_s or 0.0))


def steady(costs: Sequence[float], margin: float) -> bool:
    """Whether the drift over the last 5 slots of a heat soak (costs in s/token, in order) is below half the margin."""
    last = [math.log(cost) for cost in costs[-SOAK_SLOTS:]]
    return len(last) == SOAK_SLOTS and abs(drift(last)) < math.log1p(margin) / 2


def unsteady(values: Sequence[float], steady_start: bool | None) -> list[Check]:
    """V15, a note: no heat soak was made (None), or it did not settle (False); nothing after one that did.

    values: ln cost of the baseline in each valid block. The check's value is their drift from first to last block, 0
    where fewer than two are valid: then the words say that it is not known.
    """
    if steady_start:
        return []
    moved = math.expm1(drift(values))
    why = "no heat soak" if steady_start is None else "the heat soak did not settle"
    told = f"the baseline drifted by {moved:+.1%}" if len(values) > 1 else "how the baseline drifted is not known"
    return [Check("V15", Severity.NOTE, moved, f"{why}; {told}")]


def drift(values: Sequence[float]) -> float:
    """Change from the first to the last value along the least-squares line; 0 of fewer than two."""
    n = len(values)
    if n < 2:
        return 0.0
    place = np.arange(n) - (n - 1) / 2
    return float(place @ np.asarray(values) / (place @ place) * (n - 1))
