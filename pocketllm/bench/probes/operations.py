"""Calls of a backend's operations at the shapes of a checkpoint, with the least they must move and compute."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pocketllm.bench.probes.attention import attention
from pocketllm.bench.probes.cases import FLOAT_BYTES, LARGE, SMALL, Case, Extent, Setting, Shape, some_blocks
from pocketllm.engine.backends.api.drawing import Draw, Drawer, Drawn, drawer_of
from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout, Tensor
from pocketllm.engine.weights.quant import block_size

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

TABLE = "token_embd.weight"
DRAWN_ROWS = (1, 8)
DRAWN_FROM = 32
"""Columns of the head whose logits are drawn from: enough to make some."""
SAMPLED = Draw(0, temperature=0.8, top_k=40, top_p=0.95, share=0.5)


def make_cases(engine: "Engine", extent: Extent | None = None) -> list[Case]:
    """Every case of this engine's backend and checkpoint, weights loaded."""
    setting = Setting(engine, extent or (SMALL if engine.backend.probe is None else LARGE))
    makers = (projections, elementwise, attention, embeddings, mixtures, draws)
    return [case for maker in makers for case in maker(setting)]


def projections(setting: Setting) -> Iterator[Case]:
    """`project` of each type and shape of matrix in the checkpoint, and of every type at the extent's shapes."""
    checkpoint, types = setting.engine.checkpoint, setting.capability.quant_types
    matrices: dict[tuple[str, int, int], Callable[[], npt.NDArray[np.uint8]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2 and tensor.quant_type in types:
            matrices.setdefault((tensor.quant_type, *tensor.shape), partial(checkpoint.data, name))
    for quant_type in types:
        for out, width in setting.extent.matrices:
            matrices.setdefault((quant_type, out, width), partial(some_blocks, quant_type, out, width))
    for (quant_type, out, width), data in sorted(matrices.items(), key=lambda item: item[0]):
        yield from products(setting, quant_type, (out, width), data())


def products(setting: Setting, quant_type: str, shape: tuple[int, int], data: npt.NDArray[np.uint8]) -> Iterator[Case]:
    """One matrix, by rows."""
    ops, (out, width) = setting.ops, shape
    weight_bytes = setting.kept_bytes(quant_type, out * width)
    weights = setting.in_turn(ops.load_matrix(data, quant_type, shape), weight_bytes)
    matrices = [Projection(weight) for weight in weights]
    for rows in setting.extent.rows:
        x = setting.rows(rows, width)
        yield Case(
            "project",
            f"project {quant_type} {width}→{out} ×{rows}",
            [partial(ops.project, x, matrix) for matrix in matrices],
            weight_bytes + FLOAT_BYTES * rows * (width + out),
            2.0 * rows * out * width,
            kind=quant_type,
            shape=f"{width}→{out}",
            rows=rows,
            peer=setting.peer_product(rows, width, out),
        )


def elementwise(setting: Setting) -> Iterator[Case]:
    """Operations on rows alone."""
    for shape in setting.shapes:
        for rows in setting.extent.rows:
            yield from row_operations(setting, shape, rows)


def row_operations(setting: Setting, shape: Shape, rows: int) -> Iterator[Case]:
    """Of so many rows of a shape."""
    ops = setting.ops
    heads, key_dim = shape.num_heads * shape.key_dim, shape.key_dim
    norm = Norm(ops.load_vector(np.ones(shape.hidden, np.float32)), 1e-5)
    frequencies = ops.load_vector(1e4 ** -np.linspace(0, 1, key_dim // 2, endpoint=False, dtype=np.float32))
    x, y, gate = setting.rows(rows, shape.hidden), setting.rows(rows, shape.hidden), setting.rows(rows, shape.inner)
    q, positions = setting.rows(rows, heads), setting.resident(np.arange(rows, dtype=np.int32))
    angles = ops.rope_angles(frequencies, positions, 1.0)
    calls: Mapping[str, tuple[Callable[[], Any], int, int]] = {
        "rms_norm": (partial(ops.rms_norm, x, norm), shape.hidden, 2 * shape.hidden),
        "add": (partial(ops.add, x, y), shape.hidden, 3 * shape.hidden),
        "silu_mul": (partial(ops.silu_mul, gate, gate), shape.inner, 2 * shape.inner),
        "rope": (partial(ops.rope, q, angles, key_dim, RopeLayout.ADJACENT), heads, 2 * heads + key_dim),
        "rope_angles": (partial(ops.rope_angles, frequencies, positions, 1.0), key_dim, key_dim),
        "take": (partial(ops.take, x, positions), shape.hidden, 2 * shape.hidden),
        "to_numpy": (partial(ops.to_numpy, x), shape.hidden, 2 * shape.hidden),
    }
    for op, (call, width, floats) in calls.items():
        yield Case(
            op,
            f"{op} {shape.mark} ×{rows}".replace("  ", " "),
            [call],
            FLOAT_BYTES * rows * floats,
            shape=str(width),
            rows=rows,
            peer=setting.peer.rms_norm(rows, width) if op == "rms_norm" and setting.peer is not None else (),
            reads_back=op == "to_numpy",
        )


def embeddings(setting: Setting) -> Iterator[Case]:
    """`embed` from the checkpoint's table."""
    checkpoint, ops = setting.engine.checkpoint, setting.ops
    tensor = checkpoint.tensors[TABLE]
    vocab, width = tensor.shape
    table = ops.load_matrix(checkpoint.data(TABLE), tensor.quant_type, (vocab, width))
    for rows in setting.extent.rows:
        ids = np.random.default_rng(rows).integers(0, vocab, rows).astype(np.int32)
        yield Case(
            "embed",
            f"embed {tensor.quant_type} {width} ×{rows}",
            [partial(ops.embed, table, setting.resident(ids))],
            rows * (setting.kept_bytes(tensor.quant_type, width) + FLOAT_BYTES * width),
            kind=tensor.quant_type,
            shape=str(width),
            rows=rows,
        )


def mixtures(setting: Setting) -> Iterator[Case]:
    """`mixture` with the checkpoint's sizes, or the extent's; a call's rows are others than those of the last."""
    if "mixture" not in setting.capability.ops:
        return
    own = setting.shapes[0]
    shape = own if own.experts is not None else setting.extent.mixture
    assert shape.experts is not None
    (count, used), hidden, inner, ops = shape.experts, shape.hidden, shape.expert_inner, setting.ops
    kind = fitting_type(setting, hidden, inner)
    router = np.random.default_rng(0).standard_normal((count, hidden)).astype(np.float32)
    gate, up, down = (
        ops.load_experts(some_blocks(kind, count, *matrix), kind, (count, *matrix))
        for matrix in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    projection = Projection(ops.load_matrix(router.reshape(-1).view(np.uint8), "F32", (count, hidden)))
    experts = Experts(projection, gate, up, down, Routing(used, Gating.SOFTMAX, True))
    expert_bytes = 3 * setting.kept_bytes(kind, inner * hidden)
    for rows in setting.extent.rows:
        # no more are read than there are; fewer where rows agree on some
        read_bytes = expert_bytes * count * (1 - (1 - used / count) ** rows)
        turns = setting.turns(read_bytes)
        yield Case(
            "mixture",
            f"mixture {kind} {used}/{count} {hidden}→{inner} ×{rows}",
            [partial(ops.mixture, setting.rows(rows, hidden, first=turn * rows), experts) for turn in range(turns)],
            read_bytes + FLOAT_BYTES * (router.size + 2 * rows * hidden),
            6.0 * rows * used * hidden * inner,
            kind=kind,
            shape=f"{used}/{count} {inner}",
            rows=rows,
        )


def fitting_type(setting: Setting, *widths: int) -> str:
    """A quant type whose blocks fill these widths."""
    types = [name for name in ("Q4_K", "Q8_0") if name in setting.capability.quant_types]
    return next((name for name in types if not any(width % block_size(name)[0] for width in widths)), "F32")


def draws(setting: Setting) -> Iterator[Case]:
    """A token for each row of logits, where the backend draws them, until the host has it."""
    ops, width = setting.ops, DRAWN_FROM
    vocab = setting.engine.checkpoint.tensors[TABLE].shape[0]
    table = ops.load_matrix(some_blocks("F32", vocab, width), "F32", (vocab, width))
    drawer = drawer_of(ops.capture(lambda batch: ops.embed(table, batch.input_ids), 1))
    if drawer is None:
        return
    for rows in DRAWN_ROWS:
        [logits] = ops.project(setting.rows(rows, width), Projection(table))
        for word, how in (("greedy", Draw(0)), ("sampled", SAMPLED)):
            wanted = [replace(how, row=row) for row in range(rows)]
            yield Case(
                "draw",
                f"draw {word} {vocab} ×{rows}",
                [partial(drawn, drawer, logits, wanted)],
                FLOAT_BYTES * rows * vocab,
                kind=word,
                shape=str(vocab),
                rows=rows,
                reads_back=True,
            )


def drawn(drawer: Drawer, logits: Tensor, wanted: Sequence[Draw]) -> Sequence[Drawn]:
    """Tokens, once the host has them."""
    return drawer.draw(logits, wanted).wait()
