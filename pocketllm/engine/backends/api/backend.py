"""What a backend package is: a `device` module that bids for this machine and opens what it bid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, Int32Array
from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops, Weight

Calls = Sequence[Callable[[], Any]]
"""Made one after another."""


class Unit(Protocol):
    """Calls that are launched as one."""

    def seconds(self) -> float:
        """Make them, on the device's clock: none of the host's time is in it."""


class Peer(Protocol):
    """A library's own operations, to stand beside a backend's; calls in turn go through `Probe.cold_bytes`."""

    @property
    def name(self) -> str:
        """And its version."""

    def product(self, rows: int, width: int, out: int) -> Calls:
        """[rows, width] · [out, width]ᵀ, both in 16 bits."""

    def rms_norm(self, rows: int, width: int) -> Calls:
        """Of whole rows, float32."""

    def attention(self, spec: AttentionSpec, seqs: int, queries: int, keys: int) -> Calls:
        """Causal, of the latest `queries` of `keys` tokens of each sequence, which lie one after another in 16 bits; no
        calls where it has none for that."""


class Probe(Protocol):
    """What a backend lends to a benchmark of its operations where a call takes the host longer than the device."""

    @property
    def cold_bytes(self) -> int:
        """What calls in turn must go through so that none finds its own in a cache, as no layer of a model does."""

    @property
    def peer(self) -> Peer:
        """What others would use here."""

    def resident(self, given: ForwardBatch | Int32Array) -> Any:
        """A batch, or numbers of rows, as captured steps hand them to operations: on the device already."""

    def copy(self, weight: Weight) -> Weight:
        """The same matrix, or matrices of experts, elsewhere in memory."""

    def finish(self, result: Any) -> None:
        """Compute what an operation has put off until its result is read; None: it was in place."""

    def together(self, calls: Calls) -> Unit:
        """Calls as one launch, each of them finished. RuntimeError where they cannot be."""

    def ceilings(self) -> Mapping[str, float]:
        """Measured now, in 10⁹ a second.

        `copy_gbs`: bytes of a copy, both read and written; `bf16_gflops`: of a product of random bfloat16 matrices.
        """


@dataclass(frozen=True)
class Backend:
    """One opened backend: what it declares, and its operations, bound once."""

    capability: BackendCapability
    ops: Ops
    probe: Probe | None = None
    """None: operations have finished when `synchronize` returns, and calls take no longer than they do."""


class DeviceModule(Protocol):
    """The module `device` of a vendor folder, or what an entry point of group `pocketllm.backends` names."""

    RANK: int
    """`auto` takes the highest rank among the backends that can run."""

    def bid(self, facts: DeviceFacts, options: BackendOptions) -> BackendBid:
        """Say what would run here under these options, or every reason why nothing would; imports no heavy library."""

    def open_backend(self, facts: DeviceFacts, options: BackendOptions) -> Backend:
        """Set the device up and bind the operations, for options that it has bid for."""
