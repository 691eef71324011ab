"""A checkpoint of `synthetic.Synthetic` as a GGUF file, with a vocabulary of its size: for whole engines and servers.

usage: python -m tests.cuda.file PATH SHAPE TYPES   (SHAPE, TYPES: names below)
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.cuda.synthetic import Synthetic
from tests.cuda.words import refuse
from tests.tiny import add_value

VOCABULARY = Path(__file__).parents[1] / "oracles" / "llama.gguf"
SHAPES: dict[str, tuple[int, ...]] = {
    "0.5b": (24, 1280, 3584, 20, 5, 64, 49152),
    "135m": (30, 576, 1536, 9, 3, 64, 49152),
    "8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "tiny": (2, 256, 256, 4, 2, 64, 1024),
    "30b-a3b": (48, 2048, 768, 32, 4, 128, 151936),
    "tiny-mixture": (2, 256, 256, 4, 2, 64, 1024),
}
"""Layers, hidden, inner, heads, key heads, head size, vocabulary."""
EXPERTS: dict[str, tuple[int, int]] = {"30b-a3b": (128, 8), "tiny-mixture": (8, 2)}
"""How many, and how many a token uses, of shapes that are mixtures."""
TYPES: dict[str, tuple[str, str, str]] = {
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q4_1": ("Q4_1", "Q4_1", "Q4_1"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q4_K": ("Q4_K", "Q4_K", "Q4_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
    "IQ4_NL": ("IQ4_NL", "IQ4_NL", "IQ4_NL"),
    "IQ2_XXS": ("IQ2_XXS", "IQ2_XXS", "Q2_K"),
}


def write(path: Path, shape: str, types: str) -> Path:
    """Random blocks of small scales; tokens beyond the 512 of a committed vocabulary are numbered words."""
    scale = 0.0005 if types == "Q8_0" else 0.002
    checkpoint = Synthetic(*SHAPES[shape], types=TYPES[types], scale=scale, experts=EXPERTS.get(shape))
    writer = gguf.GGUFWriter(path, checkpoint.metadata["general.architecture"])
    for key, value in {**checkpoint.metadata, **vocabulary(SHAPES[shape][-1])}.items():
        if key != "general.architecture":  # the writer's own
            add_value(writer, key, value)
    for name, info in checkpoint.tensors.items():
        kind = gguf.GGMLQuantizationType[info.quant_type]
        if len(info.shape) == 1:
            writer.add_tensor(name, checkpoint.values(name))
        elif info.quant_type == "F32":  # a router
            writer.add_tensor(name, checkpoint.data(name).view(np.float32).reshape(info.shape))
        else:
            writer.add_tensor(name, checkpoint.data(name).reshape(*info.shape[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(size: int) -> Mapping[str, Any]:
    fields = gguf.GGUFReader(VOCABULARY).fields
    keys = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    more = size - len(tokens)
    keys["tokenizer.ggml.tokens"] = tokens + [f"word{number}" for number in range(more)]
    keys["tokenizer.ggml.token_type"] = kinds + [1] * more
    return keys


if __name__ == "__main__":
    match sys.argv[1:]:
        case [path, shape, types] if shape in SHAPES and types in TYPES:
            write(Path(path), shape, types)
        case _:
            names = f"SHAPE is one of {', '.join(SHAPES)}; TYPES one of {', '.join(TYPES)}"
            refuse(__doc__, f"PATH, SHAPE and TYPES are needed: {names}")
