"""What a backend package is: a `device` module that bids for this machine and opens what it bid."""

from dataclasses import dataclass
from typing import Protocol

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops


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
