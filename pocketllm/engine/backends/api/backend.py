"""What a backend package is: a `device` module that bids for this machine and opens what it bid."""

from dataclasses import dataclass
from typing import Protocol

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops


@dataclass(frozen=True)
class BackendOptions:
    """What the user asked of a backend; None: not said, and the capability shows what it became."""

    threads: int | None = None
    """CPU threads; None: the cores this process may use."""
    activation_dtype: str | None = None
    """What rows are rounded to before a matrix multiplies them."""
    kv_dtype: str | None = None
    """What cached keys and values are kept in."""


@dataclass(frozen=True)
class Backend:
    """One opened backend: what it declares, and its operations, bound once."""

    capability: BackendCapability
    ops: Ops


class DeviceModule(Protocol):
    """The module `device` of a vendor folder, or what an entry point of group `pocketllm.backends` names."""

    RANK: int
    """`auto` takes the highest rank among the backends that can run."""

    def bid(self, facts: DeviceFacts, options: BackendOptions) -> BackendBid:
        """Say what would run here under these options, or every reason why nothing would; imports no heavy library."""

    def open_backend(self, facts: DeviceFacts, options: BackendOptions) -> Backend:
        """Set the device up and bind the operations, for options that it has bid for."""
