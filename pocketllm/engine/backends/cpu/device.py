"""The CPU backend's declaration: packed weights, native kernels for the best instruction set of the processor."""

import os
from typing import cast

from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops
from pocketllm.errors import OptionError, UnsupportedFeatureError

NAME = "cpu"
RANK = 10
ISA_VARIABLE = "POCKETLLM_CPU_ISA"
"""Names a lower instruction set than the best, to compare them."""
KV_DTYPE = "float16"
KV_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
INT8_SCALE_BYTES = 4
"""Bytes of the scale that each int8 key or value of a head has."""
BATCH_INVARIANT_WIDTH = 1024
"""Rows that are tried in the tests; no kernel looks at how many there are."""


def bid(facts: DeviceFacts, options: BackendOptions) -> BackendBid:
    """Runs wherever the native library was built. Raises OptionError for an instruction set that cannot be had."""
    try:
        capability = declare(facts, options)
    except UnsupportedFeatureError as error:
        return BackendBid(NAME, None, "; ".join(error.reasons))
    reason = f"{capability.isa} on {capability.threads} threads of {facts.cpu_name}"
    if facts.gpus:
        reason += f"; does not use the GPU ({', '.join(facts.gpus)})"
    return BackendBid(NAME, capability, reason)


def declare(facts: DeviceFacts, options: BackendOptions) -> BackendCapability:
    """What this backend can do on this machine. Raises UnsupportedFeatureError when it can do nothing."""
    from pocketllm.engine.backends.cpu.library import bytes_per_element
    from pocketllm.engine.backends.cpu.ops import ACTIVATION_DTYPES, CpuOps, numerics_version

    isa = chosen_isa()
    activation_dtype = options.activation_dtype or options.least_activations
    kv_dtype = options.kv_dtype or KV_DTYPE
    asked = (("--activation-dtype", activation_dtype, ACTIVATION_DTYPES), ("--kv-dtype", kv_dtype, KV_ELEMENT_BYTES))
    problems = [f"{flag} {dtype}: this backend has {', '.join(has)}" for flag, dtype, has in asked if dtype not in has]
    if problems:
        raise UnsupportedFeatureError("backend cpu", problems)
    ops = frozenset(name for name in vars(Ops) if not name.startswith("_") and hasattr(CpuOps, name))
    return BackendCapability(
        name=NAME,
        device="cpu",
        device_name=facts.cpu_name,
        isa=isa,
        threads=options.threads or facts.num_cores,
        num_cores=facts.num_cores,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        ops=ops,
        invariant_ops=ops,
        quant_types=frozenset(bytes_per_element()),
        weight_bytes_per_element=bytes_per_element(),
        kv_element_bytes=KV_ELEMENT_BYTES[kv_dtype],
        kv_scale_bytes=INT8_SCALE_BYTES if kv_dtype == "int8" else 0,
        attention_scratch_bytes=0,
        batch_invariant_width=BATCH_INVARIANT_WIDTH,
        memory_bytes=facts.available_bytes,
        numerics_version=numerics_version(isa, activation_dtype, kv_dtype),
    )


def chosen_isa() -> str:
    """The instruction set that `POCKETLLM_CPU_ISA` names, or the best one.

    Raises OptionError for one that this build or this processor does not have: nothing takes its place.
    """
    from pocketllm.engine.backends.cpu.library import usable_isas

    usable = usable_isas()
    wanted = os.environ.get(ISA_VARIABLE) or usable[0]
    if wanted not in usable:
        raise OptionError(f"{ISA_VARIABLE}={wanted!r} cannot be had here; there are {', '.join(usable)}")
    return wanted


def open_backend(facts: DeviceFacts, options: BackendOptions) -> Backend:
    """Start the threads and bind the operations."""
    from pocketllm.engine.backends.cpu.ops import CpuOps

    capability = declare(facts, options)
    ops = CpuOps(capability.threads, capability.activation_dtype, capability.kv_dtype, capability.isa)
    return Backend(capability, cast(Ops, ops))  # all that `capability.ops` names; a plan refuses what needs more
