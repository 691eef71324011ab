"""What a backend is asked and what it declares; read by the plan, `check`, the server and every record."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BackendOptions:
    """What the user asked of a backend; None: not said, and the capability shows what it became."""

    threads: int | None = None
    """CPU threads; None: the cores this process may use."""
    activation_dtype: str | None = None
    """What rows are rounded to before a matrix multiplies them."""
    kv_dtype: str | None = None
    """What cached keys and values are kept in."""
    least_activations: str = "int8"
    """What the model needs of a backend that has a choice, where the user says nothing: int8, mixed or int16."""
    batch_invariant: bool = False
    """Whether a row's bits must not depend on what else a step holds; a backend that declares no `invariant_ops` for
    it is refused."""


@dataclass(frozen=True)
class StepSizes:
    """What a backend takes where the user names no sizes: a few cores' worth, unless it says otherwise."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256
    kv_cache_bytes: int = 1 << 30
    """Most memory for keys and values, where one request of full length does not need more."""


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
    """Names of the `Ops` methods it has, with a cache in `kv_dtype`."""
    quant_types: frozenset[str]
    """GGUF type names whose matrices it can keep."""
    weight_bytes_per_element: Mapping[str, float]
    """Bytes of a matrix element once loaded, by quant type; a type not named takes what it takes in the file."""
    kv_element_bytes: float
    """Bytes that one number of a key or a value takes in the cache."""
    kv_scale_bytes: int
    """Bytes beside the numbers of each head's key and of its value."""
    attention_scratch_bytes: int
    """Working memory of attention for each query head, token of a step and key of its sequence, over one layer."""
    batch_invariant_width: int
    """Rows of a step within which a row's result does not depend on its neighbors."""
    memory_bytes: int | None
    """Memory that weights and cache may use; None when it cannot be read."""
    numerics_version: str
    """Changes whenever the same input may give other bits; part of a golden's hard key."""
    wider_ops: frozenset[str] = frozenset()
    """Those that it has with a cache of wider numbers alone."""
    sizes: StepSizes = StepSizes()
    """Of steps and of their cache, where the user names none."""
    step_widths: tuple[int, ...] = (1,)
    """Numbers of requests in a step that kernels or graphs are made for when first seen, in ascending order."""
    num_cores: int | None = None
    """Cores this process may use, of a backend whose threads they run; None: not told."""
    max_steps_in_flight: int = 1
    """1: a step has been computed when its launch returns, so nothing is gained by launching the next one before its
    tokens are known. 2: it has not, and something is."""
    invariant_ops: frozenset[str] = frozenset()
    """Operations that give a token the same bits beside any others, up to batch_invariant_width rows a step, and
    however its sequence was cut into steps: what `--batch-invariant` asks for. Empty where the backend was not asked,
    or does not promise it."""
    answers_apart: bool = False
    """Whether that takes to be told which tokens are of answers (`ForwardBatch.answers`), since those have other bits
    than the same tokens in a prompt."""


@dataclass(frozen=True)
class BackendBid:
    """An installed backend's answer to `could you run here?`."""

    name: str
    capability: BackendCapability | None
    reason: str
    """Why not, when `capability` is None; otherwise what it would run on."""
