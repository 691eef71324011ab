"""What a backend declares about itself; read by the plan, `check`, the server and every record."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapability:
    """One backend on this machine, before any weight is read."""

    name: str
    device: str
    """Device class, `cpu` or `cuda`: with the name of the hardware in `device_name`."""
    device_name: str
    isa: str | None
    """Instruction set that its kernels were taken from; None where that is not the backend's choice."""
    threads: int
    """CPU threads that it computes with."""
    activation_dtype: str
    """What rows are rounded to before a matrix multiplies them."""
    kv_dtype: str
    """What cached keys and values are kept in."""
    ops: frozenset[str]
    """Names of the `Ops` methods it has."""
    quant_types: frozenset[str]
    """GGUF type names whose matrices it can keep."""
    weight_bytes_per_element: Mapping[str, float]
    """Bytes of a matrix element once loaded, by quant type; a type not named takes what it takes in the file."""
    kv_element_bytes: float
    """Bytes that one value of a key or a value takes in the cache, its share of scales included."""
    attention_scratch_bytes: int
    """Working memory of attention for each query head, token of a step and key of its sequence, over one layer."""
    batch_invariant_width: int
    """Rows of a step within which a row's result does not depend on its neighbors."""
    memory_bytes: int | None
    """Memory that weights and cache may use; None when it cannot be read."""
    numerics_version: str
    """Changes whenever the same input may give other bits; part of a golden's hard key."""


@dataclass(frozen=True)
class BackendBid:
    """An installed backend's answer to `could you run here?`."""

    name: str
    capability: BackendCapability | None
    reason: str
    """Why not, when `capability` is None; otherwise what it would run on."""
