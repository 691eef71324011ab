"""Read a checkpoint's header: values that must be there, and every reason why a family cannot take it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from pocketllm.errors import GGUFError

MOST_NAMED = 8
"""Tensors that a reason names one by one before it only counts them."""
NEXTN = "nextn_predict_layers"
"""How many of a file's last layers predict further tokens; they are not computed, and so not loaded."""


def whole_number(value: Any) -> int | None:
    """value as an int; None when it is not a whole number (a truth value is none)."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value)


class HeaderReader:
    """Typed access to `<architecture>.*` keys.

    A key that is absent or no usable value becomes a sentence in `problems`, and reads as 1 so that reading goes on.
    """

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.problems: list[str] = []

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; default None makes it a key that must be there."""
        return self._count(name, self.metadata.get(f"{self.architecture}.{name}", default))

    def count_or_none(self, name: str) -> int:
        """A whole number; 0 where the key is absent."""
        value = self.metadata.get(f"{self.architecture}.{name}", 0)
        number = whole_number(value)
        if number is None or number < 0:
            return self._problem(name, value, "it must be a whole number, or 0 for none")
        return number

    def one_count(self, name: str, default: int | None = None) -> int:
        """A count that may be written once a layer, as long as all layers have the same."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if not is_list(value):
            return self._count(name, value)
        if not value or any(size != value[0] for size in value):
            return self._problem(name, value, "layers of different sizes are not supported")
        return self._count(name, value[0])

    def counts(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A count for each layer, which may be written once for all."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        if not is_list(value):
            # a number of layers that no file could fill is refused later, by the number of tensors
            return (self._count(name, value),) * min(num_layers, 1 << 16)
        own = self.of_layers(value, num_layers)
        if len(own) != num_layers or any((whole_number(count) or 0) < 1 for count in own):
            return (self._problem(name, value, "it must be a whole number above 0 for each layer"),)
        return tuple(int(count) for count in own)

    def of_layers(self, listed: Sequence[Any], num_layers: int) -> Sequence[Any]:
        """What a list that may go on for layers that predict further tokens says of the others."""
        return listed[:num_layers] if len(listed) == num_layers + self.count_or_none(NEXTN) else listed

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
            return self._problem(name, value, "it must be a number above 0")
        return float(value)

    def positive_or_none(self, name: str) -> float | None:
        """A finite number above 0; None where the key is absent or 0, which is how GGUF says that there is none."""
        return self.positive(name) if self.metadata.get(f"{self.architecture}.{name}", 0.0) != 0.0 else None

    def num_layers(self) -> int:
        """Layers that are computed: `block_count` without those that predict further tokens, which come last."""
        num_blocks, num_nextn = self.count("block_count"), self.count_or_none(NEXTN)
        if num_nextn >= num_blocks:
            self.problems.append(
                f"{self.architecture}.{NEXTN}={num_nextn} leaves none of the layers ({self.architecture}.block_count)"
            )
        return max(num_blocks - num_nextn, 1)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, bool | np.bool_):
            self._problem(name, value, "it must be true or false")
        return bool(value) if isinstance(value, bool | np.bool_) else default

    def has(self, name: str) -> bool:
        """Whether the key is there."""
        return f"{self.architecture}.{name}" in self.metadata

    def not_neutral(self, neutral: Mapping[str, Any]) -> list[str]:
        """A reason for each key that asks for a computation this family does not have."""
        found = {name: self.metadata.get(f"{self.architecture}.{name}", value) for name, value in neutral.items()}
        return [
            f"{self.architecture}.{name}={short(value)} is not supported by family {self.architecture}"
            for name, value in found.items()
            if value != neutral[name]
        ]

    def require_clean(self) -> None:
        """GGUFError with every problem found so far, if there is one."""
        if self.problems:
            raise GGUFError("; ".join(self.problems))

    def _count(self, name: str, value: Any) -> int:
        number = whole_number(value)
        if number is None or number < 1:
            return self._problem(name, value, "it must be a whole number above 0")
        return number

    def _problem(self, name: str, value: Any, why: str) -> int:
        found = "absent" if value is None else short(value)
        self.problems.append(f"metadata key {self.architecture}.{name} is {found}: {why}")
        return 1


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a metadata value is an array, of whatever sequence type."""
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(list(value[:8])) if is_list(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Header(Protocol):
    """The part of a checkpoint that is there before a weight is read; `contract.Checkpoint` has more."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF metadata by key."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Tensor descriptions by name, each with its `shape`."""


def nextn_tensors(checkpoint: Header) -> frozenset[str]:
    """Names of the tensors of layers that predict further tokens: they are not computed, and so not loaded."""
    architecture = checkpoint.metadata.get("general.architecture")
    header = HeaderReader(checkpoint.metadata, str(architecture))
    if not header.has(NEXTN):
        return frozenset()
    first = header.num_layers()
    if header.problems:
        return frozenset()
    numbers = {name: name.split(".")[1] for name in checkpoint.tensors if name.startswith("blk.")}
    return frozenset(name for name, number in numbers.items() if number.isdecimal() and int(number) >= first)


def filled(shape: Sequence[int], rank: int) -> tuple[Any, ...]:
    """A shape with as many axes: llama.cpp's tools leave leading ones out when they write a tensor.

    >>> filled((64,), 2), filled((3, 4), 2)
    ((1, 64), (3, 4))
    """
    return (1,) * (rank - len(shape)) + tuple(shape)


def misfit(checkpoint: Header, needed: Mapping[str, Sequence[int]], optional: Mapping[str, Sequence[int]]) -> list[str]:
    """Reasons for tensors that are missing, of another shape, or not known to the family.

    A tensor that would be ignored is a reason too: a model without it would not be the one in the file. Layers that
    predict further tokens are no part of the model.
    """
    tensors = checkpoint.tensors
    known = {**needed, **optional}
    missing = [name for name in needed if name not in tensors]
    unread = nextn_tensors(checkpoint)
    strange = [name for name in tensors if name not in known and name not in unread]
    wrong = [
        f"tensor {name} has shape {tuple(tensors[name].shape)}, expected {tuple(shape)}"
        for name, shape in known.items()
        if name in tensors and filled(tensors[name].shape, len(shape)) != tuple(shape)
    ]
    reasons = [
        *listed("missing tensors", missing),
        *wrong[:MOST_NAMED],
        *listed("tensors the family does not know", strange),
    ]
    if len(wrong) > MOST_NAMED:
        reasons.append(f"{len(wrong) - MOST_NAMED} more tensors have another shape than expected")
    return reasons


def listed(what: str, names: Sequence[str]) -> list[str]:
    """One reason naming the first few, or none."""
    if not names:
        return []
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return [f"{what}: {', '.join(names[:MOST_NAMED])}{more}"]
