"""Checks of the kernels on the CPU: run with TRITON_INTERPRET=1 (`tests/unit/test_cuda_kernels.py` does).

usage: python -m tests.cuda.interpreted packing | repacking | products | rows_and_heads | attention | steps | draws |
replays
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Projection, RopeLayout
from pocketllm.engine.backends.cuda import attention as cuda_attention
from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_indexed, unpack_rows
from pocketllm.engine.backends.cuda.layouts import LAYOUTS
from pocketllm.engine.backends.cuda.matrices.repacking import as_bits, new_packed, repack_by_kernels, write
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.backends.cuda.packing import Packed, unpack
from pocketllm.engine.backends.cuda.steps.drawing import sampling
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.weights import quant
from pocketllm.engine.weights.quant_types import BY_NAME
from tests.cuda import draw_replays
from tests.cuda.draws import check as check_draws
from tests.cuda.kernels import multiply, rows_in, values_of
from tests.cuda.model import Session, error
from tests.cuda.synthetic import HALVES, Synthetic
from tests.cuda.words import asked

RANDOM = np.random.default_rng(0)
SEVERAL = {"Q4_K": (9,), "Q5_K": (2,), "Q6_K": (2,), "Q8_0": (2,), "IQ4_NL": (2,), "IQ2_XS": (2,), "Q2_K": (2,)}
"""Rows that are multiplied together, for a type of each way to hold codes and scales."""
ROUNDED = ("Q6_K", "IQ4_XS")
"""Types of which the largest codes times their scales are rounded to float16 where rows are several."""
FIELDS = ("words", "high", "scales", "shared")
POISON = 77
CUDA, REFERENCE = CudaOps(kv_dtype="float32", device="cpu"), ReferenceOps()


def blocks(quant_type: str, rows: int, cols: int, is_tame: bool = True) -> Any:
    """Random blocks; tame ones have ordinary scales."""
    kind = BY_NAME[quant_type]
    data = RANDOM.integers(0, 256, (rows, cols // kind.block_elements, kind.block_bytes), dtype=np.uint8)
    for at in HALVES.get(quant_type, ()) if is_tame else ():
        data[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if quant_type == "MXFP4" and is_tame:
        data[..., 0] = 120
    if quant_type == "IQ1_M" and is_tame:  # its scale lies in the upper halves of four bytes
        for at, part in zip((49, 51, 53, 55), (0xF, 0x1, 0x1, 0x2), strict=True):
            data[..., at] = data[..., at] & 15 | part << 4
    return data


def packing() -> None:
    """Every bit pattern keeps its value in its layout, and the unpacking kernel gives it back."""
    for quant_type in LAYOUTS:
        data = blocks(quant_type, 6, 512, is_tame=False)
        held = matrices.load(data, quant_type, (6, 512), torch.device("cpu")).held
        assert isinstance(held, Packed)
        want = quant.dequantize(data, quant_type, (6, 512))
        assert np.array_equal(unpack(held).numpy(), want, equal_nan=True), quant_type
        out = torch.full((3, 512), torch.nan)
        unpack_indexed(held, torch.tensor([5, 0, 2], dtype=torch.int32), out, 1.0)
        assert np.array_equal(out.numpy(), want[[5, 0, 2]], equal_nan=True), quant_type
        out = torch.full((6, 512), torch.nan)
        unpack_rows(held, out)
        assert np.array_equal(out.numpy(), want, equal_nan=True), quant_type
    parts = [matrices.load(blocks("Q6_K", 16, 256), "Q6_K", (16, 256), torch.device("cpu")) for _ in range(2)]
    whole = torch.cat([unpack(part.held) for part in parts])
    assert torch.equal(unpack(matrices.join(parts)), whole)
    assert torch.equal(torch.cat([unpack(part.held) for part in parts]), whole)


def repacking() -> None:
    """The kernel that brings a file's bytes into a layout against torch, bit by bit: rows and columns fill no tile."""
    for quant_type in LAYOUTS:
        is_short = BY_NAME[quant_type].block_elements == 32
        for rows, cols in ((33, 672), (17, 32)) if is_short else ((33, 256), (17, 768)):
            data = torch.from_numpy(blocks(quant_type, rows, cols, is_tame=False))
            want, got = (new_packed(LAYOUTS[quant_type], rows, cols, data.device) for _ in range(2))
            bits_of = [[as_bits(getattr(packed, name)) for name in FIELDS] for packed in (want, got)]
            for part in itertools.chain(*bits_of):
                part.fill_(POISON)
            # in two pieces, as a longer matrix comes
            write(data, quant_type, want, 0)
            repack_by_kernels(data[16:], quant_type, got, 16)
            repack_by_kernels(data[:16], quant_type, got, 0)
            for name, one, other in zip(FIELDS, *bits_of, strict=True):
                assert torch.equal(one, other), (quant_type, rows, cols, name)


