"""The reference backend's declaration: plain torch in float32 on the CPU."""

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops

NAME = "reference"
RANK = 0
DTYPE = "float32"
NUMERICS_VERSION = "reference-1"
BATCH_INVARIANT_WIDTH = 1024
"""Rows that were tried; `open_backend` measures again on the machine at hand and declares 1 where it does not hold."""


def bid(facts: DeviceFacts, options: BackendOptions) -> BackendBid:
    """Runs wherever torch is installed, in float32."""
    problems = ["torch is not installed: pip install torch"] if find_spec("torch") is None else []
    asked = {"--activation-dtype": options.activation_dtype, "--kv-dtype": options.kv_dtype}
    problems += [
        f"{flag} {dtype}: this backend has {DTYPE} only" for flag, dtype in asked.items() if dtype not in (None, DTYPE)
    ]
    if problems:
        return BackendBid(NAME, None, "; ".join(problems))
    capability = declare(facts, options)
    reason = f"{DTYPE} on {capability.threads} threads of {facts.cpu_name}, torch {torch_version()}"
    if facts.gpus:
        reason += f"; does not use the GPU ({', '.join(facts.gpus)})"
    return BackendBid(NAME, capability, reason)


def declare(facts: DeviceFacts, options: BackendOptions) -> BackendCapability:
    """What this backend can do on this machine."""
    from pocketllm.engine.weights.quant import known_types

    ops = frozenset(name for name in vars(Ops) if not name.startswith("_"))
    return BackendCapability(
        name=NAME,
        device="cpu",
        device_name=facts.cpu_name,
        isa=None,
        threads=options.threads or facts.num_cores,
        num_cores=facts.num_cores,
        activation_dtype=DTYPE,
        kv_dtype=DTYPE,
        ops=ops,
        invariant_ops=ops,
        quant_types=frozenset(known_types()),
        weight_bytes_per_element=dict.fromkeys(known_types(), 4.0),
        kv_element_bytes=4,
        kv_scale_bytes=0,
        attention_scratch_bytes=4,
        batch_invariant_width=BATCH_INVARIANT_WIDTH,
        memory_bytes=facts.available_bytes,
        numerics_version=NUMERICS_VERSION,
    )


def open_backend(facts: DeviceFacts, options: BackendOptions) -> Backend:
    """Set torch's threads (for the whole process, as torch has it) and bind the operations."""
    bound_spinning()
    settle_sums()
    import torch

    from pocketllm.engine.backends.reference.ops import ReferenceOps
    from pocketllm.engine.backends.reference.rows import rows_are_invariant

    capability = declare(facts, options)
    torch.set_num_threads(capability.threads)
    if not rows_are_invariant():
        capability = replace(capability, batch_invariant_width=1)
    return Backend(capability, ReferenceOps())


def bound_spinning() -> None:
    """Let OpenMP's waiting threads sleep soon; it reads this when torch is first imported. A user's own word wins.

    They spin for milliseconds otherwise, and when another program wants a core, the spinning ones keep it from the one
    that has work. Figures: docs/decisions/0006.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def settle_sums() -> None:
    """Let MKL add in one order whatever the addresses and counts of rows; it reads this at its first product.

    Without it, processors with AMX give a row other bits beside other neighbors (`rows`). A user's own word wins.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def torch_version() -> str:
    """Version of the installed torch, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "of unknown version"
