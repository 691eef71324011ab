"""F16: IEEE float16, little-endian. Source: the GGUF specification (ggml)."""

from pocketllm.engine.weights.bits import Bytes, Floats


def decode(blocks: Bytes, out: Floats) -> None:
    """2 bytes a value."""
    out[:] = blocks.view("<f2")
