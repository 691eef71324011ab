"""One tensor of a directory as the GGUF tensor, or the part of one, that its rule makes of it."""

from math import prod

import numpy as np

from pocketllm.engine.weights.bits import Bytes
from pocketllm.engine.weights.huggingface.rules import Order, Rule
from pocketllm.engine.weights.huggingface.sources import Source
from pocketllm.engine.weights.quant import block_size, dequantize
from pocketllm.errors import CheckpointError


def type_of(source: Source, rule: Rule) -> str:
    """Vectors and what is computed are float32, and so are columns that move out of their blocks."""
    if rule.compute is not None or len(shape_before(source, rule)) < 2 or not _moves_blocks(source, rule):
        return "F32"
    return source.quant_type


def shape_of(source: Source, rule: Rule) -> tuple[int, ...]:
    """Its shape once everything is done."""
    shape = list(shape_before(source, rule))
    if rule.transposed:
        shape[-2:] = reversed(shape[-2:])
    if rule.share is not None:
        shape[rule.share_axis] = len(range(*rule.share.indices(shape[rule.share_axis])))
    return tuple(shape)


def shape_before(source: Source, rule: Rule) -> tuple[int, ...]:
    """The directory's shape, or the rule's where it has as many values."""
    return rule.shape if rule.shape and prod(rule.shape) == prod(source.shape) else source.shape


def moved(source: Source, rule: Rule, quant_type: str) -> Bytes:
    """Its bytes in this type, everything done to it that the rule says."""
    _check_order(source, rule)
    held, data = source.quant_type, source.read()
    if held != quant_type:
        data, held = dequantize(data, held, source.shape).reshape(-1).view(np.uint8), "F32"
    if rule.rows is not None or rule.columns is not None or rule.transposed or rule.share is not None:
        data = _reordered(data, held, shape_before(source, rule), rule)
    if rule.compute is not None:
        values = rule.compute(np.ascontiguousarray(data).reshape(-1).view(np.float32))
        return values.reshape(-1).view(np.uint8)
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _reordered(data: Bytes, quant_type: str, shape: tuple[int, ...], rule: Rule) -> Bytes:
    elements, num_bytes = block_size(quant_type)
    *outer, rows, cols = _as_matrices(shape)
    blocks = data.reshape(prod(outer), rows, cols // elements, num_bytes)
    if rule.transposed:
        blocks = blocks.swapaxes(1, 2)
    if rule.share is not None:
        blocks = blocks[:, rule.share] if rule.share_axis == -2 else blocks[:, :, rule.share]
    if rule.rows is not None:
        blocks = blocks[:, rule.rows]
    if rule.columns is not None:
        blocks = blocks[:, :, rule.columns[::elements] // elements]
    return blocks


def _as_matrices(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with a column for each value of a vector."""
    return (*shape, 1) if len(shape) < 2 else shape


def _moves_blocks(source: Source, rule: Rule) -> bool:
    """Whether what the rule does to columns leaves the blocks of a packed type whole."""
    elements, _ = block_size(source.quant_type)
    if elements == 1:
        return True
    return not rule.transposed and (rule.columns is None or _is_whole(rule.columns, elements))


def _is_whole(order: Order, elements: int) -> bool:
    """Whether an order moves runs of so many columns, each from where such a run began."""
    runs = order.reshape(-1, elements) if len(order) % elements == 0 else order[:, None] + 1
    return bool((runs[:, 0] % elements == 0).all() and (np.diff(runs, axis=1) == 1).all())


def _check_order(source: Source, rule: Rule) -> None:
    shape = _as_matrices(shape_before(source, rule))
    for axis, order in ((len(shape) - 2, rule.rows), (len(shape) - 1, rule.columns)):
        if order is not None and shape[axis] != len(order):
            raise CheckpointError(
                f"{source.file.path.name}: tensor {source.name!r:.80} has shape {list(source.shape)}, "
                f"but config.json makes its axis {axis} {len(order)} long"
            )
