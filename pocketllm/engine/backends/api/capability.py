"""What a backend declares about itself; read by the plan, `check`, the server and every record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendCapability:
    """One backend on this machine, before any weight is read."""

    name: str
    device: str
    """Device class, `cpu` or `cuda`: with the name of the hardware in `device_name`."""
    device_name: str
    ops: frozenset[str]
    """Names of the `Ops` methods it has."""
    quant_types: frozenset[str]
    """GGUF type names whose matrices it can keep."""
    weight_bytes_per_element: float | None
    """Bytes a weight takes once loaded; None when it stays packed as in the file."""
    kv_element_bytes: int
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
