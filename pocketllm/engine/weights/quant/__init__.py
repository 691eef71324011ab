"""One file a quant type: the file name is the registry key.

Each file has `decode(blocks, out)`: blocks uint8 [blocks, block bytes] → out float32 [blocks, block elements], written
in place.
The arithmetic is that of the `gguf` package's numpy decoder, bit for bit (IEEE float32, no fused multiply-add).
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import CheckpointError, UnsupportedFeatureError

Decode = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.float32]], None]

CHUNK_ELEMENTS = 1 << 17
"""Values decoded at a time: temporaries stay in the cache of a core and never grow with the tensor."""


@cache
def known_types() -> tuple[str, ...]:
    """Quant types that can be decoded, by GGUF name, sorted."""
    return tuple(sorted(path.stem.upper() for path in Path(__file__).parent.glob("[a-z]*.py")))


def block_size(quant_type: str) -> tuple[int, int]:
    """(values, bytes) of one block; LookupError for a type whose layout is not known."""
    if quant_type not in BY_NAME:
        raise LookupError(f"no quant type {quant_type!r}; known: {', '.join(BY_NAME)}")
    return BY_NAME[quant_type].block_elements, BY_NAME[quant_type].block_bytes


def decoder(quant_type: str) -> Decode:
    """The decode function of a type; UnsupportedFeatureError listing the known ones when there is no file for it."""
    if quant_type not in known_types():
        raise UnsupportedFeatureError(f"cannot decode {quant_type}", [why_not(quant_type)])
    decode: Decode = import_module(f"{__name__}.{quant_type.lower()}").decode
    return decode


def why_not(quant_type: str) -> str:
    """A reason for a plan: this type cannot be decoded, and which can."""
    return f"quant type {quant_type} has no decoder; decodable are {', '.join(known_types())}"


def dequantize(data: npt.NDArray[np.uint8], quant_type: str, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """Decode a tensor's raw bytes (any shape, C order) into float32 of `shape`, with bounded temporary memory.

    CheckpointError when the bytes are not exactly those of the shape.
    """
    decode = decoder(quant_type)
    elements, num_bytes = block_size(quant_type)
    out = np.empty(tuple(shape), np.float32)
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if (shape and shape[-1] % elements) or out.size // elements * num_bytes != flat.size:
        raise CheckpointError(
            f"{flat.size} bytes of {quant_type} cannot be a tensor of shape {tuple(shape)}: "
            f"rows are made of blocks of {elements} values in {num_bytes} bytes"
        )
    blocks, values = flat.reshape(-1, num_bytes), out.reshape(-1, elements)
    step = max(1, CHUNK_ELEMENTS // elements)
    # a scale that is infinite or NaN decodes to what IEEE says, silently: the file is judged elsewhere
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            decode(blocks[start : start + step], values[start : start + step])
    return out
