"""Checkpoints of any quant type: random packed blocks, and what they decode to by the `gguf` package or by the format.

Every pattern of bits is some block, so nothing has to be quantized: only the scales are set, to keep logits ordinary.
"""

import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.quant_types import BY_NAME
from tests.tiny import TinyLlama, weights, write_llama

Bytes = npt.NDArray[np.uint8]

STORED = {
    "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0", "PQ2_0", "PTQ1_0",
}  # fmt: skip
"""Types that a matrix of a GGUF file may be stored in, float32 apart."""
OF_SAFETENSORS = {"FP8", "NVFP4_SCALED"}
"""Types that only the tensors of a directory become."""
TOLD_HERE = {"Q1_0", "Q2_0", "PQ2_0", "PTQ1_0"}
"""Types that the `gguf` package does not decode: what their values are is written out below."""
HALVES = {  # bytes of a block where a float16 lies
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,),
    "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
    "Q2_0": (0,), "PQ2_0": (0,), "PTQ1_0": (26,),
}  # fmt: skip
SINGLES = {"FP8": 64, "NVFP4_SCALED": 36}
"""Byte of a block where a float32 scale lies."""
E2M1 = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6), np.float32)
"""The values of a 4-bit float, as the OCP's table has them; a negative zero is a plain one here."""
SHAPE = TinyLlama(hidden=256, intermediate=256, head_dim=64, num_heads=4, num_kv_heads=2)
"""Rows of whole blocks of every type."""


def write_packed(path: Path, quant_type: str, seed: int) -> Path:
    """A llama checkpoint with every matrix in this type."""
    spec = replace(SHAPE, seed=seed)
    packed = matrices(spec, quant_type)
    write_llama(path, replace(spec, tensors={name: data.view(np.int8) for name, data in packed.items()}))
    contents = bytearray(path.read_bytes())
    for name, data in packed.items():
        key = struct.pack("<Q", len(name)) + name.encode()
        at = contents.index(key) + len(key)
        struct.pack_into("<IQQI", contents, at, 2, spec.hidden, len(data), BY_NAME[quant_type].type_id)
    path.write_bytes(contents)
    return path


def write_twin(path: Path, quant_type: str, seed: int) -> Path:
    """The same checkpoint in float32, decoded by others."""
    spec = replace(SHAPE, seed=seed)
    values = {name: expected_values(data, quant_type) for name, data in matrices(spec, quant_type).items()}
    return write_llama(path, replace(spec, tensors=values))


def matrices(spec: TinyLlama, quant_type: str) -> dict[str, Bytes]:
    """Every matrix by name, as random rows of blocks whose values have a root mean square of 0.15."""
    random = np.random.RandomState(spec.seed)
    kind = BY_NAME[quant_type]
    packed = {}
    for name, values in weights(spec).items():
        if values.ndim == 2:
            rows, columns = values.shape
            count = rows * columns // kind.block_elements
            data = random.randint(0, 256, (count, kind.block_bytes)).astype(np.uint8)
            packed[name] = with_scales(data, quant_type, random).reshape(rows, -1)
    return packed


def with_scales(data: Bytes, quant_type: str, random: np.random.RandomState) -> Bytes:
    """The blocks with ordinary scales, some of them negative."""
    if quant_type in ("F16", "BF16"):
        values = (random.standard_normal(len(data)) * 0.15).astype(np.float32)
        wide = values.astype("<f2") if quant_type == "F16" else values.view("<u2")[1::2]
        return np.ascontiguousarray(wide).view(np.uint8).reshape(data.shape)
    if quant_type == "MXFP4":
        data[:, 0] = random.randint(121, 124, len(data))
        return data
    if quant_type == "NVFP4":
        data[:, :4] = random.randint(0x10, 0x1A, (len(data), 4))
        return data
    set_scale(data, quant_type, np.ones(len(data)))
    size = np.sqrt(np.mean(expected_values(data[:64], quant_type) ** 2))
    set_scale(data, quant_type, random.choice([-1, 1], len(data)) * random.uniform(0.5, 1.3, len(data)) * 0.15 / size)
    return data


def set_scale(data: Bytes, quant_type: str, scale: npt.ArrayLike) -> None:
    """Write every float16 of every block."""
    halves = np.broadcast_to(np.asarray(scale, "<f2"), len(data))
    for at in HALVES.get(quant_type, ()):
        data[:, at : at + 2] = np.ascontiguousarray(halves)[:, None].view(np.uint8)
    if quant_type in SINGLES:
        singles = np.broadcast_to(np.asarray(scale, "<f4"), len(data))
        data[:, SINGLES[quant_type] :][:, :4] = np.ascontiguousarray(singles)[:, None].view(np.uint8)
    if quant_type == "IQ1_M":  # a nibble on top of each of four words
        words = halves.view("<u2")[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        data[:, 49:57:2] = data[:, 49:57:2] & 15 | words.astype(np.uint8) << 4


def expected_values(data: Bytes, quant_type: str) -> npt.NDArray[np.float32]:
    """What rows of blocks decode to, [rows, values]: by the `gguf` package, else as the format is told."""
    if quant_type in OF_SAFETENSORS:
        return values_of_safetensors(data, quant_type)
    if quant_type not in TOLD_HERE:
        return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[quant_type]), np.float32)
    kind = BY_NAME[quant_type]
    blocks = data.reshape(-1, kind.block_bytes)
    [at] = HALVES[quant_type]
    scales = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    factors = np.stack([factor(blocks, quant_type, n) for n in range(kind.block_elements)], axis=1)
    values: npt.NDArray[np.float32] = (factors.astype(np.float32) * scales).reshape(len(data), -1)
    return values + 0 if quant_type == "PTQ1_0" else values  # its zeros have no sign


def values_of_safetensors(data: Bytes, quant_type: str) -> npt.NDArray[np.float32]:
    """The same of a type that GGUF does not have: 8-bit floats by torch."""
    blocks = data.reshape(-1, BY_NAME[quant_type].block_bytes)
    single = np.ascontiguousarray(blocks[:, SINGLES[quant_type] :][:, :4]).view("<f4")
    if quant_type == "FP8":
        return (e4m3(blocks[:, :64]) * single).reshape(len(data), -1)
    scales = (e4m3(blocks[:, :4]) * single)[:, :, None]
    packed = blocks[:, 4:36].reshape(-1, 4, 8)
    return (np.concatenate([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1) * scales).reshape(len(data), -1)


def e4m3(codes: Bytes) -> npt.NDArray[np.float32]:
    """8-bit floats as torch reads them."""
    import torch

    return np.asarray(torch.from_numpy(np.ascontiguousarray(codes)).view(torch.float8_e4m3fn).float().numpy())


def factor(blocks: Bytes, quant_type: str, n: int) -> npt.NDArray[np.int64]:
    """Value n of each block, over the block's scale."""
    wide = blocks.astype(np.int64)
    if quant_type == "Q1_0":
        return 2 * (wide[:, 2 + n // 8] >> (n % 8) & 1) - 1
    if quant_type in ("Q2_0", "PQ2_0"):
        return (wide[:, 2 + n // 4] >> (2 * (n % 4)) & 3) - 1
    if n < 80:
        byte, digit = n % 16, n // 16
    elif n < 120:
        byte, digit = 16 + (n - 80) % 8, (n - 80) // 8
    else:
        byte, digit = 24 + (n - 120) % 2, (n - 120) // 2
    return np.asarray((wide[:, byte] * 3**digit % 256) * 3 // 256 - 1)