def products() -> None:
    """The kernel for few rows against float64, outputs poisoned; few and many rows through `project`."""
    for quant_type in LAYOUTS:
        held = matrices.load(blocks(quant_type, 4, 256), quant_type, (4, 256), torch.device("cpu")).held
        assert isinstance(held, Packed)
        for count in (1, *SEVERAL.get(quant_type, ())):
            x = rows_in(torch.randn(count, 256))
            y, bias, residual = torch.full((count, 4), torch.nan), torch.randn(4), torch.randn(count, 4)
            multiply(x, held, y, bias, residual)
            want = values_of(x, 256) @ unpack(held).double().T + bias + residual
            largest = 2e-4 if count > 1 and quant_type in ROUNDED else 2e-5
            assert error(y.numpy(), want.numpy()) < largest, (quant_type, count)
    held = matrices.load(blocks("Q4_K", 70, 1280), "Q4_K", (70, 1280), torch.device("cpu")).held
    assert isinstance(held, Packed)
    wide = rows_in(torch.randn(17, 1280))  # more than one program for a row, and more rows than the smaller tile has
    for _ in range(2):  # what counts programs is as it was before
        y = torch.full((17, 70), torch.nan)
        multiply(wide, held, y)
        want = values_of(wide, 1280) @ unpack(held).double().T
        assert error(y.numpy(), want.numpy()) < 2e-5
    data, norm = blocks("Q4_K", 8, 256), RANDOM.standard_normal(256).astype(np.float32)
    for tokens in (2, 33):
        x = RANDOM.standard_normal((tokens, 256)).astype(np.float32)

        def both(ops: Any, x: Any = x) -> Any:
            bias = ops.load_vector(norm[:8])
            first = Projection(ops.load_matrix(data, "Q4_K", (8, 256)), bias)
            second = Projection(ops.load_matrix(data[::-1].copy(), "Q4_K", (8, 256)))
            y, z = ops.project(rows(ops, x), first, second, norm=Norm(ops.load_vector(norm), 1e-5))
            return ops.project_add(ops.silu_mul(rows(ops, x), rows(ops, x)), first, ops.add(y, z))

        assert compared(both) < 1e-3, tokens
    first = Projection(CUDA.load_matrix(data, "Q4_K", (8, 256)))
    CUDA.project(torch.ones(2, 256), first)
    known = weakref.ref(first)
    del first
    gc.collect()
    assert known() is not None  # it is known by its identity, which no other may come to have


