"""Picked keys, compressed groups, and attention over both on the CPU backend: against the reference, and bits."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.compressed import Compressor, WindowSpec
from pocketllm.engine.backends.api.indexed import GroupIndex
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.native import cpu_ops, poison_results, usable_isas
from tests.unit.test_ops import normal

Array = npt.NDArray[np.float32]
Tensor = Callable[[Array], Any]
BLOCKS = 60
"""In a cache, of which each of two sequences has some."""
CUTS = ((0, 90), (90, 93), (93, 150))
"""Steps of the longer sequence; the other one has a third of its tokens."""


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> Any:
    return exact(isa)


def exact(isa: str, threads: int = 2) -> Any:
    return cpu_ops(threads, activation_dtype="float32", kv_dtype="float32", isa=isa)


@pytest.fixture
def reference() -> ReferenceOps:
    torch.set_num_threads(1)
    return ReferenceOps()


@pytest.fixture(autouse=True)
def outputs_begin_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_results(monkeypatch)


def plain(x: Array) -> Array:
    return x


def sides(ops: Any, reference: ReferenceOps) -> list[tuple[Any, Tensor]]:
    """Both backends, each with how it takes an array."""
    return [(ops, plain), (reference, torch.from_numpy)]


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    got, expected = np.asarray(got), np.asarray(expected)
    return got.shape == expected.shape and np.allclose(got, expected, rtol=tolerance, atol=tolerance)


def step(spans: Sequence[tuple[int, int]], block_size: int) -> ForwardBatch:
    """Tokens [first, last) of each sequence, whose blocks and slots are always the same."""
    counts = [last - first for first, last in spans]
    table = np.random.default_rng(block_size).permutation(BLOCKS).reshape(2, -1)[: len(spans)].astype(np.int32)
    at = [np.arange(first, last) for first, last in spans]
    slots = [blocks[own // block_size] * block_size + own % block_size for blocks, own in zip(table, at, strict=True)]
    return ForwardBatch(
        input_ids=np.zeros(sum(counts), np.int32),
        positions=np.concatenate(at).astype(np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([last for _, last in spans], np.int32),
        block_table=table,
        slot_mapping=np.concatenate(slots).astype(np.int64),
        logit_rows=np.zeros(0, np.int32),
        state_slots=np.array([3, 1], np.int32)[: len(spans)],
    )


def steps(block_size: int, cuts: Sequence[tuple[int, int]] = CUTS) -> list[ForwardBatch]:
    """Two sequences in as many steps."""
    return [step([(first, last), (first // 3, last // 3)], block_size) for first, last in cuts]


def rows_of(batch: ForwardBatch, width: int, seed: int) -> Array:
    """Rows that a token has whatever the step it is in."""
    by_sequence = [normal(200, width, seed=100 * seed + number) for number in range(batch.num_seqs)]
    bounds = pairwise(batch.query_start_loc.tolist())
    return np.concatenate([rows[batch.positions[a:b]] for rows, (a, b) in zip(by_sequence, bounds, strict=True)])


def poisoned(cache: Any) -> Any:
    """A cache in which nothing is a number."""
    if hasattr(cache, "memory"):
        cache.memory()[:] = 0xFF
    return cache


def picked(selection: Any) -> list[list[int]]:
    """The keys that each token attends, as this backend says it."""
    rows = np.asarray(selection).view(np.int32)
    return [row[1 : 1 + row[0]].tolist() for row in rows]


def not_hidden(selection: Sequence[torch.Tensor]) -> list[list[int]]:
    """The same, as the reference says it."""
    return [np.flatnonzero(~row[0].numpy()).tolist() for hidden in selection for row in hidden]


# -- which keys --------------------------------------------------------------------------------------------------------
def index_of(tensor: Tensor, dim: int) -> GroupIndex:
    freq = (100.0 ** -np.linspace(0, 1, dim // 2 - 1)).astype(np.float32)
    return GroupIndex(3, dim, 4, 5, Norm(tensor(normal(dim, seed=7)), 1e-3), tensor(freq))


Pick = Callable[[Any, Tensor, ForwardBatch, Any], Any]


def pick_keys(ops: Any, tensor: Tensor, batch: ForwardBatch, cache: Any) -> Any:
    spec = IndexerSpec(3, 20, 21)
    ops.store_latent(cache, 1, batch, tensor(rows_of(batch, 20, 1)))
    return ops.select_keys(tensor(rows_of(batch, 60, 2)), tensor(rows_of(batch, 3, 3)), cache, 1, batch, spec)


def pick_groups(ops: Any, tensor: Tensor, batch: ForwardBatch, cache: Any) -> Any:
    ops.store_latent(cache, 1, batch, tensor(rows_of(batch, 20, 1)))
    return ops.select_groups(tensor(rows_of(batch, 60, 2)), cache, 1, batch, index_of(tensor, 20))


@pytest.mark.parametrize("pick", [pick_keys, pick_groups])
@pytest.mark.parametrize("block_size", [16, 9])
def test_keys_and_groups_are_picked_as_by_the_reference(
    ops: Any, reference: ReferenceOps, pick: Pick, block_size: int
) -> None:
    own, theirs = (poisoned(some.new_latent_cache(2, 20, BLOCKS, block_size)) for some, _ in sides(ops, reference))
    for batch in steps(block_size):
        expected = not_hidden(pick(reference, torch.from_numpy, batch, theirs))

        assert picked(pick(ops, plain, batch, own)) == expected


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_of_equal_keys_the_earlier_are_picked(ops: Any, weight: float) -> None:
    batch, ones = step([(0, 40)], 16), np.ones((40, 8), np.float32)
    cache = poisoned(ops.new_latent_cache(1, 8, BLOCKS, 16))
    ops.store_latent(cache, 0, batch, ones)
    weights = np.full((40, 1), weight, np.float32)
    got = picked(ops.select_keys(ones, weights, cache, 0, batch, IndexerSpec(1, 8, 5)))

    assert got == [list(range(min(token + 1, 5))) for token in range(40)]


# -- attention over them -----------------------------------------------------------------------------------------------
GEOMETRY = AttentionSpec(num_heads=26, num_kv_heads=2, head_dim=12, scale=0.3)
LATENT = LatentAttentionSpec(num_heads=14, rank=24, rope_dim=6, scale=0.2)


def selected(ops: Any, tensor: Tensor, batches: Sequence[ForwardBatch], block_size: int) -> list[Any]:
    """Attention over picked groups of keys, and over picked latents, in each step."""
    index_keys = poisoned(ops.new_latent_cache(2, 20, BLOCKS, block_size))
    kv = poisoned(ops.new_kv_cache(2, 2, 12, 7, BLOCKS, block_size))
    latents = poisoned(ops.new_latent_cache(2, 30, BLOCKS, block_size))
    out = []
    for batch in batches:
        ops.store_kv(kv, 1, tensor(rows_of(batch, 24, 4)), tensor(rows_of(batch, 14, 5)), batch)
        ops.store_latent(latents, 1, batch, tensor(rows_of(batch, 24, 6)), tensor(rows_of(batch, 6, 7)))
        groups = pick_groups(ops, tensor, batch, index_keys)
        out.append(ops.selected_attention(tensor(rows_of(batch, 26 * 12, 8)), kv, 1, batch, GEOMETRY, groups))
        keys = pick_keys(ops, tensor, batch, index_keys)
        q = tensor(rows_of(batch, 14 * 24, 9)), tensor(rows_of(batch, 14 * 6, 10))
        out.append(ops.latent_attention(*q, latents, 1, batch, LATENT, keys))
    return out


@pytest.mark.parametrize("block_size", [16, 9])
def test_attention_over_picked_keys_agrees(ops: Any, reference: ReferenceOps, block_size: int) -> None:
    batches = steps(block_size)
    expected = selected(reference, torch.from_numpy, batches, block_size)
    for got, wanted in zip(selected(ops, plain, batches, block_size), expected, strict=True):
        assert close(got, wanted)


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_picked_keys_and_attention_have_the_same_bits_in_any_chunks_with_any_threads(isa: str, kv_dtype: str) -> None:
    results = []
    for threads, cuts, block_size in ((1, ((0, 150),), 16), (3, CUTS, 16), (2, ((0, 33), (33, 150)), 9)):
        ops = cpu_ops(threads, kv_dtype=kv_dtype, isa=isa)
        batches = steps(block_size, cuts)
        parts = selected(ops, plain, batches, block_size)
        results.append([by_sequence(parts[which::2], batches) for which in (0, 1)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def by_sequence(parts: Sequence[Array], batches: Sequence[ForwardBatch]) -> list[Array]:
    """Each sequence's rows of all steps."""
    cut = [np.split(part, batch.query_start_loc[1:-1]) for part, batch in zip(parts, batches, strict=True)]
    return [np.concatenate(rows) for rows in zip(*cut, strict=True)]


