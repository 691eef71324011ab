"""The CUDA backend's declaration: packed weights and Triton kernels on the first NVIDIA GPU."""

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple, cast

from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions, StepSizes
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.cuda.steps.widths import WIDTHS

NAME = "cuda"
RANK = 20
ACTIVATION_DTYPE = "int16"
KV_DTYPE = "float16"
KV_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
SCALE_BYTES = 4
"""Bytes of the scale that each key or value of a head has where its numbers take one byte."""
FP8_CAPABILITY = 8.9
"""Compute capability of the first GPUs that know numbers of type fp8_e4m3."""
OPS = frozenset(
    {"load_matrix", "load_vector", "new_kv_cache", "embed", "rms_norm", "project", "project_add", "rope_angles", "rope"}
    | {"store_kv", "attention", "silu_mul", "gelu_mul", "add", "take", "to_numpy", "synchronize", "capture"}
    | {"load_experts", "mixture", "bounded_mixture", "scaled_mixture", "limited_mixture", "sink_attention"}
    | {"sigmoid_mul", "mul", "scale", "columns", "limited_silu_mul"}
    | {"new_latent_cache", "store_latent", "latent_attention", "project_heads", "select_keys", "layer_norm"}
    | {"new_compressed_cache", "compress", "select_pools", "rope_last", "select_entries", "window_attention"}
    | {"open_streams", "read_streams", "read_soft_streams", "write_streams", "mean_streams"}
    | {"new_states", "copy_states", "causal_conv", "gated_delta", "kimi_delta", "hadamard", "copy_blocks"}
    | {"select_groups", "selected_attention", "ngram_embed", "gate_streams", "add_gated"}
)
WIDER_OPS = OPS & {"new_latent_cache", "new_compressed_cache"}
"""What has kernels for numbers of two bytes and more alone."""
RESERVED_BYTES = 2 << 30
"""What the driver's context, the kernels, graphs and the buffer for unpacked tiles take."""
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, KV_SHARE = WIDTHS[-1], 2048, 4
"""Where the user names none: the widest captured step; what keeps tensor cores busy, and with a model of eight billion
weights for less than a tenth of a second; and one part in so many of the memory for keys and values."""
BATCH_INVARIANT_WIDTH = 1
"""A row by itself is rounded and summed otherwise than with others; 2 to 32 rows of decode steps have equal bits."""
NUMERICS_VERSION = "cuda-6"
INVARIANT_OPS = frozenset(
    {"load_matrix", "load_vector", "new_kv_cache", "copy_blocks", "embed", "rms_norm", "project", "project_add"}
    | {"rope_angles", "rope", "store_kv", "attention", "sink_attention", "silu_mul", "gelu_mul", "sigmoid_mul", "mul"}
    | {"add", "scale", "columns", "take", "to_numpy", "synchronize", "capture"}
    | {"load_experts", "mixture", "bounded_mixture", "scaled_mixture"}
    | {"new_latent_cache", "store_latent", "latent_attention", "project_heads"}
)
"""What gives a token the same bits in any step with --batch-invariant (decision 44). Chunks of the delta rule begin
where a prompt was cut; the rest has not been looked at."""
INVARIANT_WIDTH = 65536
"""Of a step then: no kernel looks at how many rows there are, so that this is only more than any step has."""


def bid(facts: DeviceFacts, options: BackendOptions) -> BackendBid:
    """Runs where the driver lists a GPU and torch and triton are installed; imports neither."""
    if not facts.gpus:
        return BackendBid(NAME, None, "no NVIDIA GPU")
    problems = [f"{name} is not installed: pip install {name}" for name in ("torch", "triton") if not find_spec(name)]
    if "+cpu" in installed("torch"):
        problems.append("torch is built without CUDA: install a CUDA build of it")
    if options.activation_dtype not in (None, ACTIVATION_DTYPE):
        problems.append(f"--activation-dtype {options.activation_dtype}: this backend has {ACTIVATION_DTYPE} only")
    if options.kv_dtype is not None and options.kv_dtype not in KV_ELEMENT_BYTES:
        problems.append(f"--kv-dtype {options.kv_dtype}: this backend has {', '.join(KV_ELEMENT_BYTES)}")
    capability = compute_capability() if options.kv_dtype == "fp8_e4m3" else None
    if capability is not None and capability < FP8_CAPABILITY:
        problems.append(
            f"--kv-dtype fp8_e4m3: this GPU has compute capability {capability}, and such numbers begin with "
            f"{FP8_CAPABILITY}: take int8"
        )
    if problems:
        return BackendBid(NAME, None, "; ".join(problems))
    declared = declare(facts, options)
    return BackendBid(NAME, declared, f"{declared.device_name}, triton {installed('triton')}")