def rows_and_heads() -> None:
    """Norms, gates, rotation and embedding as the reference has them."""
    x, y = (RANDOM.standard_normal((3, 64)).astype(np.float32) for _ in range(2))
    weight = RANDOM.standard_normal(64).astype(np.float32)
    freq, positions = (10000.0 ** (-np.arange(6) / 6)).astype(np.float32), np.array([0, 7, 12345], np.int32)
    checks: list[Callable[[Any], Any]] = [
        lambda ops: ops.rms_norm(rows(ops, x), Norm(ops.load_vector(weight), 1e-5)),
        lambda ops: ops.rms_norm(rows(ops, x), Norm(ops.load_vector(weight[:16]), 1e-5)),
        lambda ops: ops.silu_mul(rows(ops, x), rows(ops, y)),
        lambda ops: ops.gelu_mul(rows(ops, x), rows(ops, y)),
        lambda ops: ops.sigmoid_mul(rows(ops, x), rows(ops, y)),
        lambda ops: ops.sigmoid_mul(rows(ops, x[:, :1]), rows(ops, y)),
        lambda ops: ops.mul(rows(ops, x), rows(ops, y)),
        lambda ops: ops.mul(rows(ops, x), ops.load_vector(weight)),
        lambda ops: ops.scale(rows(ops, x), 0.37),
        lambda ops: ops.rms_norm(ops.columns(rows(ops, x), 5, 21), Norm(ops.load_vector(weight[:16]), 1e-5)),
        lambda ops: ops.take(rows(ops, x), np.array([2, 0], np.int32)),
        lambda ops: ops.embed(ops.load_matrix(blocks_once, "Q5_K", (6, 256)), np.array([5, 0], np.int32), 2.5),
    ]
    blocks_once = blocks("Q5_K", 6, 256)
    for count in (1, 3):
        own = rows_in(torch.from_numpy(x[:count]))
        assert torch.allclose(values_of(own, 64).float(), torch.from_numpy(x[:count]), rtol=1e-3, atol=1e-4)
        assert not values_of(own, 128)[:, 64:].any()  # what fills the last block up
    for layout in RopeLayout:

        def rotated(ops: Any, layout: RopeLayout = layout) -> Any:
            normed = ops.rms_norm(rows(ops, x), Norm(ops.load_vector(weight[:16]), 1e-5))
            return ops.rope(normed, ops.rope_angles(ops.load_vector(freq), positions, 1.2), 16, layout)

        checks.append(rotated)
    for number, check in enumerate(checks):
        assert compared(check) < 1e-6, number


