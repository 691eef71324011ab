"""Directories whose matrices are packed: random codes and scales, and what those stand for by transformers or others.

Nothing is quantized: every pattern of bits is some weight, and the scales alone are chosen, to keep logits ordinary.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, Any]
Packing = Callable[[tuple[int, int], torch.Generator], tuple[Tensors, Any]]
"""(rows, cols) → the tensors of one matrix by what follows its module's name, and its float32 values."""
TILE = 128


def fp8_codes(shape: tuple[int, ...], random: torch.Generator) -> Any:
    """Every E4M3 that is a number."""
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 3
    return codes.view(torch.float8_e4m3fn)


def around(size: float, shape: tuple[int, ...], random: torch.Generator) -> Any:
    """Scales of about this size, some negative."""
    sizes = size * (0.5 + torch.rand(shape, generator=random))
    return torch.where(torch.rand(shape, generator=random) < 0.2, -sizes, sizes)


def fp8_tiles(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Any]:
    """Tiles of 128 × 128, cut off at the edges: by transformers."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    codes = fp8_codes(shape, random)
    scales = around(1e-3, (-(-shape[0] // TILE), -(-shape[1] // TILE)), random)
    values = _dequantize_fp8_weight(codes, scales, [TILE, TILE], torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, values


def fp8_of(scale_shape: Callable[[int], tuple[int, ...]], dtype: Any, extra: str = "") -> Packing:
    """One scale for each row or for all, by torch's own conversion."""

    def pack(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Any]:
        codes, scales = fp8_codes(shape, random), around(1e-3, scale_shape(shape[0]), random).to(dtype)
        more = {extra: torch.ones(())} if extra else {}
        by_row = scales.float().reshape(-1, 1)
        return {"weight": codes, "weight_scale": scales, **more}, codes.float() * by_row

    return pack


def mxfp4(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Any]:
    """Neighbors in a byte and an exponent for 32: by transformers, whose matrices are transposed."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=random, dtype=torch.uint8)
    exponents = torch.randint(121, 124, (shape[0], shape[1] // 32), generator=random, dtype=torch.uint8)
    [values] = convert_moe_packed_tensors(codes.reshape(1, shape[0], -1, 16), exponents[None], dtype=torch.float32)
    return {"weight_packed": codes, "weight_scale": exponents}, values.T.contiguous()


def nvfp4(names: tuple[str, str], *, divides: bool) -> Packing:
    """Neighbors in a byte, an E4M3 for 16 and a float32 for all: by compressed-tensors, which divides by that."""

    def pack(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, Any]:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization.lifecycle.forward import dequantize
        from compressed_tensors.quantization.quant_scheme import NVFP4

        codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=random, dtype=torch.uint8)
        scales = around(8.0, (shape[0], shape[1] // 16), random).to(torch.float8_e4m3fn)
        shared = around(150.0, (1,), random)
        halves = unpack_fp4_from_uint8(codes, *shape, dtype=torch.float32)
        settings = {"args": NVFP4["weights"], "global_scale": shared, "dtype": torch.float32}
        values = dequantize(halves, scales.float(), **settings)
        packed, of_all = names
        more = {"input_global_scale": shared.clone()} if divides else {"input_scale": shared.clone()}
        stored = {packed: codes, "weight_scale": scales, of_all: shared if divides else 1 / shared, **more}
        return stored, values

    return pack


def of_compressed_tensors(stored_as: str, **weights: Any) -> dict[str, Any]:
    """Its part of a config.json."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}, "format": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE]}
KINDS: Mapping[str, tuple[Packing, dict[str, Any]]] = {
    "fp8 tiles": (fp8_tiles, FP8),
    "fp8 tensor": (
        fp8_of(lambda rows: (), torch.float32, "input_scale"),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "fp8 rows": (
        fp8_of(lambda rows: (rows, 1), torch.bfloat16),
        of_compressed_tensors("float-quantized", num_bits=8, strategy="channel"),
    ),
    "mxfp4": (mxfp4, of_compressed_tensors("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "nvfp4 divided": (
        nvfp4(("weight_packed", "weight_global_scale"), divides=True),
        of_compressed_tensors("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
    ),
    "nvfp4 multiplied": (
        nvfp4(("weight", "weight_scale_2"), divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
}
TYPES = {
    "fp8 tiles": "FP8",
    "fp8 tensor": "FP8",
    "fp8 rows": "FP8",
    "mxfp4": "MXFP4",
    "nvfp4 divided": "NVFP4_SCALED",
    "nvfp4 multiplied": "NVFP4_SCALED",
}
"""What each becomes where its rows are whole blocks."""


def pack_experts(folder: Path, model: Any, seed: int = 4) -> Any:
    """gpt-oss as it is published: experts in blocks of 16 bytes, everything else plain; gives the model likewise."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values
            continue
        experts, cols, rows = values.shape
        shape = (experts, rows, cols // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape[:-1], generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say_quantized(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return model


def place_of(model: Any, module: str) -> Any:
    """Where a model of transformers keeps a matrix; those of experts lie together, gates first."""
    layer, is_expert, rest = module.partition(".experts.")
    if not is_expert:
        return model.get_submodule(module).weight
    number, part = rest.split(".")
    experts = model.get_submodule(f"{layer}.experts")
    if part == "down_proj":
        return experts.down_proj[int(number)]
    middle = experts.gate_up_proj.shape[1] // 2
    return (
        experts.gate_up_proj[int(number)][:middle]
        if part == "gate_proj"
        else experts.gate_up_proj[int(number)][middle:]
    )


def say_quantized(folder: Path, said: Mapping[str, Any]) -> None:
    """Put a quantization_config into a directory's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


def pack_directory(folder: Path, model: Any, kind: str, kept: tuple[str, ...] = (), seed: int = 3) -> Any:
    """Replace the projections of a saved model, those within `kept` apart; gives the model with what they stand for."""
    from safetensors.torch import load_file, save_file

    pack, said = KINDS[kind]
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or values.ndim != 2 or any(part in name for part in kept):
            tensors[name] = values
            continue
        stored, stands_for = pack((values.shape[0], values.shape[1]), random)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
        with torch.no_grad():
            place_of(model, module).copy_(stands_for)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say_quantized(folder, said | {"ignore": ["lm_head", *kept]})
    return model
