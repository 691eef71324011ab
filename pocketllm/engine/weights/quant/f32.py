"""F32: IEEE float32, little-endian. Source: the GGUF specification (ggml)."""

from pocketllm.engine.weights.bits import Bytes, Floats


def decode(blocks: Bytes, out: Floats) -> None:
    """4 bytes a value."""
    out[:] = blocks.view("<f4")
