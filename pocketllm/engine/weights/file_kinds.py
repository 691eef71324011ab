"""What a file that is no GGUF looks like, from its first bytes, so that the refusal can say what to do."""

_ADVICE: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull` where it came from"),
    (b"PK\x03\x04", "looks like a zip archive (a wheel or a PyTorch checkpoint): unpack or convert it to GGUF first"),
    (b"\x1f\x8b", "looks like a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "looks like a zstandard archive: unpack it first"),
    (b"tjgg", "is an old GGML file (ggjt), from before GGUF: convert the original model again"),
    (b"lmgg", "is an old GGML file (ggml), from before GGUF: convert the original model again"),
    (b"fmgg", "is an old GGML file (ggmf), from before GGUF: convert the original model again"),
    (b"FUGG", "starts with GGUF spelled backwards: a big-endian file, convert it to little-endian first"),
    (b"\x89HDF", "looks like an HDF5 file: convert the original model to GGUF"),
    (b"\x80\x02", "looks like a Python pickle (a PyTorch checkpoint): convert it to GGUF first"),
)


def looks_like(start: bytes) -> str:
    """The rest of a sentence `FILE is not a GGUF file: it …`, from up to 512 first bytes."""
    for magic, advice in _ADVICE:
        if start.startswith(magic):
            return advice
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page: the download was answered with an error or a login page, fetch it again"
    # safetensors: the length of a JSON header as uint64, then the header
    if len(start) > 9 and int.from_bytes(start[:8], "little") < 2**40 and start[8:9] == b"{":
        return "looks like a safetensors file: give the directory with its config.json, or convert it to GGUF"
    if text.startswith(b"{"):
        return "looks like JSON: give the .gguf file itself"
    if not start.strip(b"\x00"):
        return "starts with zeros only: the download was not finished, fetch it again"
    return f"starts with {start[:4]!r} instead of b'GGUF'"