def attention() -> None:
    """One step with sequences of one token and of more, over scattered blocks; with a window, and with a soft cap."""
    lengths, counts, dim = np.array([300, 9, 1, 70], np.int32), np.array([1, 9, 1, 66], np.int32), 16
    blocks_of = -(-lengths // 16)
    places = iter(RANDOM.permutation(32).tolist())
    table = np.full((4, blocks_of.max()), -1, np.int32)
    for row, number in enumerate(blocks_of):
        table[row, :number] = [next(places) for _ in range(number)]
    batch = batch_of(table, counts, lengths - counts)
    history = batch_of(table, lengths, 0 * lengths)
    k, v = (RANDOM.standard_normal((lengths.sum(), 2 * dim)).astype(np.float32) for _ in range(2))
    q = RANDOM.standard_normal((counts.sum(), 4 * dim)).astype(np.float32)
    together = cuda_attention.TOGETHER
    for window, softcap, split in ((None, None, 256), (None, None, 16), (40, 5.0, 16), (40, 5.0, 256)):
        cuda_attention.SPLIT, cuda_attention.SPLIT_TILE, cuda_attention.MERGED_AT_ONCE = split, min(split, 64), 8
        spec = AttentionSpec(4, 2, dim, dim**-0.5, window, softcap)

        def attended(ops: Any, spec: AttentionSpec = spec, split: int = split) -> Any:
            cache = ops.new_kv_cache(1, 2, dim, dim, 32, 16)
            ops.store_kv(cache, 0, rows(ops, k), rows(ops, v), history)
            first = ops.attention(rows(ops, q), cache, 0, batch, spec)
            # what counts the splits is as it was before, and a program may take several in turn
            cuda_attention.TOGETHER = 3 if split == 16 else together
            again = ops.attention(rows(ops, q), cache, 0, batch, spec)
            cuda_attention.TOGETHER = together
            assert torch.equal(first, again), (spec, split)
            return again

        assert compared(attended) < 1e-6, (spec, split)

    # blocks of their own, where those that no window shows any more hold what another has left
    own = np.where(table < 0, -1, np.roll(np.arange(32), 5)[table]).astype(np.int32)
    slots = own[np.repeat(np.arange(4), lengths), history.positions // 16] * 16 + history.positions % 16
    seen = np.maximum(lengths - counts - 40 + 1, 0) // 16
    gone = [block for row, first in enumerate(seen) for block in own[row, :first].tolist()]

    def windowed(ops: Any, sinks: Any = None) -> Any:
        cache = ops.new_kv_cache(1, 2, dim, dim, 32, 16, in_windows=True)
        written = replace(history, window_table=own, window_slots=slots.astype(np.int64))
        ops.store_kv(cache, 0, rows(ops, k), rows(ops, v), written)
        cache.values[0][gone] = float("inf")
        shown = replace(batch, window_table=own, window_slots=np.zeros(len(batch.positions), np.int64))
        if sinks is not None:
            return ops.sink_attention(rows(ops, q), sinks, cache, 0, shown, spec)
        return ops.attention(rows(ops, q), cache, 0, shown, spec)

    assert gone
    assert compared(windowed) < 1e-6
    sinks = np.array([3.0, -30.0, 0.5, 30.0], np.float32)  # a score more, above and below all others
    for split in (16, 256):
        cuda_attention.SPLIT, cuda_attention.SPLIT_TILE, cuda_attention.TOGETHER = split, min(split, 64), 3
        assert compared(lambda ops: windowed(ops, ops.load_vector(sinks))) < 1e-6, split
    assert error(CUDA.to_numpy(windowed(CUDA)), CUDA.to_numpy(attended(CUDA))) == 0.0


def steps() -> None:
    """Decode steps, in which sums, norms and the cache's new rows are put off: as the reference has them."""
    shape = (1, 32, 32, 1, 1, 32, 4)  # rows of no whole number of blocks
    sessions = [
        Session(Synthetic(*shape, types=("Q4_0", "Q8_0", "Q5_0"), scale=0.03), ops, 6, 16) for ops in (CUDA, REFERENCE)
    ]
    for ids, starts in (([[3]], [0]), ([[1], [2]], [1, 0])):
        batch = sessions[0].batch(ids, starts)
        assert error(*(session.logits(batch) for session in sessions)) < 1e-3, starts
    # a graph of as many spare singles as it has tokens, beside a sequence of several
    batch = sessions[0].batch([[3], [1], [2], [0], [3], [1, 2, 3]], [0] * 6)
    assert error(sessions[0].padded(batch), sessions[1].logits(batch)) < 1e-3
    captured = weakref.ref(sessions[0].captured)
    del sessions
    gc.collect()
    assert captured() is None  # an engine that is let go takes its cache and graphs with it


def draws() -> None:
    """Tokens drawn where their logits are, as the host draws them."""
    for vocab in (50, 5000):
        check_draws(CUDA.capture(lambda batch: batch, 1).drawer, RANDOM, torch.from_numpy, vocab)


def replays() -> None:
    """Draws that are captured obey what is asked each time, whatever was asked when they were captured."""
    sampling.ROWS_AT_ONCE = 4  # of more rows some are sorted later
    for vocab, num_rows in ((50, 6), (2500, 6)):
        draw_replays.check(torch.device("cpu"), RANDOM, vocab, num_rows, turns=3)


def batch_of(table: Any, counts: Any, starts: Any) -> ForwardBatch:
    row = np.repeat(np.arange(len(counts)), counts)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).astype(np.int32)
    return ForwardBatch(
        input_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=(starts + counts).astype(np.int32),
        block_table=table,
        slot_mapping=table[row, positions // 16].astype(np.int64) * 16 + positions % 16,
        logit_rows=np.zeros(0, np.int32),
    )


def rows(ops: Any, values: Any) -> Any:
    return ops.load_vector(values.reshape(-1)).view(values.shape)


def compared(check: Callable[[Any], Any]) -> float:
    got, want = (ops.to_numpy(check(ops)) for ops in (CUDA, REFERENCE))
    return error(got, want)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    PARTS: dict[str, Callable[[], None]] = {
        part.__name__: part for part in (packing, repacking, products, rows_and_heads, attention, steps, draws, replays)
    }
    for name in asked(__doc__, PARTS):
        PARTS[name]()
