"""Metadata that was made rather than read: the same questions are answered as of a GGUF header."""

from collections.abc import Iterator, Mapping
from typing import Any

from pocketllm.engine.weights.gguf import ArrayInfo, Metadata

_TYPES = {bool: "bool", int: "int64", float: "float64", str: "string"}


class MadeMetadata(Metadata):
    """Values by GGUF key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._made = dict(values)

    def __getitem__(self, key: str) -> Any:
        value = self._made[key]
        return list(value) if isinstance(value, list) else value

    def __contains__(self, key: object) -> bool:
        return key in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def array(self, key: str) -> ArrayInfo | None:
        value = self._made[key]
        if not isinstance(value, list):
            return None
        return ArrayInfo(_TYPES[type(value[0])] if value else "string", len(value))

    def head(self, key: str, count: int) -> list[Any]:
        return list(self._made[key][:count])

    def type_name(self, key: str) -> str:
        return "array" if isinstance(self._made[key], list) else _TYPES[type(self._made[key])]

    def close(self) -> None:
        pass
