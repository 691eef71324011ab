"""Checks of caches of eight bits, on a GPU, or on the CPU with TRITON_INTERPRET=1 as `tests/unit/test_cuda_narrow.py`
does it.

usage: python -m tests.cuda.narrow [kept] [attention] [steps]
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.cuda import attention as cuda_attention
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.interpreted import batch_of, rows
from tests.cuda.model import Session, error
from tests.cuda.rounding import LARGEST, Rounding, kept_as
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import asked

RANDOM = np.random.default_rng(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kept() -> None:
    """Numbers and scales are those that torch rounds to, of heads of any size; copies of blocks have both."""
    slots, heads, shape = [6, -1, 1, 11, 4], 3, (20, 12)
    k, v = (RANDOM.standard_normal((5, heads, dim)).astype(np.float32) for dim in shape)
    k[0] *= 1e4  # beyond what either type has by itself
    k[2, 0], v[3, 1] = 0.0, 0.0
    k[3, 2, :6] = [127.0, 0.5, 1.5, -2.5, 448.0 / 64, 2.0**-9]  # halves, and numbers below the smallest power
    k[4, 1] *= 1e-6
    v[4, 0, 3] = 3e3  # the others are small beside it
    batch = replace(batch_of(np.arange(3)[None], np.array([5]), np.array([0])), slot_mapping=np.array(slots, np.int64))
    for kv_dtype in LARGEST:
        ops = CudaOps(kv_dtype, DEVICE)
        cache = ops.new_kv_cache(1, heads, *shape, 3, 4)
        ops.store_kv(cache, 0, *(rows(ops, x.reshape(5, -1)) for x in (k, v)), batch)
        pairs = ((k, cache.keys[0], cache.key_scales[0]), (v, cache.values[0], cache.value_scales[0]))
        for given, numbers, scales in pairs:
            want_numbers, want_scales = torch.zeros(numbers.shape), torch.zeros(scales.shape)
            for token, slot in enumerate(slots):
                if slot >= 0:
                    own, scale = kept_as(kv_dtype, torch.from_numpy(given[token]))
                    want_numbers[slot // 4, slot % 4] = own.float()
                    want_scales[slot // 4, :, slot % 4] = scale[:, 0]
            assert torch.equal(numbers.float().cpu(), want_numbers), kv_dtype
            assert torch.equal(scales.cpu(), want_scales), kv_dtype
        ops.copy_blocks(cache, np.array([1], np.int32), np.array([0], np.int32))
        assert all(torch.equal(kept[0].float(), kept[1].float()) for kept in cache.tensors())
        assert cache.key_scales[0][0].any()
        spent = sum(kept.nbytes for kept in cache.tensors())
        assert spent == 12 * heads * (sum(shape) + 2 * 4)  # what the plan counts: a byte a number, and two scales


def attention() -> None:
    """Sequences of one token and of more over scattered blocks, against the reference over the same rounded keys."""
    lengths, counts, heads, shape = np.array([43, 9, 1, 20], np.int32), np.array([1, 9, 1, 18], np.int32), 2, (24, 20)
    places = iter(RANDOM.permutation(16).tolist())
    table = np.full((4, 3), -1, np.int32)
    for row, number in enumerate(-(-lengths // 16)):
        table[row, :number] = [next(places) for _ in range(number)]
    batch, history = batch_of(table, counts, lengths - counts), batch_of(table, lengths, 0 * lengths)
    unused = [block for block in range(16) if block not in table]
    k, v = (RANDOM.standard_normal((lengths.sum(), heads, dim)).astype(np.float32) for dim in shape)
    k[..., 3] *= 30.0  # a channel that outshines the others
    v *= 10.0 ** RANDOM.uniform(-6, 3, (lengths.sum(), 1, 1))  # tokens next to one another have other scales
    v[lengths[0] + 8] *= 1e6 / np.abs(v[lengths[0] + 8]).max()  # tokens before it, in the same tile, must not feel it
    k, v = (x.astype(np.float32).reshape(len(x), -1) for x in (k, v))
    q = RANDOM.standard_normal((counts.sum(), 6 * shape[0])).astype(np.float16).astype(np.float32)
    sinks = np.array([3.0, -30.0, 0.5, 30.0, 0.0, -1.0], np.float32)
    cases = ((None, None, 256, False), (None, 5.0, 16, False), (20, None, 32, True))
    for kv_dtype in LARGEST:
        cuda, reference = CudaOps(kv_dtype, DEVICE), Rounding(kv_dtype)
        for window, softcap, split, has_sinks in cases:
            cuda_attention.SPLIT, cuda_attention.SPLIT_TILE = split, min(split, 32)
            spec = AttentionSpec(6, heads, shape[0], 0.05, window, softcap)

            def attended(
                ops: Any, step: Any = batch, spec: Any = spec, has_sinks: bool = has_sinks, at: Any = q
            ) -> Any:
                cache = ops.new_kv_cache(1, heads, *shape, 16, 16)
                ops.store_kv(cache, 0, rows(ops, k), rows(ops, v), history)
                for scales in (*getattr(cache, "key_scales", ()), *getattr(cache, "value_scales", ())):
                    scales[unused] = torch.nan
                if has_sinks:
                    return ops.sink_attention(rows(ops, at), ops.load_vector(sinks), cache, 0, step, spec)
                return ops.attention(rows(ops, at), cache, 0, step, spec)

            got, want = (ops.to_numpy(attended(ops)) for ops in (cuda, reference))
            far = max(error(*each) for each in zip(got, want, strict=True))
            assert far < 1e-3, (kv_dtype, spec, far)
            ones = [row for row, count in enumerate(counts) if count == 1]
            firsts = np.cumsum(counts) - counts
            some = batch_of(table[ones], counts[ones], (lengths - counts)[ones])
            beside = cuda.to_numpy(attended(cuda, some, at=q[firsts[ones]]))
            assert np.array_equal(beside, got[firsts[ones]]), (kv_dtype, spec)
            piece = batch_of(table[[1]], np.array([5]), np.array([0]))  # of a prompt that goes on later
            alone = cuda.to_numpy(attended(cuda, piece, at=q[firsts[1] : firsts[1] + 5]))
            assert np.array_equal(alone, got[firsts[1] : firsts[1] + 5]), (kv_dtype, spec)


def steps() -> None:
    """Decode steps, which attend their own keys before those are in the cache and put them there: they leave what a
    prompt's step leaves, and say what the reference does over rounded keys."""
    shape = (1, 32, 32, 2, 1, 32, 4)
    for kv_dtype in LARGEST:
        cuda, reference = (
            Session(Synthetic(*shape, types=("Q4_0", "Q8_0", "Q5_0"), scale=0.03), ops, 2, 16)
            for ops in (CudaOps(kv_dtype, DEVICE), Rounding(kv_dtype))
        )
        for ids, starts in (([[3]], [0]), ([[1], [2]], [1, 0])):
            batch = cuda.batch(ids, starts)
            far = error(cuda.logits(batch), reference.logits(batch))
            assert far < 5e-3, (kv_dtype, starts)
        stepped = [kept.float().cpu() for kept in cuda.cache.tensors()]
        cuda.logits(cuda.batch([[3, 1], [2]], [0, 0]))
        for one, other in zip(stepped, cuda.cache.tensors(), strict=True):
            assert one.any()
            far = error(one.numpy(), other.float().cpu().numpy())
            assert far < 5e-3, (kv_dtype, one, other)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (kept, attention, steps)}
    for part in asked(__doc__, PARTS):
        PARTS[part]()
