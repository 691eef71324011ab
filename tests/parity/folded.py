"""A tiny Ternary-Bonsai: qwen35 with folded, packed matrices, and its twin in float32 with the folding multiplied out.

The twin is an ordinary qwen35, which transformers runs. Nothing here uses the engine's decoders or its rotation.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.weights.quant_types import BY_NAME
from tests.parity.random_blocks import expected_values, with_scales
from tests.parity.tiny_families import TinyFamily, weights, write_family

Array = npt.NDArray[np.float32]
BLOCK = 128
KEY_HEADS, ROUNDS, VALUE_DIM = 2, 3, 64
WIDTHS = (128, 256, KEY_HEADS * ROUNDS * VALUE_DIM)
"""Of the hidden state and the attention's heads, of the feed-forward, of a DeltaNet layer's heads."""
SPEC = TinyFamily(
    "qwen35",
    47,
    {
        "embedding_length": 128,
        "feed_forward_length": 256,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": KEY_HEADS * ROUNDS,
        "ssm.inner_size": KEY_HEADS * ROUNDS * VALUE_DIM,
        "full_attention_interval": 2,
        "block_count": 2,
    },
    tied=False,
)
NOT_FOLDED = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_conv1d.weight")
QUANT_TYPES = ("PTQ1_0", "PQ2_0")


def signs() -> dict[int, Array]:
    """By width."""
    random = np.random.RandomState(SPEC.seed + 1)
    return {width: random.choice([-1.0, 1.0], width).astype(np.float32) for width in WIDTHS}


def folding(**changes: Any) -> dict[str, Any]:
    """The keys of the file."""
    names = [name for name, values in weights(SPEC).items() if values.ndim == 2 and not name.endswith(NOT_FOLDED)]
    keys = {
        "version": 1,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "block_size": BLOCK,
        "sign_mode": "explicit",
        "sign_widths": list(WIDTHS),
        "sign_values": [int(sign) for values in signs().values() for sign in values],
        "weight_names": [name for name in names if name != "token_embd.weight"],
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": True,
        **changes,
    }
    return {f"prism.hadamard.{key}": value for key, value in keys.items()}


def packed_matrices(quant_type: str) -> dict[str, npt.NDArray[np.uint8]]:
    """Every folded matrix and the embedding, as random rows of blocks."""
    random, kind = np.random.RandomState(SPEC.seed + 2), BY_NAME[quant_type]
    packed = {}
    for name, values in weights(SPEC).items():
        if values.ndim == 2 and not name.endswith(NOT_FOLDED):
            count = values.size // kind.block_elements
            data = random.randint(0, 256, (count, kind.block_bytes)).astype(np.uint8)
            packed[name] = with_scales(data, quant_type, random).reshape(len(values), -1)
    return packed


def write_folded(path: Path, quant_type: str, **changes: Any) -> Path:
    """The packed checkpoint. changes: of its folding's keys."""
    packed = packed_matrices(quant_type)
    extra = {name: data.view(np.int8) for name, data in packed.items()}
    write_family(path, replace(SPEC, tensors=extra, others=folding(**changes)))
    contents = bytearray(path.read_bytes())
    for name, data in packed.items():
        key = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", 2)
        at = contents.index(key) + len(key)
        width = weights(SPEC)[name].shape[1]
        struct.pack_into("<QQI", contents, at, width, len(data), BY_NAME[quant_type].type_id)
    path.write_bytes(contents)
    return path


def write_unfolded(path: Path, quant_type: str) -> Path:
    """The twin."""
    return write_family(path, replace(SPEC, tensors=unfolded(quant_type)))


def unfolded(quant_type: str) -> Mapping[str, Array]:
    """What folded matrices stand for: W · H · diag(signs) / √block, and diag(signs) · H · z / √block for a row z."""
    own = signs()
    found = {}
    for name, data in packed_matrices(quant_type).items():
        values = expected_values(data, quant_type).astype(np.float64)
        width = values.shape[1]
        runs = values.reshape(len(values), -1, BLOCK) @ sylvester(BLOCK) / np.sqrt(BLOCK)
        dense = runs.reshape(values.shape) * own[width]  # H is symmetric: the same for a matrix and for a table's rows
        found[name] = (tiled(dense) if name.endswith("ssm_out.weight") else dense).astype(np.float32)
    return found


def sylvester(size: int) -> npt.NDArray[np.float64]:
    """The Walsh-Hadamard matrix by its definition."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def tiled(dense: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Columns by key head put in the order of the other tensors: round by round."""
    by_key_head = dense.reshape(len(dense), KEY_HEADS, ROUNDS, VALUE_DIM)
    return by_key_head.swapaxes(1, 2).reshape(dense.shape)
