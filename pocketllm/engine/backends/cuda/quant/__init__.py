"""How each quant type's file blocks become codes and scales of its layout; the values stay the same to the bit."""

from collections.abc import Callable, Mapping

from torch import Tensor

from pocketllm.engine.backends.cuda.packing import Parts
from pocketllm.engine.backends.cuda.quant import blocks_32, codebooks, super_blocks, ternary

Split = Callable[[Tensor], Parts]
"""Take rows of file blocks apart: uint8 [rows, blocks, block bytes] → codes and scales."""

SPLITS: Mapping[str, Split] = {**blocks_32.SPLITS, **super_blocks.SPLITS, **codebooks.SPLITS, **ternary.SPLITS}
"""By GGUF name."""
