"""Matrices as the native library keeps them: repacked once, values to the bit those of the file."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.cpu.library import Engine, Native
from pocketllm.engine.backends.cpu.program import pointer
from pocketllm.engine.weights import bits
from pocketllm.engine.weights.quant_types import BY_NAME

CODEBOOKS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


class Matrix(Native):
    """A matrix [rows, cols], repacked into its engine's memory."""

    def __init__(self, engine: Engine, data: npt.NDArray[np.uint8], quant_type: str, shape: tuple[int, int]) -> None:
        self.rows, self.cols = shape
        data = np.ascontiguousarray(data).reshape(-1)
        points = codebook(quant_type)
        type_id, file = BY_NAME[quant_type].type_id, (pointer(data), data.nbytes)
        new = engine.library.matrix_new(engine.address, type_id, *file, *shape, pointer(points))
        super().__init__(new, None, engine)


class ExpertMatrices:
    """A matrix of each expert of a layer, [experts, rows, cols]: `addresses` is what the library takes."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self.matrices = tuple(matrices)
        self.addresses = (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices))

    def pointer(self) -> ctypes.c_void_p:
        """To the first address; valid as long as this object."""
        return ctypes.cast(self.addresses, ctypes.c_void_p)


def codebook(quant_type: str) -> npt.NDArray[np.int8] | None:
    """Points of the types that pick several values at once, as int8; None for others."""
    named = "IQ1_S" if quant_type == "IQ1_M" else quant_type
    return np.ascontiguousarray(bits.grid(named)) if named in CODEBOOKS else None
