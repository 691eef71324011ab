"""Each operation of the CPU backend against the reference, on odd shapes; and to the bit against itself in company."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, RopeLayout
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.errors import OptionError
from tests.native import cpu_ops, poison_results, usable_isas
from tests.unit.test_ops import GEOMETRY, WINDOWED, normal, one_sequence, plain_attention

Array = npt.NDArray[np.float32]
KV_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}
"""Of values of size one: what their dtype rounds away."""


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> Any:
    return cpu_ops(2, activation_dtype="float32", kv_dtype="float32", isa=isa)


@pytest.fixture
def reference() -> ReferenceOps:
    torch.set_num_threads(1)
    return ReferenceOps()


@pytest.fixture(autouse=True)
def outputs_begin_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_results(monkeypatch)


def load(ops: Ops, matrix: Array) -> Any:
    return ops.load_matrix(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape)


def on_both(ops: Ops, reference: ReferenceOps, work: Callable[[Ops, Callable[[Array], Any]], Any]) -> tuple[Any, Any]:
    """The same work by both: given the operations, and how to make a tensor of them."""
    return np.asarray(work(ops, lambda x: x)), work(reference, torch.from_numpy).numpy()


def close(got: Array, expected: npt.NDArray[np.floating], tolerance: float = 1e-5) -> bool:
    return got.shape == expected.shape and np.allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [0, 1, 3, 17, 130])
@pytest.mark.parametrize("width", [77, 64])
def test_a_projection_of_floats_agrees(ops: Any, reference: ReferenceOps, tokens: int, width: int) -> None:
    x, weight, bias, norm = normal(tokens, width), normal(33, width, seed=1), normal(33, seed=2), normal(width, seed=3)

    def work(ops: Ops, tensor: Callable[[Array], Any]) -> Any:
        whole = Projection(load(ops, weight), tensor(bias))
        first, second = ops.project(tensor(x), whole, Projection(load(ops, weight[:5])), norm=Norm(tensor(norm), 1e-3))
        added = ops.project_add(tensor(x), whole, first)
        return np.concatenate([np.asarray(part) for part in (first, second, added)], axis=1).view(Wrapped)

    got, expected = on_both(ops, reference, work)
    assert close(got, expected)


class Wrapped(np.ndarray[Any, Any]):
    """An array that answers as a torch tensor does."""

    def numpy(self) -> Array:
        return np.asarray(self)


@pytest.mark.parametrize("width", [60, 64, 1])
def test_norms_of_rows_and_of_heads_agree(ops: Any, reference: ReferenceOps, width: int) -> None:
    x, weight = normal(5, 3 * width), normal(3 * width, seed=1)
    for part in (weight, weight[:width]):
        got, expected = on_both(ops, reference, lambda ops, t, w=part: ops.rms_norm(t(x), Norm(t(w), 1e-2)))
        assert close(got, expected)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "add"])
@pytest.mark.parametrize("width", [50, 48, 7000])
def test_elementwise_operations_agree(ops: Any, reference: ReferenceOps, name: str, width: int) -> None:
    one, other = normal(4, width) * 30, normal(4, width, seed=1)
    one[0, :5] = (-200.0, 200.0, 0.0, 88.0, -88.0)
    got, expected = on_both(ops, reference, lambda ops, t: getattr(ops, name)(t(one), t(other)))

    assert np.isfinite(got).all()
    assert close(got, expected)


@pytest.mark.parametrize("layout", RopeLayout)
@pytest.mark.parametrize("rotated", [12, 8])
def test_rotated_heads_agree(ops: Any, reference: ReferenceOps, layout: RopeLayout, rotated: int) -> None:
    x, positions = normal(5, 3 * 12), np.array([0, 1, 2, 70000, 131071], np.int32)
    inv_freq = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).astype(np.float32)

    def work(ops: Ops, tensor: Callable[[Array], Any]) -> Any:
        return ops.rope(tensor(x), ops.rope_angles(tensor(inv_freq), positions, 0.5), 12, layout)

    got, expected = on_both(ops, reference, work)
    assert close(got, expected, 1e-6)


def test_embedding_rows_are_taken_and_scaled(ops: Any) -> None:
    table, rows = normal(10, 20), np.array([7, 0, 7], np.int32)

    assert np.array_equal(ops.embed(load(ops, table), rows), table[rows])
    assert close(ops.embed(load(ops, table), rows, 24.0), table[rows] * 24)
    assert np.array_equal(ops.take(table, rows), table[rows])


def test_answers_are_the_askers_own(ops: Any) -> None:
    values = normal(2, 20)
    vector, once = ops.load_vector(values[0]), ops.add(values, values)
    first = ops.to_numpy(once)
    expected = first.copy()
    values[:] = 0
    first[:] = 1

    assert type(first) is np.ndarray
    assert vector.any()
    assert np.shares_memory(first, once)
    assert not np.shares_memory(ops.to_numpy(once), once)
    assert not np.array_equal(expected, first)


# -- attention ---------------------------------------------------------------------------------------------------------
WIDE = AttentionSpec(num_heads=16, num_kv_heads=1, head_dim=64, scale=0.1)
ALONE = AttentionSpec(num_heads=3, num_kv_heads=3, head_dim=80, scale=0.2)
SPECS = {"all before": GEOMETRY, "window and softcap": WINDOWED, "one key head": WIDE, "a key head each": ALONE}


def attend(
    ops: Any, spec: AttentionSpec, length: int, first: int, block_size: int, value_dim: int, poison: int = 0xFF
) -> tuple[Array, Array]:
    """What is computed for tokens [first, length) once the ones before are in a cache of poison; and what should be."""
    num_blocks = -(-length // block_size)
    table = np.random.default_rng(2).permutation(num_blocks + 3)[:num_blocks].tolist()
    kv_heads = spec.num_kv_heads
    cache = ops.new_kv_cache(2, kv_heads, spec.head_dim, value_dim, num_blocks + 3, block_size)
    cache.memory()[:] = poison
    q, k = normal(length, spec.num_heads * spec.head_dim), normal(length, kv_heads * spec.head_dim, seed=1)
    v = normal(length, kv_heads * value_dim, seed=2)
    for start, end in ((0, first), (first, length)):
        if start < end:
            batch = one_sequence(end, start, table, block_size)
            ops.store_kv(cache, 1, k[start:end], v[start:end], batch)
    return ops.attention(q[first:], cache, 1, batch, spec), plain_attention(q[first:], k, v, spec, first)


@pytest.mark.parametrize(("length", "first"), [(1, 0), (40, 0), (40, 39), (256, 200), (257, 0), (600, 555), (600, 599)])
@pytest.mark.parametrize("block_size", [16, 24, 32, 1])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_attention_sees_the_cached_tokens_that_it_may(
    ops: Any, length: int, first: int, block_size: int, spec: AttentionSpec
) -> None:
    got, expected = attend(ops, spec, length, first, block_size, value_dim=7)

    assert close(got, expected)


@pytest.mark.parametrize("kv_dtype", KV_TOLERANCE)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("value_dim", [64, 96])
def test_keys_and_values_are_kept_as_narrow_as_asked(isa: str, kv_dtype: str, block_size: int, value_dim: int) -> None:
    ops = cpu_ops(2, kv_dtype=kv_dtype, isa=isa)
    got, expected = attend(ops, replace(WIDE, num_heads=4), 150, 140, block_size, value_dim)
    error = np.abs(got - expected).max()

    assert error <= KV_TOLERANCE[kv_dtype]
    assert kv_dtype == "float32" or error > 1e-6


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 65504.0, 65519.0, 65520.0, 1e-7, 2.98e-8, 6e-5, np.inf, -np.inf, np.nan]
)
def test_values_survive_float16_as_numpy_rounds_them(isa: str, value: float) -> None:
    ops, spec = cpu_ops(1, isa=isa), AttentionSpec(1, 1, 1, 1.0)
    batch = one_sequence(1, 0, [0], 16)
    cache = ops.new_kv_cache(1, 1, 1, 1, 1, 16)
    one = np.array([[value]], np.float32)
    ops.store_kv(cache, 0, np.zeros((1, 1), np.float32), one, batch)
    with np.errstate(over="ignore"):
        expected = one.astype(np.float16).astype(np.float32)

    assert np.array_equal(ops.attention(np.zeros((1, 1), np.float32), cache, 0, batch, spec), expected, equal_nan=True)


def test_an_infinite_value_is_seen_by_those_after_it_only(ops: Any) -> None:
    table, spec = [1, 0, 2], replace(ALONE, num_kv_heads=3)
    cache = ops.new_kv_cache(1, 3, 80, 80, 3, 16)
    q, k, v = (normal(40, 240, seed=seed) for seed in range(3))
    v[20] = np.inf
    batch = one_sequence(40, 0, table, 16)
    ops.store_kv(cache, 0, k, v, batch)
    got = ops.attention(q, cache, 0, batch, spec)

    assert np.isfinite(got[:20]).all()
    assert np.isinf(got[20:]).all()


def test_layers_do_not_touch_each_other(ops: Any) -> None:
    cache = ops.new_kv_cache(3, 2, 10, 7, 4, 16)
    batch = one_sequence(30, 0, [2, 1], 16)
    for layer in (0, 2):
        ops.store_kv(cache, layer, normal(30, 20), normal(30, 14), batch)
    ops.store_kv(cache, 1, np.zeros((30, 20), np.float32), np.zeros((30, 14), np.float32), batch)

    assert not ops.attention(normal(30, 60), cache, 1, batch, GEOMETRY).any()
    assert all(ops.attention(normal(30, 60), cache, layer, batch, GEOMETRY).any() for layer in (0, 2))


# -- the same bits in any company --------------------------------------------------------------------------------------
ROWWISE: dict[str, Callable[[Any, Array], Array]] = {
    "project": lambda ops, x: ops.project(x, Projection(load(ops, normal(40, 96, seed=5)), normal(40)))[0],
    "project normed": lambda ops, x: ops.project(
        x, Projection(load_q8(ops, normal(40, 96, seed=5))), norm=Norm(normal(96), 1e-5)
    )[0],
    "rms_norm": lambda ops, x: ops.rms_norm(x, Norm(normal(96, seed=5), 1e-5)),
    "head norm": lambda ops, x: ops.rms_norm(x, Norm(normal(24, seed=5), 1e-5)),
    "gelu_mul": lambda ops, x: ops.gelu_mul(x, x[:, ::-1]),
    "silu_mul": lambda ops, x: ops.silu_mul(x, x[:, ::-1]),
    "add": lambda ops, x: ops.add(x, x[:, ::-1]),
}


def load_q8(ops: Any, matrix: Array) -> Any:
    """As Q8_0 with a scale of 1/64 everywhere."""
    rows, cols = matrix.shape
    blocks = np.empty((rows, cols // 32, 34), np.uint8)
    blocks[..., :2] = np.float16(1 / 64).reshape(1).view(np.uint8)
    blocks[..., 2:] = np.clip(np.round(matrix * 64), -127, 127).astype(np.int8).view(np.uint8).reshape(rows, -1, 32)
    return ops.load_matrix(blocks.reshape(-1), "Q8_0", matrix.shape)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("activation_dtype", ["int8", "int16", "float32"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_neighbors(name: str, activation_dtype: str, data: st.DataObject) -> None:
    isa = data.draw(st.sampled_from(usable_isas()))
    ops, x = cpu_ops(2, activation_dtype=activation_dtype, isa=isa), normal(400, 96, seed=9)
    whole = ROWWISE[name](ops, x)
    first = data.draw(st.integers(0, 399))
    last = data.draw(st.integers(first + 1, 400))

    assert np.array_equal(ROWWISE[name](ops, x[first:last]), whole[first:last])


@pytest.mark.parametrize("kv_dtype", KV_TOLERANCE)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_query_has_the_same_bits_in_any_chunk_with_any_threads(kv_dtype: str, data: st.DataObject) -> None:
    isa, length = data.draw(st.sampled_from(usable_isas())), 420
    spec = data.draw(st.sampled_from([*SPECS.values(), replace(WIDE, window=150)]))
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first + 1, length))
    block_size = data.draw(st.sampled_from([16, 48, 7]))
    results = []
    for threads, start, end, size in ((1, 0, length, 16), (data.draw(st.integers(1, 4)), first, last, block_size)):
        ops = cpu_ops(threads, kv_dtype=kv_dtype, isa=isa)
        blocks = np.random.default_rng(size).permutation(-(-length // size)).tolist()
        cache = ops.new_kv_cache(1, spec.num_kv_heads, spec.head_dim, 40, len(blocks), size)
        q, k = normal(length, spec.num_heads * spec.head_dim), normal(length, spec.num_kv_heads * spec.head_dim, seed=1)
        v = normal(length, spec.num_kv_heads * 40, seed=2)
        ops.store_kv(cache, 0, k, v, one_sequence(length, 0, blocks, size))
        results.append(ops.attention(q[start:end], cache, 0, one_sequence(end, start, blocks, size), spec))

    assert np.array_equal(results[1], results[0][first:last])


def test_sequences_in_one_step_do_not_see_each_other(isa: str) -> None:
    ops, spec = cpu_ops(2, isa=isa), replace(GEOMETRY, num_heads=2)
    cache = ops.new_kv_cache(1, 2, 10, 10, 40, 16)
    lengths, starts = [200, 1, 33, 300], [199, 0, 5, 290]
    tables = np.random.default_rng(0).permutation(40)
    parts, alone, at = [], [], 0
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        table = tables[at : at + -(-length // 16)].tolist()
        at += len(table)
        q, k, v = (normal(length, 20, seed=10 * number + part) for part in range(3))
        ops.store_kv(cache, 0, k, v, one_sequence(length, 0, table, 16))
        batch = one_sequence(length, start, table, 16)
        alone.append(ops.attention(q[start:], cache, 0, batch, spec))
        parts.append((q[start:], batch))
    together = ops.attention(np.concatenate([q for q, _ in parts]), cache, 0, join([b for _, b in parts]), spec)

    assert np.array_equal(together, np.concatenate(alone))


def join(batches: list[ForwardBatch]) -> ForwardBatch:
    """Several sequences' batches as one."""
    width = max(batch.block_table.shape[1] for batch in batches)
    return ForwardBatch(
        *(np.concatenate([getattr(batch, name) for batch in batches]) for name in ("input_ids", "positions")),
        query_start_loc=np.cumsum([0, *(batch.num_tokens for batch in batches)]).astype(np.int32),
        seq_lens=np.concatenate([batch.seq_lens for batch in batches]),
        block_table=np.concatenate(
            [np.pad(b.block_table, ((0, 0), (0, width - b.block_table.shape[1])), constant_values=-1) for b in batches]
        ),
        slot_mapping=np.concatenate([batch.slot_mapping for batch in batches]),
        logit_rows=np.zeros(0, np.int32),
    )


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_what_is_not_there_is_refused_before_it_is_read(ops: Any) -> None:
    table = load(ops, normal(10, 20))
    cache = ops.new_kv_cache(1, 2, 10, 10, 4, 16)
    batch = one_sequence(20, 0, [0, 1], 16)
    keys = normal(20, 20)

    with pytest.raises(ValueError, match="token id 10 is outside 0 to 9"):
        ops.embed(table, np.array([3, 10], np.int32))
    with pytest.raises(ValueError, match="row -1 is outside 0 to 9"):
        ops.take(normal(10, 4), np.array([-1], np.int32))
    with pytest.raises(ValueError, match="cache slot 64 is outside 0 to 63"):
        ops.store_kv(cache, 0, keys, keys, replace(batch, slot_mapping=batch.slot_mapping + 45))
    with pytest.raises(ValueError, match="cache block -1 is outside 0 to 3"):
        ops.attention(normal(20, 60), cache, 0, replace(batch, block_table=batch.block_table[:, ::-1]), GEOMETRY)
    with pytest.raises(ValueError, match="layer 1 of a cache of 1"):
        ops.store_kv(cache, 1, keys, keys, batch)
    with pytest.raises(ValueError, match="a matrix of 20 columns cannot take rows of 19"):
        ops.project(normal(2, 19), Projection(table))
    with pytest.raises(ValueError, match=r"a matrix \[10, 21\]"):
        ops.load_matrix(np.zeros(800, np.uint8), "F32", (10, 21))


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_mixed_activations_have_16_bits_before_wide_matrices_and_8_before_others(rows: int) -> None:
    x, matrix = normal(rows, 96, seed=5), normal(48, 96, seed=6)

    def products(activation_dtype: str, is_wide: bool) -> Any:
        ops = cpu_ops(1, activation_dtype=activation_dtype)
        return ops.project(x, Projection(load_q8(ops, matrix), is_wide=is_wide))[0]

    narrow, wide = products("int8", False), products("int16", False)
    assert not np.array_equal(narrow, wide)
    assert np.array_equal(products("mixed", True), wide)
    assert np.array_equal(products("mixed", False), narrow)
    # what the user says holds for all
    assert np.array_equal(products("int8", True), narrow)
    assert np.array_equal(products("float32", True), products("float32", False))


def test_unknown_settings_are_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match="kv_dtype='float8' is none of float32, float16"):
        cpu_ops(1, kv_dtype="float8")
    with pytest.raises(OptionError, match="activation_dtype='int4' is none of int8, mixed, int16, float32"):
        cpu_ops(1, activation_dtype="int4")
    with pytest.raises(OptionError, match=r"isa='sse9' is none of .*portable"):
        cpu_ops(1, isa="sse9")
