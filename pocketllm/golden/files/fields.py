"""Strict reading and readable writing of fixture files: every complaint names the file and the key; pure."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.errors import RecordError

DIGEST = re.compile(r"[0-9a-f]{64}")
WIDTH = 110


class Fields:
    """The keys of one JSON object, taken one by one; `end` refuses what nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values = dict(values)
        self._left = set(values)
        self._where = where
        self._prefix = prefix

    @classmethod
    def of_text(cls, text: str, where: str) -> "Fields":
        """Parse a file's text; RecordError unless it is one JSON object without repeated keys."""
        try:
            values = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
        except ValueError as error:
            raise RecordError(f"{where}: not valid JSON ({error}); restore it, or record the case again") from error
        if not isinstance(values, dict):
            raise RecordError(f"{where}: must hold one JSON object")
        return cls(values, where)

    def error(self, key: str, problem: str) -> RecordError:
        """The refusal for one key; an empty key stands for the object itself."""
        name = ".".join(part for part in (self._prefix, key) if part)
        return RecordError(f"{self._where}: {name}: {problem}")

    def child(self, key: str, values: Mapping[str, Any]) -> "Fields":
        """The fields of an object that lies under `key`."""
        return Fields(values, self._where, ".".join(part for part in (self._prefix, key) if part))

    def has(self, key: str) -> bool:
        """Whether the object has this key."""
        return key in self._values

    def _take(self, key: str, kind: type | tuple[type, ...], name: str, optional: bool = False) -> Any:
        self._left.discard(key)
        if key not in self._values:
            if optional:
                return None
            raise self.error(key, "is missing")
        value = self._values[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {name}, not {json.dumps(value)[:40]}")
        return value

    def literal(self, key: str, wanted: int) -> None:
        """A number that must be exactly this one."""
        if self._take(key, int, "a number") != wanted:
            raise self.error(key, f"is {self._values[key]}, this version reads {wanted}")

    def text(self, key: str, empty: bool = False) -> str:
        """A text, not empty unless it may be."""
        value: str = self._take(key, str, "a text")
        if not value and not empty:
            raise self.error(key, "must not be empty")
        return value

    def choice(self, key: str, known: Sequence[str]) -> str:
        """One of the known words."""
        value = self.text(key)
        if value not in known:
            raise self.error(key, f"must be one of {', '.join(known)}, not {value!r}")
        return value

    def digest(self, key: str, optional: bool = False) -> str | None:
        """A sha256 in lower-case hex."""
        value: str | None = self._take(key, str, "a sha256", optional)
        if value is not None and not DIGEST.fullmatch(value):
            raise self.error(key, "must be a sha256 of 64 lower-case hex digits")
        return value

    def integer(self, key: str) -> int:
        """A whole number, zero or more."""
        value: int = self._take(key, int, "a whole number")
        if value < 0:
            raise self.error(key, "must not be negative")
        return value

    def boolean(self, key: str) -> bool:
        """True or false."""
        value: bool = self._take(key, bool, "true or false")
        return value

    def number(self, key: str, optional: bool = False) -> float:
        """A finite number; NaN stands for an optional one that is absent."""
        value = self._take(key, (int, float), "a number", optional)
        return math.nan if value is None else float(value)

    def object(self, key: str) -> dict[str, Any]:
        """A JSON object."""
        value: dict[str, Any] = self._take(key, dict, "an object")
        return value

    def _list(self, key: str, kind: type | tuple[type, ...], name: str, optional: bool = False) -> list[Any]:
        values = self._take(key, list, f"a list of {name}", optional)
        for value in values or ():
            if not isinstance(value, kind) or isinstance(value, bool):
                raise self.error(key, f"must hold {name} only, not {json.dumps(value)[:40]}")
        return list(values or ())

    def objects(self, key: str, optional: bool = False) -> list[dict[str, Any]]:
        """A list of JSON objects."""
        return self._list(key, dict, "objects", optional)

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._list(key, str, "texts")

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        return tuple(float(value) for value in self._list(key, (int, float), "numbers"))

    def ids(self, key: str, empty: bool = False) -> tuple[int, ...]:
        """Token ids: whole, not negative, at least one unless there may be none."""
        values = self._list(key, int, "token ids")
        if (not values and not empty) or min(values, default=0) < 0:
            raise self.error(key, "must hold at least one token id, none negative")
        return tuple(values)

    def rest(self, known: Sequence[str]) -> dict[str, Any]:
        """Everything that is left, provided all of it is known."""
        unknown = sorted(self._left - set(known))
        if unknown:
            raise self.error(unknown[0], f"is unknown; known: {', '.join(known)}")
        values = {key: self._values[key] for key in known if key in self._left}
        self._left.clear()
        return values

    def end(self) -> None:
        """Refuse a key that nobody read: it would be silently without effect."""
        if self._left:
            raise self.error(min(self._left), "is unknown here")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return values


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def render(document: Mapping[str, Any]) -> str:
    """A document as JSON that reads and diffs well: keys in the order given, id lists wrapped, one line a position."""
    return _render(document, "") + "\n"


def _render(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{_flat(key)}: {_render(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        flat = _flat(value)
        if len(flat) + len(indent) <= WIDTH and not isinstance(value[0], Mapping):
            return flat
        is_numeric = all(type(item) in (int, float) for item in value)
        items = [_flat(item) for item in value]
        items = _wrapped(items, WIDTH - len(inner)) if is_numeric else items
        return "[\n" + ",\n".join(inner + item for item in items) + f"\n{indent}]"
    return _flat(value)


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _wrapped(items: Sequence[str], width: int) -> list[str]:
    """Items joined by `, ` into lines of at most `width` characters."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 2 <= width:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines
