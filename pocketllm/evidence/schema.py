"""The run record's schema: which columns a row has, which keys a run document has, and what is refused.

Types never change: a new meaning is a new column and a new SCHEMA_VERSION, and readers take the union of columns by
name. Importing this module costs nothing: pyarrow comes in late.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from pocketllm.errors import RecordError
from pocketllm.evidence.columns import COLUMNS

SCHEMA_VERSION = "1.3"
DOCUMENT_KEY = b"pocketllm.run"
"""Key of the run document among a Parquet file's key-value metadata."""
DIGEST_KEY = b"pocketllm.run.sha256"
"""Key of the run document's digest, beside it."""

KINDS = tuple(COLUMNS)

WRITER_KEYS = ("schema", "kind", "run_id", "started_utc", "finished_utc", "complete", "rows_sha256")
"""Document keys that the writer fills and nobody else may give."""
START_KEYS: Mapping[str, Sequence[str]] = {
    "bench": ("device_class", "scenario", "arms", "schedule", "seed"),
    "golden": ("device_class", "model"),
    "parity": ("device_class", "model"),
    "inspect": ("device_class", "model"),
    "ladder": (),
    "calibration": ("device_class", "model", "scenario", "runs"),
    "imported": ("source",),
    "soak": ("device_class", "model", "clients", "seed"),
}
"""Document keys that must be given when a record is begun."""
END_KEYS: Mapping[str, Sequence[str]] = {
    "bench": ("checks", "results", "valid", "null_valid", "served"),
    "golden": (),
    "parity": (),
    "inspect": ("report",),
    "ladder": (),
    "calibration": ("summary", "history_key"),
    "imported": (),
    "soak": ("outcome",),
}
"""Document keys that a complete record carries besides; `finish` adds them."""


SHAPES: Mapping[str, Any] = {
    **dict.fromkeys(("run_id", "schema", "kind", "started_utc", "scenario", "rules_sha256"), str),
    **{name: {} for name in ("tool", "code", "plan", "options", "history_key")},
    "isolation": frozenset({"toggle", "process", "attach"}),
    "argv": [str],
    "model": {"name": str, "sha256": str, "architecture": str, "quant_types": [str]},
    "machine": {"hard": {"gpus": [str]}, "volatile": {}},
    "workload": {"n_prompt": int, "n_out": int, "points": [{"label": str}]},
    "arms": [
        {"name!": str, "role!": frozenset({"baseline", "candidate", "null"}), "plan": {"options": {}}, "options": {}}
    ],
    "schedule": [[str]],
    "margin": {"*": float},
    "medians": {"*": {"*": float}},
    "checks": [{"code!": str, "severity!": frozenset({"run", "block", "note"}), "detail!": str, "blocks": [int]}],
    "results": [
        {
            **dict.fromkeys(("metric!", "arm!", "role!", "unit", "n_unit", "reason", "floor_source"), str),
            **dict.fromkeys(("ratio!", "low!", "high!", "estimate", "margin"), float),
            **dict.fromkeys(("n", "se", "df", "sd", "p_holm", "floor", "mde"), float),
            "primary": bool,
            "verdict": frozenset({"INVALID", "FASTER", "SLOWER", "SAME", "SMALL", "NOT DISTINGUISHABLE"}),
        }
    ],
    **dict.fromkeys(("blocks", "valid_blocks", "wall_s"), float),
    "notes": [str],
}
"""What readers rely on in a document: types (float: any number), the values of a set, objects by key (`!`: must be
there, `*`: any), lists of one shape. Anything else may be absent or null, and other keys hold what they like."""


def check_document(document: Any) -> dict[str, Any]:
    """A run document as it was read from a file; RecordError says what in it no reader could use."""
    if not isinstance(document, dict) or document.get("kind") not in list(COLUMNS):
        raise RecordError(f"its run document is of no known kind; known: {', '.join(KINDS)}")
    version = str(document.get("schema"))
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise RecordError(f"it has schema {version}: this pocketllm reads {SCHEMA_VERSION}; use a newer one")
    wrong = misshapen(document, SHAPES, "")
    if wrong:
        raise RecordError(f"its run document is damaged: {wrong}")
    return document


def misshapen(value: Any, shape: Any, where: str) -> str | None:
    """The first value that is not of its shape, in words; None where all are."""
    parts: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(shape, list):
        fits = isinstance(value, list)
        parts = ((item, shape[0], f"{where}[{place}]") for place, item in enumerate(value if fits else ()))
    elif isinstance(shape, Mapping):
        fits = isinstance(value, Mapping)
        needed = [key[:-1] for key in shape if key.endswith("!")] if fits else []
        if absent := [key for key in needed if value.get(key) is None]:
            return f"{where} has no {absent[0]}"
        known = {key.rstrip("!"): inner for key, inner in shape.items()}
        parts = (
            (item, known.get(key, known.get("*")), f"{where}.{key}".lstrip("."))
            for key, item in (value.items() if fits else ())
            if item is not None
        )
    elif isinstance(shape, frozenset):
        fits = isinstance(value, str) and value in shape
    else:
        fits = shape is None or (
            isinstance(value, int | float if shape is float else shape)
            and (shape is bool or not isinstance(value, bool))
        )
    if not fits:
        return f"{where} is {value!r:.40}"
    return next((wrong for part in parts if (wrong := misshapen(*part))), None)


