"""Names, file ids and block sizes of the tensor types: the public ggml format, two vendor types, two of safetensors.

A type in this table can be sized and shown; whether it can be decoded is said by the files in `quant/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantType:
    """One tensor type: `block_bytes` bytes hold `block_elements` values."""

    name: str
    type_id: int
    block_elements: int
    block_bytes: int


BY_ID: Mapping[int, QuantType] = {
    type_id: QuantType(name, type_id, block_elements, block_bytes)
    for name, type_id, block_elements, block_bytes in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q8_1", 9, 32, 36),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("Q8_K", 15, 256, 292),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
        ("NVFP4", 40, 64, 36),
        ("Q1_0", 41, 128, 18),
        ("Q2_0", 42, 64, 18),
        ("PQ2_0", 142, 128, 34),
        ("PTQ1_0", 143, 128, 28),
        ("FP8", -1, 64, 68),
        ("NVFP4_SCALED", -2, 64, 40),
    )
}
"""By file id. Q8_1 is an activation type with no fixed file layout (36 bytes in the C code); it is never stored.

An id below 0, which no GGUF can hold, is of a type that weights of safetensors are packed into as they are read.
"""

BY_NAME: Mapping[str, QuantType] = {quant_type.name: quant_type for quant_type in BY_ID.values()}
