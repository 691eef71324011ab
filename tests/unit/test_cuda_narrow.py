"""The CUDA backend's caches of eight bits: its kernels in Triton's interpreter, and what the plan says of them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, BackendOptions
from pocketllm.engine.backends.cuda import device
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import make_plan
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import UnsupportedFeatureError
from tests.cuda.interpreter import in_interpreter
from tests.parity.tiny_families import TinyFamily, write_family
from tests.unit.test_cuda_kernels import facts

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_memory", lambda: device.Memory(1 << 37, 1 << 37))
    monkeypatch.setattr(device, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(device, "installed", lambda package: "2.11.0")


def bid(kv_dtype: str | None) -> BackendBid:
    return device.bid(facts("NVIDIA H200"), BackendOptions(kv_dtype=kv_dtype))


def capability(kv_dtype: str | None) -> BackendCapability:
    declared = bid(kv_dtype).capability
    assert declared is not None
    return declared


@needs_triton
@pytest.mark.parametrize("part", ["kept", "attention", "steps"])
def test_keys_and_values_of_eight_bits_are_kept_and_attended_as_the_reference_rounds_them(part: str) -> None:
    answer = in_interpreter("tests.cuda.narrow", part, timeout_s=240)

    assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_triton
@pytest.mark.parametrize(("kv_dtype", "bytes_of_a_head"), [(None, 256), ("fp8_e4m3", 136), ("int8", 136)])
def test_a_head_of_eight_bits_costs_a_byte_a_number_and_two_scales(kv_dtype: str | None, bytes_of_a_head: int) -> None:
    declared = capability(kv_dtype)

    spec = KVSpec(num_layers=1, num_kv_heads=1, key_dim=64, value_dim=64)
    assert spec.bytes_per_token(declared.kv_element_bytes, declared.kv_scale_bytes) == bytes_of_a_head
    assert declared.numerics_version.endswith(f"-{kv_dtype or 'float16'}")


@needs_triton
def test_a_gpu_without_numbers_of_fp8_refuses_them_and_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "compute_capability", lambda: 8.6)

    refused = bid("fp8_e4m3")
    assert refused.capability is None
    assert "this GPU has compute capability 8.6" in refused.reason
    assert refused.reason.endswith("take int8")
    assert bid("int8").capability is not None


@needs_triton
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_latents_of_eight_bits_are_refused_before_a_weight_is_read(tmp_path: Path, kv_dtype: str) -> None:
    checkpoint = open_checkpoint(write_family(tmp_path / "latents.gguf", TinyFamily("deepseek2")))
    family = find_family(checkpoint.architecture)

    with pytest.raises(UnsupportedFeatureError) as caught:
        make_plan(EngineOptions(kv_dtype=kv_dtype), family, capability(kv_dtype), checkpoint)
    assert caught.value.reasons == (
        f"backend cuda has no op new_latent_cache with --kv-dtype {kv_dtype}, which family deepseek2 needs: take "
        "--kv-dtype float16",
    )
    assert make_plan(EngineOptions(), family, capability(None), checkpoint).kv_dtype == "float16"


def test_the_short_name_of_fp8_is_the_type_with_more_precision() -> None:
    assert EngineOptions(kv_dtype="fp8") == EngineOptions(kv_dtype="fp8_e4m3")