def check_kind(kind: str) -> str:
    """The kind itself; RecordError naming the known ones when there is no such kind."""
    if kind not in COLUMNS:
        raise RecordError(f"no record kind {kind!r}; known: {', '.join(KINDS)}")
    return kind


def missing_keys(kind: str, document: Mapping[str, Any], wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Keys of `wanted[kind]` that the document lacks, in declared order."""
    return [key for key in wanted[kind] if key not in document]


def arrow_schema(kind: str) -> Any:
    """The declared pyarrow schema of a kind's rows: an all-None column keeps its type, said instead of guessed."""
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list<int32>": pa.list_(pa.int32()),
        "list<int64>": pa.list_(pa.int64()),
        "list<string>": pa.list_(pa.string()),
        "list<double>": pa.list_(pa.float64()),
    }
    return pa.schema([pa.field(name, types[kind_of]) for name, kind_of in COLUMNS[check_kind(kind)].items()])


def check_rows(kind: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as plain values of the declared types; a missing key is None, NaN becomes None.

    Raises RecordError for an unknown key (pyarrow's from_pylist would drop it without a word) or a wrong type.
    """
    columns = COLUMNS[check_kind(kind)]
    return [check_row(kind, columns, row) for row in rows]


def check_row(kind: str, columns: Mapping[str, str], row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of check_rows."""
    unknown = [key for key in row if key not in columns]
    if unknown:
        raise RecordError(f"a {kind} row has no column {unknown[0]!r}; known: {', '.join(columns)}")
    return {name: check_value(f"{kind} row, {name}", kind_of, row.get(name)) for name, kind_of in columns.items()}


def check_value(where: str, kind_of: str, value: Any) -> Any:
    """A value as the plain Python type of its column, or RecordError; None stays None."""
    if value is None:
        return None
    if kind_of.startswith("list<"):
        if not isinstance(value, (list, tuple)) and not is_array(value):
            raise RecordError(f"{where}: {type(value).__name__} is not a list")
        return [check_value(f"{where}[{i}]", kind_of[5:-1], item) for i, item in enumerate(value)]
    value = unwrap(value)
    if kind_of == "bool" and isinstance(value, bool):
        return value
    if kind_of == "string" and isinstance(value, str):
        # a lone surrogate (half an emoji from a careless client) has no UTF-8 form
        return value.encode("utf-8", "replace").decode("utf-8")
    if kind_of in ("int32", "int64") and isinstance(value, Integral) and not isinstance(value, bool):
        number, bits = int(value), int(kind_of[3:])
        if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
            raise RecordError(f"{where}={number} does not fit {kind_of}")
        return number
    if kind_of == "double" and isinstance(value, Real) and not isinstance(value, bool):
        return None if math.isnan(value) else float(value)
    raise RecordError(f"{where}={value!r} is a {type(value).__name__}, not {kind_of}")


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array, without importing numpy."""
    return type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", 0) == 1


def unwrap(value: Any) -> Any:
    """A numpy scalar or an Enum as the plain value inside it; anything else as it is."""
    if isinstance(value, Enum):
        return value.value
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def plain(value: Any, where: str = "document") -> Any:
    """A run document's value as JSON can hold it: a number that is not finite becomes null, a path its file name.

    Raises RecordError naming the key when something has no JSON form.
    """
    value = unwrap(value)
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {item.name: plain(getattr(value, item.name), f"{where}.{item.name}") for item in fields}
    if isinstance(value, Mapping):
        return {str(unwrap(key)): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, where) for item in value), key=str)
    if isinstance(value, (list, tuple)) or is_array(value):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise RecordError(f"{where} is a {type(value).__name__}, which a run document cannot hold")


def rows_sha256(rows: Iterable[Mapping[str, Any]]) -> str:
    """Digest of rows as they were checked: a value that is None counts as absent, so a later column changes nothing."""
    digest = hashlib.sha256()
    for row in rows:
        told = {name: value for name, value in row.items() if value is not None}
        digest.update(json.dumps(told, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8") + b"\n")
    return digest.hexdigest()


def document_sha256(text: bytes) -> bytes:
    """Digest of a run document's JSON text, in hex letters."""
    return hashlib.sha256(text).hexdigest().encode()
