"""Tables of what is proved and of what is declared, in Markdown; pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pocketllm.evidence.ladder import Evidence, LadderRow, Proof
from pocketllm.evidence.model_pages.source import Source

NO_RECORDS = "No records yet: nothing is claimed."
MATRIX_HEAD = ("model", "architecture", "device", "rung")
LADDER_HEAD = ("model", "architecture", "device", "rung", "proved by", "next rung lacks")
FEATURES_HEAD = ("what", "supported", "as told by")
OPERATIONS = "required_ops"
"""The declared field that is long to tell, and comes last."""
NOTHING: tuple[Any, ...] = (frozenset(), {})
"""What a field is declared as where there is nothing to tell."""
SHORT_ID = 16
"""Letters of a record's id that label its links: ten of them are a time, so fewer could be one label for two."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table.

    >>> table(("a", "b"), [("1", "2 | 3")])
    ['| a | b |', '| --- | --- |', '| 1 | 2 \\\\| 3 |']
    """
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def targets(addresses: Mapping[str, str]) -> Iterator[str]:
    """What the links `[word][label]` above it lead to: long addresses stand in no table."""
    yield ""
    for label, address in addresses.items():
        yield f"[{label}]: {address}"


def rung_of(row: LadderRow) -> str:
    """A rung with its words."""
    return f"{row.rung} {row.words}"


# -- what is proved ----------------------------------------------------------------------------------------------------
def matrix_part(model: str, source: Source) -> Iterator[str]:
    """One line a model and device class, with a link to the model's page, which has the records."""
    rows = source.rows_of(model)
    if not rows:
        yield NO_RECORDS
        return
    cells = [(page_link(row.model, source), row.architecture, row.device_class, rung_of(row)) for row in rows]
    yield from table(MATRIX_HEAD, cells)


def page_link(model: str, source: Source) -> str:
    """A model's name, with a link where it has a page."""
    folder = "" if source.root.startswith("..") else "docs/models/"
    return f"[{model}]({folder}{model}.md)" if model in source.pages else f"`{model}`"


def ladder_part(model: str, source: Source) -> Iterator[str]:
    """What is proved, by which records; freshness is left to `pocketllm models`, for it changes by the day."""
    rows = source.rows_of(model)
    if not rows:
        yield NO_RECORDS
        return
    cells = [
        (f"`{row.model}`", row.architecture, row.device_class, rung_of(row), proof_links(row.proofs), row.missing)
        for row in rows
    ]
    yield from table(LADDER_HEAD, cells)
    proofs = [proof for row in rows for proof in row.proofs]
    if proofs:
        yield from targets({proof.run_id[:SHORT_ID]: source.address(proof.path) for proof in proofs})


def proof_links(proofs: Sequence[Proof]) -> str:
    """The records of a row, each once, by their kind."""
    kinds = {proof.run_id[:SHORT_ID]: kind_of(proof) for proof in proofs}
    return ", ".join(f"[{kind}][{label}]" for label, kind in kinds.items())


def kind_of(proof: Proof) -> str:
    """A proof's kind; a benchmark over HTTP is told apart."""
    return "served bench" if proof.what.startswith("served") else proof.kind


# -- what is declared --------------------------------------------------------------------------------------------------
def features_part(model: str, source: Source) -> Iterator[str]:
    """What the family declares and what the file holds, as its latest inspection told it."""
    inspection = latest_inspection(model, source)
    if inspection is None:
        yield NO_RECORDS
        return
    yield from table(FEATURES_HEAD, feature_rows(model, source))
    yield from targets({inspection.run_id[:SHORT_ID]: source.address(inspection.path)})


def latest_inspection(model: str, source: Source) -> Evidence | None:
    """The record of the last inspection of a model's weights."""
    return next((item for item in reversed(source.evidence_of(model)) if item.kind == "inspect"), None)


