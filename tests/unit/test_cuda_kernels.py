"""The CUDA backend's kernels in Triton's interpreter on the CPU, held to the decoders and to the reference backend.

The interpreter is chosen when Triton is first imported, so the checks run in a process of their own.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.cuda import device
from tests.cuda.interpreter import ROOT, in_interpreter

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")


def facts(*gpus: str) -> DeviceFacts:
    return DeviceFacts("a processor", "x86_64", 2, 1 << 34, 1 << 33, frozenset(), gpus)


@needs_triton
@pytest.mark.parametrize(
    "part", ["packing", "repacking", "products", "rows_and_heads", "attention", "steps", "draws", "replays"]
)
def test_kernels_agree_with_the_decoders_and_the_reference(part: str) -> None:
    answer = in_interpreter("tests.cuda.interpreted", part, timeout_s=120)

    assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_triton
@pytest.mark.parametrize("part", ["few", "alone", "many", "operations"])
def test_products_with_plain_floats_agree_with_float64_and_a_row_has_its_own_bits(part: str) -> None:
    answer = in_interpreter("tests.cuda.plain", part, timeout_s=120)

    assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_triton
@pytest.mark.parametrize(
    ("kind", "width", "count", "of_sixteen_bytes"),
    [("*fp16", 4096, 1, True), ("*bf16", 576, 8, True), ("*fp32", 4096, 8, True), ("*fp16", 33, 8, False)],
)
def test_the_kernel_for_plain_floats_compiles_for_a_gpu_and_reads_sixteen_bytes_at_a_time_where_rows_allow(
    kind: str, width: int, count: int, of_sixteen_bytes: bool
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pocketllm.engine.backends.cuda.kernels.plain import WARPS, plain_kernel, shape_for

    names = list(plain_kernel.arg_names)
    together, rows, ahead = shape_for(count)
    constants: dict[str, int] = {"width": width, "M": together, "ROWS": rows, "WARPS": WARPS, "SHARES": 2}
    constants |= {"EACH": 4 if kind == "*fp32" else 8, "AHEAD": ahead, "HAS_BIAS": False, "HAS_RESIDUAL": False}
    given = dict.fromkeys(names, "i32") | dict.fromkeys(("x", "y", "bias", "residual"), "*fp32") | {"w": kind}
    signature = {name: "constexpr" if name in constants else given[name] for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("x", "w", "y", "x_stride")}
    source = ASTSource(plain_kernel, signature, places, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS, "enable_fp_fusion": False}
    )

    reads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line and "evict_first" in line]
    assert reads
    assert all(".v4." in read for read in reads) is of_sixteen_bytes


def test_the_backend_does_not_bid_where_no_gpu_is_listed() -> None:
    bid = device.bid(facts(), BackendOptions())

    assert bid.capability is None
    assert "no NVIDIA GPU" in bid.reason


@needs_triton
def test_the_backend_bids_for_what_it_packs_and_refuses_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_memory", lambda: device.Memory(1 << 37, 1 << 37))
    monkeypatch.setattr(device, "installed", lambda package: "2.11.0")

    bid = device.bid(facts("NVIDIA H200"), BackendOptions())
    refused = device.bid(facts("NVIDIA H200"), BackendOptions(activation_dtype="float32", kv_dtype="int4"))

    assert bid.capability is not None
    assert {"Q4_K", "Q6_K", "Q8_0", "F16"} <= bid.capability.quant_types
    assert bid.capability.memory_bytes == (1 << 37) - device.RESERVED_BYTES
    assert bid.capability.sizes.kv_cache_bytes == 1 << 35
    assert refused.capability is None
    assert "--activation-dtype float32" in refused.reason
    assert "--kv-dtype int4" in refused.reason


def test_the_backend_does_not_bid_with_a_torch_that_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed", lambda package: "2.11.0+cpu")

    bid = device.bid(facts("NVIDIA H200"), BackendOptions())

    assert bid.capability is None
    assert "torch is built without CUDA" in bid.reason


def test_a_bid_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from tests.unit.test_cuda_kernels import facts; "
        "from pocketllm.engine.backends.cuda import device; "
        "from pocketllm.engine.backends.api.capability import BackendOptions; device.gpu_memory = lambda: None; "
        "device.bid(facts('a GPU'), BackendOptions()); print({'torch', 'triton'} & sys.modules.keys())"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert answer.stdout.strip() == "set()", answer.stdout + answer.stderr