def declare(facts: DeviceFacts, options: BackendOptions) -> BackendCapability:
    """What this backend can do on the first GPU."""
    from pocketllm.engine.backends.cuda.layouts import BYTES_PER_ELEMENT

    kv_dtype, memory = options.kv_dtype or KV_DTYPE, gpu_memory()
    has_scales = KV_ELEMENT_BYTES[kv_dtype] == 1
    return BackendCapability(
        name=NAME,
        device="cuda",
        device_name=facts.gpus[0],
        isa=None,
        threads=options.threads or 1,
        activation_dtype=ACTIVATION_DTYPE,
        kv_dtype=kv_dtype,
        ops=OPS - WIDER_OPS if has_scales else OPS,
        quant_types=frozenset(BYTES_PER_ELEMENT),
        weight_bytes_per_element=BYTES_PER_ELEMENT,
        kv_element_bytes=KV_ELEMENT_BYTES[kv_dtype],
        kv_scale_bytes=SCALE_BYTES if has_scales else 0,
        attention_scratch_bytes=0,
        batch_invariant_width=INVARIANT_WIDTH if options.batch_invariant else BATCH_INVARIANT_WIDTH,
        memory_bytes=None if memory is None else max(0, memory.free - RESERVED_BYTES),
        numerics_version=f"{NUMERICS_VERSION}-{ACTIVATION_DTYPE}-{kv_dtype}" + "-invariant" * options.batch_invariant,
        wider_ops=WIDER_OPS if has_scales else frozenset(),
        sizes=step_sizes(memory),
        step_widths=WIDTHS,
        max_steps_in_flight=2,
        invariant_ops=INVARIANT_OPS if options.batch_invariant else frozenset(),
        answers_apart=options.batch_invariant,
    )


def step_sizes(memory: "Memory | None") -> StepSizes:
    """As many requests as a captured step has rows for, and a share of the whole memory for what they keep: a share of
    what is free would differ between two engines on one GPU that are measured side by side."""
    kv_cache_bytes = StepSizes.kv_cache_bytes if memory is None else memory.total // KV_SHARE
    return StepSizes(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_NUM_BATCHED_TOKENS, kv_cache_bytes)


class Memory(NamedTuple):
    """Of the first GPU, in bytes."""

    free: int
    total: int


@cache
def gpu_memory() -> Memory | None:
    """What the driver's tool says now; None when it cannot be asked."""
    answer = asked("memory.free,memory.total")
    return None if answer is None else Memory(*(int(mib) << 20 for mib in answer))


@cache
def compute_capability() -> float | None:
    """Of the first GPU; None when the driver's tool cannot be asked."""
    answer = asked("compute_cap")
    return None if answer is None else answer[0]


def asked(names: str) -> list[float] | None:
    """What the driver's tool says of the first GPU, memory in MiB; None when it cannot be asked."""
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return [float(word) for word in answer.stdout.split("\n")[0].split(",")]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def open_backend(facts: DeviceFacts, options: BackendOptions) -> Backend:
    """Set the device up and bind the operations."""
    import torch

    from pocketllm.engine.backends.cuda.layers.operands import written
    from pocketllm.engine.backends.cuda.ops import CudaOps
    from pocketllm.engine.backends.cuda.steps.probe import CudaProbe

    capability = declare(facts, options)
    probe = CudaProbe(torch.device("cuda"), written)
    ops = CudaOps(capability.kv_dtype, is_invariant=options.batch_invariant)
    return Backend(capability, cast(Ops, ops), probe)


def installed(package: str) -> str:
    """Version of a package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
