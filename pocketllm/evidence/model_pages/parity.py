"""A table of families: what tiny checkpoints of each prove against an outside oracle, from their records; pure."""

from collections.abc import Iterator, Mapping, Sequence

from pocketllm.evidence.ladder import Evidence
from pocketllm.evidence.model_pages.source import Source
from pocketllm.evidence.model_pages.tables import NO_RECORDS, SHORT_ID, table, targets

PARITY_HEAD = ("family", "device", "quant types", "largest NMSE", "limit", "records")
OF_FAMILY = "family:"
"""How a parity row's subject begins where a tiny checkpoint stands for its family."""


def parity_part(model: str, source: Source) -> Iterator[str]:
    """One line a family and device class, of the latest record of each tiny checkpoint."""
    groups = grouped(source.evidence)
    if not groups:
        yield NO_RECORDS
        return
    yield from table(PARITY_HEAD, [line(*place, items) for place, items in sorted(groups.items())])
    latest = [items[-1] for items in groups.values()]
    yield from targets({item.run_id[:SHORT_ID]: source.address(item.path) for item in latest})


def grouped(evidence: Sequence[Evidence]) -> Mapping[tuple[str, str], list[Evidence]]:
    """By architecture and device class: each checkpoint's latest record, oldest first."""
    newest: dict[tuple[str, str, str], Evidence] = {}
    for item in sorted(evidence, key=lambda item: item.run_id):
        if item.kind == "parity" and any(str(row.get("subject")).startswith(OF_FAMILY) for row in item.rows):
            newest[str(item.model.get("architecture")), item.device_class, str(item.model.get("name"))] = item
    found: dict[tuple[str, str], list[Evidence]] = {}
    for (architecture, device, _), item in sorted(newest.items(), key=lambda pair: pair[1].run_id):
        found.setdefault((architecture, device), []).append(item)
    return found


def line(architecture: str, device: str, items: Sequence[Evidence]) -> tuple[str, ...]:
    """A family's cells: every quant type compared, the worst comparison, and a link to the latest record of several."""
    rows = [row for item in items for row in item.rows]
    worst = max(rows, key=lambda row: float(row.get("nmse") or 0) / float(row.get("tolerance") or 1))
    types = sorted(frozenset().union(*(item.quant_types for item in items)))
    limit = f"{worst.get('tolerance'):.0e}" if all(row.get("passed") for row in rows) else "not kept"
    count = f"{len(items)}, the latest " if len(items) > 1 else ""
    label = items[-1].run_id[:SHORT_ID]
    return f"`{architecture}`", device, ", ".join(types), f"{worst.get('nmse'):.1e}", limit, f"{count}[here][{label}]"
