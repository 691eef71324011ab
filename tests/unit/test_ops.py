"""Each operation of the reference backend against numpy in float64, and to the bit against itself in other company."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection, RopeLayout
from pocketllm.engine.backends.reference.device import NAME, declare
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.backends.reference.rows import padded, rows_are_invariant
from pocketllm.engine.backends.select import read_facts
from pocketllm.engine.weights import quant

Array = npt.NDArray[np.float32]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def ops() -> ReferenceOps:
    return ReferenceOps()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(got: torch.Tensor, expected: npt.NDArray[np.floating]) -> bool:
    return np.allclose(got.numpy().astype(np.float64), expected, rtol=1e-5, atol=1e-5)


def load(ops: ReferenceOps, matrix: Array) -> torch.Tensor:
    return ops.load_matrix(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape)


def test_the_declared_ops_are_those_it_has() -> None:
    declared = declare(read_facts(), BackendOptions()).ops

    assert declared == {name for name in vars(Ops) if not name.startswith("_")}
    assert declared <= set(dir(ReferenceOps))


@pytest.mark.parametrize("tokens", [1, 3, 63, 300])
def test_a_projection_is_the_product_with_the_transposed_matrix(ops: ReferenceOps, tokens: int) -> None:
    x, weight, bias = normal(tokens, 77), normal(33, 77, seed=1), normal(33, seed=2)
    whole = Projection(load(ops, weight), ops.load_vector(bias))
    got, part = ops.project(torch.from_numpy(x), whole, Projection(load(ops, weight[:5])))

    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert close(got, expected + bias)
    assert close(part, expected[:, :5])
    assert close(ops.project_add(torch.from_numpy(x), whole, got), 2 * (expected + bias))


def test_rows_are_normed_before_they_are_projected_when_asked(ops: ReferenceOps) -> None:
    x, norm = torch.from_numpy(normal(5, 60)), Norm(ops.load_vector(normal(60, seed=1)), 1e-2)
    projection = Projection(load(ops, normal(7, 60, seed=2)))

    (got,) = ops.project(x, projection, norm=norm)
    assert torch.equal(got, ops.project(ops.rms_norm(x, norm), projection)[0])


def test_rms_norm_divides_by_the_root_of_the_mean_square(ops: ReferenceOps) -> None:
    x, weight = normal(5, 60), normal(60, seed=1)
    got = ops.rms_norm(torch.from_numpy(x), Norm(ops.load_vector(weight), 1e-2))
    by_head = ops.rms_norm(torch.from_numpy(x), Norm(ops.load_vector(weight[:20]), 1e-2))

    def expected(runs: Array, weight: Array) -> npt.NDArray[np.float64]:
        return runs / np.sqrt((runs.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-2) * weight

    assert close(got, expected(x, weight))
    assert close(by_head, expected(x.reshape(5, 3, 20), weight[:20]).reshape(5, 60))


def test_silu_mul_is_the_gate_times_its_sigmoid_times_up(ops: ReferenceOps) -> None:
    gate, up = normal(4, 50) * 30, normal(4, 50, seed=1)
    gate[0, :3] = (-200.0, 200.0, 0.0)
    got = ops.silu_mul(torch.from_numpy(gate), torch.from_numpy(up))

    assert torch.isfinite(got).all()
    assert close(got, gate * up / (1 + np.exp(-gate.astype(np.float64))))


def test_gelu_mul_is_the_tanh_form_of_gelu_times_up(ops: ReferenceOps) -> None:
    gate, up = normal(4, 50) * 30, normal(4, 50, seed=1)
    gate[0, :3] = (-200.0, 200.0, 0.0)
    got = ops.gelu_mul(torch.from_numpy(gate), torch.from_numpy(up))

    wide = gate.astype(np.float64)
    assert close(got, 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) * up)


@pytest.mark.parametrize("layout", RopeLayout)
@pytest.mark.parametrize("rotated", [12, 8])
def test_rope_turns_each_pair_as_a_complex_number(ops: ReferenceOps, layout: RopeLayout, rotated: int) -> None:
    x, positions = normal(5, 3 * 12), np.array([0, 1, 2, 70000, 131071], np.int32)
    inv_freq = (10000.0 ** (-np.arange(0, rotated, 2) / rotated)).astype(np.float32)
    angles = ops.rope_angles(ops.load_vector(inv_freq), positions, 0.5)
    got = ops.rope(torch.from_numpy(x), angles, 12, layout)

    heads = x.reshape(5, 3, 12).astype(np.float64)
    expected = heads.copy()
    pairs = [
        (2 * i, 2 * i + 1) if layout is RopeLayout.ADJACENT else (i, i + rotated // 2) for i in range(rotated // 2)
    ]
    for number, (one, other) in enumerate(pairs):
        turn = 0.5 * np.exp(1j * positions * float(inv_freq[number]))[:, None]
        turned = (heads[..., one] + 1j * heads[..., other]) * turn
        expected[..., one], expected[..., other] = turned.real, turned.imag
    assert close(got, expected.reshape(5, 36))


def test_embed_and_take_pick_rows_in_the_order_asked_for(ops: ReferenceOps) -> None:
    table = normal(10, 4)
    rows = np.array([7, 0, 7], np.int32)

    assert np.array_equal(ops.to_numpy(ops.embed(load(ops, table), rows)), table[rows])
    assert np.array_equal(ops.to_numpy(ops.take(torch.from_numpy(table), rows)), table[rows])


def test_loaded_vectors_and_answers_are_copies(ops: ReferenceOps) -> None:
    values = normal(4)
    vector = ops.load_vector(values)
    answer = ops.to_numpy(vector)
    values[:], answer[:] = 0, 1

    assert not np.isin(vector.numpy(), [0, 1]).any()


@pytest.mark.parametrize("quant_type", sorted(quant.known_types()))
def test_a_loaded_matrix_is_what_the_decoder_says_to_the_bit(ops: ReferenceOps, quant_type: str) -> None:
    elements, num_bytes = quant.block_size(quant_type)
    width, rows = max(256, elements), 5000
    data = np.random.default_rng(1).integers(0, 120, rows * (width // elements) * num_bytes).astype(np.uint8)
    matrix = ops.load_matrix(data, quant_type, (rows, width))

    expected = quant.dequantize(data, quant_type, (rows, width))
    assert np.array_equal(matrix.numpy().view(np.uint32), expected.view(np.uint32))


# -- attention ---------------------------------------------------------------------------------------------------------
GEOMETRY = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=10, scale=0.3)


def one_sequence(length: int, first: int, table: list[int], block_size: int) -> ForwardBatch:
    """The step that computes tokens [first, length) of one sequence."""
    at = np.arange(first, length)
    slots = np.array(table)[at // block_size] * block_size + at % block_size
    return ForwardBatch(
        input_ids=np.zeros(len(at), np.int32),
        positions=at.astype(np.int32),
        query_start_loc=np.array([0, len(at)], np.int32),
        seq_lens=np.array([length], np.int32),
        block_table=np.array([[*table, -1]], np.int32),
        slot_mapping=slots,
        logit_rows=np.zeros(0, np.int32),
    )


WINDOWED = replace(GEOMETRY, window=37, softcap=1.5)


def plain_attention(q: Array, k: Array, v: Array, spec: AttentionSpec, first: int) -> npt.NDArray[np.float64]:
    """One query and one head at a time."""
    heads = q.reshape(len(q), spec.num_heads, -1).astype(np.float64)
    keys, values = (x.reshape(len(x), spec.num_kv_heads, -1).astype(np.float64) for x in (k, v))
    out = np.zeros((len(q), spec.num_heads, values.shape[-1]))
    for token in range(len(q)):
        for head in range(spec.num_heads):
            shared, seen = head * spec.num_kv_heads // spec.num_heads, first + token + 1
            start = max(0, seen - spec.window) if spec.window else 0
            scores = keys[start:seen, shared] @ heads[token, head] * spec.scale
            if spec.softcap:
                scores = spec.softcap * np.tanh(scores / spec.softcap)
            share = np.exp(scores - scores.max())
            out[token, head] = share @ values[start:seen, shared] / share.sum()
    return out.reshape(len(q), -1)


@pytest.mark.parametrize(("length", "first"), [(1, 0), (40, 0), (40, 39), (256, 200), (257, 0), (600, 555)])
@pytest.mark.parametrize("block_size", [16, 24, 1])
@pytest.mark.parametrize("spec", [GEOMETRY, WINDOWED], ids=["all before", "window and softcap"])
def test_attention_sees_the_cached_tokens_that_it_may(
    ops: ReferenceOps, length: int, first: int, block_size: int, spec: AttentionSpec
) -> None:
    num_blocks = -(-length // block_size)
    table = np.random.default_rng(2).permutation(num_blocks + 3)[:num_blocks].tolist()
    cache = ops.new_kv_cache(2, 2, 10, 7, num_blocks + 3, block_size)
    q, k, v = normal(length, 60), normal(length, 20, seed=1), normal(length, 14, seed=2)
    if first:
        before = one_sequence(first, 0, table, block_size)
        ops.store_kv(cache, 1, torch.from_numpy(k[:first]), torch.from_numpy(v[:first]), before)
    batch = one_sequence(length, first, table, block_size)
    ops.store_kv(cache, 1, torch.from_numpy(k[first:]), torch.from_numpy(v[first:]), batch)
    got = ops.attention(torch.from_numpy(q[first:]), cache, 1, batch, spec)

    assert close(got, plain_attention(q[first:], k, v, spec, first))
    assert not cache.keys[0].any()


# -- the same bits in any company ------------------------------------------------------------------------------------
ROWWISE: dict[str, Callable[[ReferenceOps, torch.Tensor], torch.Tensor]] = {
    "project": lambda ops, x: ops.project(
        x, Projection(torch.from_numpy(normal(40, 60, seed=5)), torch.from_numpy(normal(40)))
    )[0],
    "rms_norm": lambda ops, x: ops.rms_norm(x, Norm(torch.from_numpy(normal(60, seed=5)), 1e-5)),
    "head norm": lambda ops, x: ops.rms_norm(x, Norm(torch.from_numpy(normal(20, seed=5)), 1e-5)),
    "gelu_mul": lambda ops, x: ops.gelu_mul(x, x.flip(-1)),
    "silu_mul": lambda ops, x: ops.silu_mul(x, x.flip(-1)),
    "add": lambda ops, x: ops.add(x, x.flip(-1)),
}


@pytest.mark.parametrize("name", ROWWISE)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_neighbors(name: str, data: st.DataObject) -> None:
    ops, x = ReferenceOps(), torch.from_numpy(normal(400, 60, seed=9))
    whole = ROWWISE[name](ops, x)
    first = data.draw(st.integers(0, 399))
    last = data.draw(st.integers(first + 1, 400))

    assert torch.equal(ROWWISE[name](ops, x[first:last]), whole[first:last])


def test_torchs_own_silu_would_not_have_held_that() -> None:
    x = torch.from_numpy(normal(400, 60, seed=9))
    whole = torch.nn.functional.silu(x)

    assert not all(torch.equal(torch.nn.functional.silu(x[row : row + 1]), whole[row : row + 1]) for row in range(400))


def test_rows_are_padded_to_counts_that_add_in_one_order() -> None:
    assert [padded(rows) for rows in (0, 1, 4, 5, 8, 9, 12, 13, 17)] == [0, 4, 4, 8, 8, 12, 12, 13, 17]
    assert rows_are_invariant()


def test_a_blas_that_adds_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from pocketllm.engine.backends.reference import rows
    from pocketllm.engine.backends.reference.device import open_backend

    exact = torch.nn.functional.linear
    monkeypatch.setattr(rows.functional, "linear", lambda x, w: exact(x, w) + (1e-6 if len(x) > 64 else 0.0))

    assert open_backend(read_facts(), BackendOptions(threads=1)).capability.batch_invariant_width == 1
    assert NAME == "reference"
