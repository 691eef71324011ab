"""FP8, MXFP4 and NVFP4 of safetensors: the logits of transformers over what others say the packed weights stand for."""

import random
from pathlib import Path

import pytest

from pocketllm import LLM
from pocketllm.engine.backends.select import BackendOptions, select_backend
from pocketllm.errors import UnsupportedFeatureError
from tests.native import family_ops, needs_native
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.test_huggingface import TOLERANCE, VOCAB, logits_of, write_directory

torch = pytest.importorskip("torch", reason="missing-extra: oracle (torch)")
pytest.importorskip("transformers", reason="missing-extra: oracle (transformers)")
pytest.importorskip("compressed_tensors", reason="missing-extra: oracle (compressed-tensors)")
pytestmark = pytest.mark.oracle

from tests.parity.packed_directories import KINDS, TYPES, pack_directory, pack_experts, say_quantized  # noqa: E402  # after the skips

IDS = random.Random(11).choices(range(VOCAB), k=30)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_packed_weights_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "packed", "packed", torch.bfloat16)
    model = pack_directory(folder, model, kind)
    driver = Driver(folder)

    assert driver.checkpoint.tensor("blk.1.attn_k.weight").quant_type == TYPES[kind]
    for size in (30, 7):
        driver.reset()
        [got] = driver.run([IDS], chunks(len(IDS), size))
        assert nmse(got, logits_of(model, IDS)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["fp8 tiles", "mxfp4", "nvfp4 divided"])
@pytest.mark.parametrize("name", ["packed_qwen2", "packed_qwen3", "packed_gemma3", "packed_qwen35"])
def test_logits_of_other_families_packed_weights_agree_with_transformers(name: str, kind: str, tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / name, name, torch.bfloat16)
    model = pack_directory(folder, model, kind)
    driver = Driver(folder)
    [got] = driver.run([IDS], chunks(len(IDS), 7))

    packed = {tensor.quant_type for tensor in driver.checkpoint.tensors.values()}
    assert packed == {"BF16", "F32", TYPES[kind]}
    assert nmse(got, logits_of(model, IDS)) <= TOLERANCE


def test_modules_that_are_left_out_are_plain_matrices_beside_packed_ones(tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "packed", "packed", torch.bfloat16)
    model = pack_directory(folder, model, "fp8 tiles", kept=("layers.1.", "o_proj"))
    driver = Driver(folder)
    [got] = driver.run([IDS], chunks(len(IDS), 30))

    types = {name: driver.checkpoint.tensor(f"{name}.weight").quant_type for name in ("blk.0.attn_q", "blk.1.attn_q")}
    assert types == {"blk.0.attn_q": "FP8", "blk.1.attn_q": "BF16"}
    assert nmse(got, logits_of(model, IDS)) <= TOLERANCE


def test_experts_in_blocks_of_gpt_oss_agree_with_transformers(tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "experts", "gpt_oss", torch.bfloat16)
    model = pack_experts(folder, model)
    driver = Driver(folder)

    assert driver.checkpoint.tensor("blk.0.ffn_up_exps.weight").quant_type == "MXFP4"
    for size in (30, 7, 1):
        driver.reset()
        [got] = driver.run([IDS], chunks(len(IDS), size))
        assert nmse(got, logits_of(model, IDS)) <= TOLERANCE


def test_experts_that_lie_one_by_one_in_several_types_are_one_tensor(tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "experts", "packed_experts", torch.bfloat16)
    model = pack_directory(folder, model, "fp8 tiles", kept=("layers.1.mlp.experts.3.",))
    driver = Driver(folder)

    assert driver.checkpoint.tensor("blk.1.ffn_gate_exps.weight").quant_type == "F32"
    assert driver.checkpoint.tensor("blk.0.ffn_gate_exps.weight").quant_type == "FP8"
    [got] = driver.run([IDS], chunks(len(IDS), 30))
    assert nmse(got, logits_of(model, IDS)) <= TOLERANCE


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_stay_packed_on_the_native_backend(kind: str, tmp_path: Path) -> None:
    backend = select_backend("cpu", BackendOptions(threads=1, activation_dtype="float32", kv_dtype="float32"))
    folder, model = write_directory(tmp_path / "packed", "packed", torch.bfloat16)
    model = pack_directory(folder, model, kind)
    [got] = Driver(folder, ops=backend.ops).run([IDS], chunks(len(IDS), 7))

    assert nmse(got, logits_of(model, IDS)) <= TOLERANCE
    packed = {"FP8": 8.5, "MXFP4": 4.5, "NVFP4_SCALED": 5.0}[TYPES[kind]]
    assert 8 * backend.capability.weight_bytes_per_element[TYPES[kind]] <= packed


@needs_native
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4 divided"])
def test_packed_experts_are_picked_on_the_native_backend_as_by_exact_activations(kind: str, tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "experts", "packed_experts", torch.bfloat16)
    model = pack_directory(folder, model, kind)
    [got] = Driver(folder, ops=family_ops(folder)).run([IDS], chunks(len(IDS), 7))

    assert nmse(got, logits_of(model, IDS)) <= 1e-5


def test_a_method_that_is_not_read_is_refused_before_weights_are_looked_at(tmp_path: Path) -> None:
    folder, _ = write_directory(tmp_path / "packed", "packed", torch.bfloat16)
    (folder / "model.safetensors").unlink()
    say_quantized(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True})

    with pytest.raises(UnsupportedFeatureError, match="quant_method 'bitsandbytes', which is not read"):
        LLM(str(folder), backend="reference")