# -- compressed groups -------------------------------------------------------------------------------------------------
SHAPES = {
    "overlapping": (4, 10, True, True),
    "long": (24, 34, False, True),
    "neither normed nor turned": (3, 16, False, False),
}


def compressor_of(tensor: Tensor, ratio: int, dim: int, overlaps: bool, is_turned: bool) -> Compressor:
    width = dim * (2 if overlaps else 1)
    freq = (100.0 ** -np.linspace(0, 1, dim // 2 - 1)).astype(np.float32)
    norm = Norm(tensor(normal(dim, seed=4)), 1e-3)
    more = (norm, tensor(freq)) if is_turned else ()
    return Compressor(ratio, dim, overlaps, tensor(normal(ratio, width, seed=3)), *more)


def compressed(ops: Any, tensor: Tensor, shape: tuple[int, int, bool, bool], block_size: int) -> list[Any]:
    """What attention finds over a window alone, over all entries, and over those that are picked; and the states."""
    how = compressor_of(tensor, *shape)
    cache = poisoned(ops.new_compressed_cache(2, how.dim, how.ratio, BLOCKS, block_size))
    before = (2 if how.overlaps else 1) * how.ratio - 1
    groups, window = (ops.new_states(2, size, (0, 0, 0), 4) for size in ((before, 2 * how.width), (7 - 1, how.dim)))
    for kept in (groups.conv[1], window.conv[1]):
        kept[:] = np.nan
    spec, index, out = WindowSpec(14, how.dim, 7, 0.3), IndexerSpec(2, how.dim, 5), []
    sinks = tensor(normal(14, seed=5))
    for batch in steps(block_size):
        rows = [tensor(rows_of(batch, how.width, seed)) for seed in (1, 2)]
        ops.compress(*rows, groups, 1, cache, 1, batch, how)
        index_q = tensor(rows_of(batch, 2 * how.dim, 3)), tensor(rows_of(batch, 2, 4))
        entries = ops.select_entries(*index_q, cache, 1, batch, index)
        near = tensor(rows_of(batch, 14 * how.dim, 5)), tensor(rows_of(batch, how.dim, 6)), sinks
        for more in ((), (cache, 1), (cache, 1, entries)):
            again = ops.new_states(2, (7 - 1, how.dim), (0, 0, 0), 4)
            again.conv[1][:] = window.conv[1]
            out.append(ops.window_attention(*near, again, 1, batch, spec, *more))
        window = again
        out += [np.asarray(kept)[[1, 3]].copy() for kept in (groups.conv[1], window.conv[1])]
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block_size", [16, 6])
def test_groups_are_compressed_and_attended_as_by_the_reference(
    ops: Any, reference: ReferenceOps, shape: tuple[int, int, bool, bool], block_size: int
) -> None:
    expected = compressed(reference, torch.from_numpy, shape, block_size)
    for got, wanted in zip(compressed(ops, plain, shape, block_size), expected, strict=True):
        assert close(got, wanted, 2e-5)


def test_pools_are_picked_as_by_the_reference(ops: Any, reference: ReferenceOps) -> None:
    found = []
    for some, tensor in sides(ops, reference):
        how = compressor_of(tensor, 4, 20, True, True)
        cache = poisoned(some.new_compressed_cache(1, 20, 4, BLOCKS, 16))
        states = some.new_states(1, (7, 80), (0, 0, 0), 4)
        for batch in steps(16):
            rows = [tensor(rows_of(batch, 40, seed)) for seed in (1, 2)]
            some.compress(*rows, states, 0, cache, 0, batch, how)
            index_q = tensor(rows_of(batch, 60, 3)), tensor(rows_of(batch, 3, 4))
            found.append(some.select_pools(*index_q, cache, 0, batch, IndexerSpec(3, 20, 6)))
    own, theirs = found[: len(CUTS)], found[len(CUTS) :]

    assert [picked(selection) for selection in own] == [not_hidden(selection) for selection in theirs]


def test_what_does_not_fit_is_refused(ops: Any) -> None:
    batch = step([(0, 5)], 16)
    how = compressor_of(plain, 4, 10, True, True)
    cache, states = ops.new_compressed_cache(1, 10, 8, BLOCKS, 16), ops.new_states(1, (7, 40), (0, 0, 0), 4)
    with pytest.raises(ValueError, match="groups of 4 tokens of 20 values do not fit their cache and states"):
        ops.compress(normal(5, 20), normal(5, 20), states, 0, cache, 0, batch, how)
    with pytest.raises(ValueError, match="a window of 9 rows of 10 does not fit its states and cache"):
        ops.window_attention(normal(5, 10), normal(5, 10), normal(1), states, 0, batch, WindowSpec(1, 10, 9, 1.0))
    latents = ops.new_latent_cache(1, 6, BLOCKS, 16)
    with pytest.raises(ValueError, match="an index of keys of 8 values"):
        ops.select_keys(normal(5, 8), normal(5, 1), latents, 0, batch, IndexerSpec(1, 8, 2))


# -- blocks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize("kind", ["keys and values", "latents", "entries"])
def test_blocks_are_copied_in_order_with_all_layers_and_scales(isa: str, kv_dtype: str, kind: str) -> None:
    ops = cpu_ops(1, kv_dtype=kv_dtype, isa=isa)
    cache = {
        "keys and values": lambda: ops.new_kv_cache(3, 2, 5, 7, 6, 16),
        "latents": lambda: ops.new_latent_cache(3, 13, 6, 16),
        "entries": lambda: ops.new_compressed_cache(3, 13, 4, 6, 16),
    }[kind]()
    blocks = cache.blocks()
    blocks[:] = np.random.default_rng(0).integers(0, 256, blocks.shape, np.uint8)
    expected = blocks[[4, 1, 4, 3, 4, 4]]
    ops.copy_blocks(cache, np.array([4, 0, 0], np.int32), np.array([0, 2, 5], np.int32))
    elements = {"keys and values": 2 * 16 * 12, "latents": 16 * 13, "entries": 4 * 13}[kind]

    assert blocks.shape[1] >= 3 * elements * (2 if kv_dtype == "float16" else 1)
    assert np.array_equal(blocks, expected)