def feature_rows(model: str, source: Source) -> list[tuple[str, str, str]]:
    """Lines of the feature table: what, whether and how far it is supported, and who says so."""
    inspection = latest_inspection(model, source)
    if inspection is None:
        return []
    architecture = str(inspection.model.get("architecture"))
    declared = source.declared.get(architecture)
    family = f"family `{architecture}`"
    runs = f"yes, as {family}" if declared is not None else f"no: there is no family {architecture}"
    rows = [("runs", runs, "the families here")]
    own = {name: value for name, value in (declared or {}).items() if name not in ELSEWHERE and value not in NOTHING}
    rows += [(*feature(name, value), family) for name, value in own.items()]
    told_by = f"[inspection][{inspection.run_id[:SHORT_ID]}]"
    rows += [(what, told, told_by) for what, told in file_features(inspection.document.get("report") or {})]
    devices = [f"`{row.device_class}` (rung {row.rung})" for row in source.rows_of(model) if row.rung > 1]
    rows.append(("proved on", ", ".join(devices) or "no device yet", "the status above"))
    rows += [(*feature(OPERATIONS, declared[OPERATIONS]), family)] if declared and OPERATIONS in declared else []
    return rows


def plain(value: Any) -> str:
    """A declared value nobody has put into words yet."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset | set | tuple | list):
        return ", ".join(sorted(map(str, value))) or "none"
    return "not said" if value is None else str(value)


FEATURES: Mapping[str, tuple[str, Callable[[Any], str]]] = MappingProxyType(
    {
        OPERATIONS: ("operations asked of a backend", lambda value: ", ".join(f"`{op}`" for op in sorted(value))),
        "max_num_seqs": (
            "requests in one step",
            lambda value: "as many as the cache holds" if value is None else f"at most {value}",
        ),
        "least_activations": ("activations, if none are asked for", str),
        "wide": ("16 bits of `mixed` go into", plain),
        "supports_chunked_prefill": (
            "long prompts in pieces (`--prefill-chunk`)",
            lambda value: "yes" if value else "no: a prompt is computed whole",
        ),
    }
)
"""Fields of a family's declaration in the reader's words; one that is not here is told by its own name."""
ELSEWHERE = frozenset({OPERATIONS, "activation_bits"})
"""Fields that have no line of their own there: the last line tells the operations, `least_activations` the bits."""


def feature(name: str, value: Any) -> tuple[str, str]:
    """A declared field as a line of the table.

    >>> feature("max_num_seqs", None), feature("needs_rest", True)
    (('requests in one step', 'as many as the cache holds'), ('needs rest', 'yes'))
    """
    if name in FEATURES:
        what, tell = FEATURES[name]
        return what, tell(value)
    return name.replace("_", " "), plain(value)


def file_features(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a checkpoint's header says, as far as its inspection kept it."""
    memory, tokenizer = report.get("memory") or {}, report.get("tokenizer") or {}
    if "has_chat_template" in tokenizer:
        has_one = tokenizer["has_chat_template"]
        yield (
            "chat (`--chat`, `/v1/chat/completions`)",
            "yes, by the template in the file"
            if has_one
            else ("no template in the file: refused with a sentence; completions only"),
        )
    if memory.get("context_length"):
        yield "context", f"{memory['context_length']:,} tokens"
    types = [
        f"{entry['type']} ({entry['tensors']} tensor{'s' * (entry['tensors'] != 1)})"
        for entry in report.get("quant_types") or ()
    ]
    if types:
        yield "quant types in the file", ", ".join(types)
    if report.get("bits_per_weight"):
        yield "bits a weight", f"{report['bits_per_weight']:.2f}"
    if memory.get("weights_bytes"):
        yield "weights in memory, packed", f"{memory['weights_bytes'] / 2**20:,.0f} MiB"
    for dtype, num_bytes in (memory.get("kv_bytes_per_token") or {}).items():
        yield f"cache for a token in {dtype}", f"{num_bytes / 2**10:,.1f} KiB"
