"""Ternary-Bonsai: packed matrices behind a Hadamard rotation, held to transformers over what they stand for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.models import blocks
from pocketllm.engine.models.blocks import Binder
from pocketllm.engine.models.families import qwen35
from pocketllm.engine.models.parts.folding import FoldedProjection, folded_binder, read_folding
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.native import family_ops
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.folded import QUANT_TYPES, write_folded
from tests.parity.test_families import Mistaken

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9


def run(path: Path, quant_type: str, size: int = 40, ops: Any = None) -> float:
    """The error of a checkpoint's logits."""
    expected = np.load(ORACLES / f"folded_{quant_type}.npz")
    ids = expected["input_ids"].tolist()
    [got] = Driver(path, ops=ops).run([ids], chunks(len(ids), size))
    return nmse(got, expected["logits"])


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("size", [40, 7, 1], ids=["one batch", "chunks of seven", "token by token"])
def test_a_folded_checkpoint_computes_what_it_stands_for(quant_type: str, size: int, tmp_path: Path) -> None:
    assert run(write_folded(tmp_path / "x.gguf", quant_type), quant_type, size) <= TOLERANCE


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize(
    ("settings", "limit"),
    [({"activation_dtype": "float32", "kv_dtype": "float32"}, TOLERANCE), ({}, 1e-5)],
    ids=["float32", "as the family needs"],
)
def test_the_native_backend_computes_it_too(
    quant_type: str, settings: dict[str, str], limit: float, tmp_path: Path
) -> None:
    path = write_folded(tmp_path / "x.gguf", quant_type)

    assert run(path, quant_type, 7, family_ops(path, 2, **settings)) <= limit


def test_matrices_of_a_folded_checkpoint_are_wide_as_those_of_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = frozenset({"ffn_up", "output"})
    with open_checkpoint(write_folded(tmp_path / "x.gguf", QUANT_TYPES[0])) as checkpoint:
        folding = read_folding(checkpoint.metadata)
        assert folding is not None
        bind = folded_binder(Binder(checkpoint, ReferenceOps(), 1e-6, wide=wide), folding)
        packed = bind.projection("blk.0.ffn_up")
        monkeypatch.setattr(blocks, "WIDE_BITS", 1)
        head = bind.head(bind.matrix("token_embd.weight"))
        [up], [gate] = (bind.rows(f"blk.0.ffn_{name}", np.arange(4)) for name in ("up", "gate"))
        whole = bind.projection("blk.0.ffn_up"), bind.projection("blk.0.ffn_gate")

    assert not packed.is_wide, "a weight of two bits"
    assert [projection.is_wide for projection in (head, up, gate, *whole)] == [True, True, False, True, False]
    assert all(isinstance(projection, FoldedProjection) for projection in (up, gate, *whole))


# -- mistakes --------------------------------------------------------------------------------------------------------
def not_rotated(right: Callable[..., Any], x: Any, rotation: Any, inverse: bool = False) -> Any:
    return right(x, rotation, inverse) if inverse else x


def table_not_rotated_back(right: Callable[..., Any], x: Any, rotation: Any, inverse: bool = False) -> Any:
    return x if inverse else right(x, rotation)


def signs_last(right: Callable[..., Any], x: Any, rotation: Any, inverse: bool = False) -> Any:
    return right(x, rotation, not inverse)


def no_signs(right: Callable[..., Any], x: Any, rotation: Any, inverse: bool = False) -> Any:
    return right(x, replace(rotation, signs=rotation.signs.abs()), inverse)


def other_block(right: Callable[..., Any], x: Any, rotation: Any, inverse: bool = False) -> Any:
    return right(x, replace(rotation, block=64), inverse)


@pytest.mark.parametrize("mistake", [not_rotated, table_not_rotated_back, signs_last, no_signs, other_block])
def test_a_mistake_in_the_rotation_is_seen(mistake: Callable[..., Any], tmp_path: Path) -> None:
    path = write_folded(tmp_path / "x.gguf", "PQ2_0")

    assert run(path, "PQ2_0", ops=Mistaken(ReferenceOps(), {"hadamard": mistake})) > 10 * TOLERANCE


def test_heads_left_as_they_are_stored_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_folded(tmp_path / "x.gguf", "PQ2_0")
    monkeypatch.setattr(qwen35, "is_grouped", lambda folding: False)

    assert run(path, "PQ2_0") > 10 * TOLERANCE


# -- headers that cannot be followed ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "metadata key prism.hadamard.version is 2: only 1 is known"),
        ({"axis": "output"}, "metadata key prism.hadamard.axis is 'output': only 'input-last-dimension' is known"),
        ({"block_size": 96}, "metadata key prism.hadamard.block_size is 96: it must be a power of two"),
        (
            {"block_size": 256},
            "metadata key prism.hadamard.sign_widths is [128, 256, 384]: it must be widths that 256 divides",
        ),
        (
            {"sign_values": [1, -1]},
            "metadata key prism.hadamard.sign_values must be 768 values of 1 and -1, the widths' together",
        ),
        (
            {"weight_names": ["blk.0.attn_q.weight"]},
            "metadata key prism.hadamard.weight_names names blk.0.attn_q.weight, which is no matrix of the file",
        ),
        (
            {"sign_widths": [128, 384], "sign_values": [1] * 512},
            "tensor blk.0.ffn_down.weight is folded, and prism.hadamard.sign_widths has no width 256",
        ),
    ],
)
def test_a_folding_that_cannot_be_undone_is_a_reason(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with open_checkpoint(write_folded(tmp_path / "x.gguf", "PQ2_0", **changes)) as checkpoint:
        assert qwen35.FAMILY.unmet(checkpoint) == [reason]
