"""Mixtures, recurrent layers and residual streams of the CPU backend against the reference; and bits in company."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch, LatentAttentionSpec
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.native import cpu_ops, poison_results, usable_isas
from tests.unit.test_ops import normal, one_sequence

Array = npt.NDArray[np.float32]
Tensor = Callable[[Array], Any]


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ops(isa: str) -> Any:
    return cpu_ops(2, activation_dtype="float32", isa=isa)


@pytest.fixture
def reference() -> ReferenceOps:
    torch.set_num_threads(1)
    return ReferenceOps()


@pytest.fixture(autouse=True)
def outputs_begin_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_results(monkeypatch)


def plain(x: Array) -> Array:
    return x


def close(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    got, expected = np.asarray(got), np.asarray(expected)
    return got.shape == expected.shape and np.allclose(got, expected, rtol=tolerance, atol=tolerance)


# -- mixtures ----------------------------------------------------------------------------------------------------------
QUANTIZED = {"int8": 2e-2, "int16": 1e-4}
"""Activations that are quantized, and how far results may be from those of floats, of the largest of them."""
EXPERTS, WIDTH, INNER = 8, 64, 40
BIAS = np.array([0, 0, 3.0, 0, 0, 0.5, 0, 0], np.float32)
ROUTINGS = {
    "softmax, normalized": Routing(2, Gating.SOFTMAX, normalized=True),
    "sigmoid, scaled": Routing(3, Gating.SIGMOID, normalized=True, scale=2.5),
    "one expert": Routing(1, Gating.SOFTMAX, normalized=False),
    "all experts": Routing(EXPERTS, Gating.SIGMOID, normalized=True),
    "a bias that chooses": Routing(2, Gating.SIGMOID, normalized=True, bias=BIAS),
    "groups": Routing(3, Gating.SIGMOID, True, bias=BIAS, num_groups=4, num_groups_used=2, best_of_group=2),
    "the best group": Routing(2, Gating.SOFTMAX, True, num_groups=2, num_groups_used=1, best_of_group=1),
}


def mixture_of(ops: Any, tensor: Tensor, routing: Routing, quantized: bool = False) -> Experts:
    """Experts of float32, or of Q8_0 and as wide inside as that needs."""
    inner = 96 if quantized else INNER
    shapes = ((EXPERTS, inner, WIDTH), (EXPERTS, inner, WIDTH), (EXPERTS, WIDTH, inner))
    matrices = [normal(*shape, seed=2 + number) for number, shape in enumerate(shapes)]
    load = load_q8_experts if quantized else load_experts
    gate, up, down = (load(ops, matrix) for matrix in matrices)
    router = normal(EXPERTS, WIDTH, seed=1).view(np.uint8).reshape(-1)
    bias = None if routing.bias is None else tensor(routing.bias)
    return Experts(
        Projection(ops.load_matrix(router, "F32", (EXPERTS, WIDTH))), gate, up, down, replace(routing, bias=bias)
    )


def load_experts(ops: Any, matrix: Array) -> Any:
    return ops.load_experts(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape)


def load_q8_experts(ops: Any, matrix: Array) -> Any:
    """As Q8_0 with a scale of 1/64."""
    blocks = np.empty((*matrix.shape[:2], matrix.shape[2] // 32, 34), np.uint8)
    blocks[..., :2] = np.float16(1 / 64).reshape(1).view(np.uint8)
    blocks[..., 2:] = (
        np.clip(np.round(matrix * 64), -127, 127).astype(np.int8).view(np.uint8).reshape(*blocks.shape[:3], 32)
    )
    return ops.load_experts(blocks.reshape(-1), "Q8_0", matrix.shape)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 7, 140])
def test_a_mixture_agrees(ops: Any, reference: ReferenceOps, routing: Routing, tokens: int) -> None:
    x = normal(tokens, WIDTH, seed=9)
    expected = reference.mixture(torch.from_numpy(x), mixture_of(reference, torch.from_numpy, routing))
    size = expected.abs().max()  # sums of large values cancel: single ones may be as far off as those are

    assert close(ops.mixture(x, mixture_of(ops, plain, routing)) / size.numpy(), expected / size)


@pytest.mark.parametrize("tokens", [1, 7, 140])
@pytest.mark.parametrize("activation_dtype", QUANTIZED)
def test_a_mixture_of_quantized_rows_is_as_near_as_their_bits_allow(
    isa: str, reference: ReferenceOps, activation_dtype: str, tokens: int
) -> None:
    x, routing = normal(tokens, WIDTH, seed=9), ROUTINGS["all experts"]  # no route that rounding could turn over
    ops = cpu_ops(2, activation_dtype=activation_dtype, isa=isa)
    expected = reference.mixture(torch.from_numpy(x), mixture_of(reference, torch.from_numpy, routing, quantized=True))
    off = np.abs(ops.mixture(x, mixture_of(ops, plain, routing, quantized=True)) - expected.numpy())

    assert off.max() <= QUANTIZED[activation_dtype] * float(expected.abs().max())


@pytest.mark.parametrize("tokens", [1, 30])
def test_a_mixture_of_bounded_experts_agrees(ops: Any, reference: ReferenceOps, tokens: int) -> None:
    x = normal(tokens, WIDTH, seed=9)

    def work(ops: Any, tensor: Tensor) -> Any:
        biases = [tensor(normal(EXPERTS, width, seed=20 + width)) for width in (INNER, INNER, WIDTH)]
        layer = mixture_of(ops, tensor, ROUTINGS["softmax, normalized"])
        return ops.bounded_mixture(tensor(x), BoundedExperts(layer, *biases, slope=1.7, limit=3.0))

    assert close(work(ops, plain), work(reference, torch.from_numpy), 2e-4)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("activation_dtype", QUANTIZED)
def test_a_row_of_a_mixture_has_the_same_bits_whatever_experts_its_neighbors_use(
    isa: str, activation_dtype: str, routing: Routing
) -> None:
    x, random = normal(150, WIDTH, seed=10), np.random.default_rng(3)
    whole = None
    for threads in (1, 2, 3):
        ops = cpu_ops(threads, activation_dtype=activation_dtype, isa=isa)
        layer = mixture_of(ops, plain, routing, quantized=True)
        whole = ops.mixture(x, layer) if whole is None else whole
        for _ in range(5):
            some = random.permutation(150)[: random.integers(1, 120)]

            assert np.array_equal(ops.mixture(x[some], layer), whole[some])


def test_of_equal_scores_the_expert_with_the_lower_index_is_used(ops: Any) -> None:
    layer = mixture_of(ops, plain, Routing(3, Gating.SOFTMAX, normalized=True))
    level = np.zeros((EXPERTS, WIDTH), np.float32)
    layer = replace(layer, router=Projection(ops.load_matrix(level.view(np.uint8).reshape(-1), "F32", level.shape)))
    chosen = replace(
        layer, routing=Routing(3, Gating.SIGMOID, True, bias=np.array([9, 8, 7, 0, 0, 0, 0, 0], np.float32))
    )
    x = normal(5, WIDTH, seed=4)

    assert np.array_equal(ops.mixture(x, layer), ops.mixture(x, chosen))


def test_experts_that_cannot_be_routed_are_refused(ops: Any) -> None:
    for routing in (
        Routing(9, Gating.SOFTMAX, True),
        Routing(2, Gating.SOFTMAX, True, num_groups=3, num_groups_used=1),
    ):
        with pytest.raises(ValueError, match="experts"):
            ops.mixture(normal(1, WIDTH), mixture_of(ops, plain, routing))


# -- recurrent layers --------------------------------------------------------------------------------------------------
SLOTS = 5


def sequences(*parts: tuple[int, int, int]) -> ForwardBatch:
    """(slot, tokens before, tokens of this step) of each."""
    counts = [count for _, _, count in parts]
    return ForwardBatch(
        input_ids=np.zeros(sum(counts), np.int32),
        positions=np.zeros(sum(counts), np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([before + count for _, before, count in parts], np.int32),
        block_table=np.zeros((len(parts), 0), np.int32),
        slot_mapping=np.zeros(sum(counts), np.int64),
        logit_rows=np.zeros(0, np.int32),
        state_slots=np.array([slot for slot, _, _ in parts], np.int32),
    )


STEPS = (
    sequences((3, 0, 9), (1, 0, 1), (0, 0, 40)),
    sequences((1, 1, 3), (3, 9, 1)),
    sequences((0, 40, 2), (4, 0, 2), (1, 4, 6), (3, 10, 30)),
)


def states_of(ops: Any, conv: tuple[int, int], delta: tuple[int, int, int]) -> Any:
    """Two layers of them, of which only the second is used; what they hold at first must not matter."""
    states = ops.new_states(2, conv, delta, SLOTS)
    for kept in (states.conv[1], states.delta[1]):
        kept[:] = np.nan
    return states


@pytest.mark.parametrize(("channels", "taps"), [(77, 4), (300, 4), (16, 1), (5, 8)])
@pytest.mark.parametrize("silu", [True, False])
def test_a_causal_convolution_agrees(ops: Any, reference: ReferenceOps, channels: int, taps: int, silu: bool) -> None:
    kernel, shapes = normal(channels, taps, seed=1), ((taps - 1, channels), (1, 1, 1))
    own, theirs = states_of(ops, *shapes), states_of(reference, *shapes)
    for number, batch in enumerate(STEPS):
        x = normal(batch.num_tokens, channels, seed=10 + number)
        got = ops.causal_conv(x, kernel, own, 1, batch, silu)

        assert close(got, reference.causal_conv(torch.from_numpy(x), torch.from_numpy(kernel), theirs, 1, batch, silu))
    assert np.allclose(own.conv[1], theirs.conv[1].numpy(), equal_nan=True)


NETS = {
    "tiled": DeltaNet(2, 4, 16, 24, True, -np.arange(1, 5, dtype=np.float32) / 4, normal(4)),
    "grouped and wide": DeltaNet(2, 6, 40, 136, False, -np.arange(1, 7, dtype=np.float32), normal(6)),
    "one head": DeltaNet(1, 1, 128, 128, True, -np.ones(1, np.float32), normal(1)),
}


def delta_inputs(net: DeltaNet, tokens: int, seed: int) -> tuple[Array, Array, Array]:
    width = 2 * net.num_key_heads * net.key_dim + net.num_value_heads * net.value_dim
    mixed, heads = normal(tokens, width, seed=seed), net.num_value_heads
    return mixed, normal(tokens, heads, seed=seed + 1) * 10, normal(tokens, heads, seed=seed + 2)


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_the_gated_delta_rule_agrees(ops: Any, reference: ReferenceOps, net: DeltaNet) -> None:
    shapes = ((1, 1), (net.num_value_heads, net.key_dim, net.value_dim))
    own, theirs = states_of(ops, *shapes), states_of(reference, *shapes)
    torch_net = replace(net, rate=torch.from_numpy(net.rate), time_bias=torch.from_numpy(net.time_bias))
    for number, batch in enumerate(STEPS):
        inputs = delta_inputs(net, batch.num_tokens, 10 * number)
        got = ops.gated_delta(*inputs, net, own, 1, batch)
        expected = reference.gated_delta(*map(torch.from_numpy, inputs), torch_net, theirs, 1, batch)

        assert close(got, expected)
    assert np.allclose(own.delta[1], theirs.delta[1].numpy(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_a_recurrent_layer_has_the_same_bits_in_any_chunks_with_any_threads(isa: str, net: DeltaNet) -> None:
    inputs, kernel = delta_inputs(net, 50, 5), normal(net.value_dim, 4)
    x = normal(50, net.value_dim, seed=8)
    results = []
    for threads, cuts in ((1, (0, 50)), (2, (0, 1, 2, 30, 50)), (3, (0, 17, 50))):
        ops = cpu_ops(threads, isa=isa)
        states = states_of(ops, (3, net.value_dim), (net.num_value_heads, net.key_dim, net.value_dim))
        parts = []
        for first, last in pairwise(cuts):
            batch = sequences((2, first, last - first))
            seen = ops.gated_delta(*(rows[first:last] for rows in inputs), net, states, 1, batch)
            parts.append((seen, ops.causal_conv(x[first:last], kernel, states, 1, batch, True)))
        results.append([np.concatenate(part) for part in zip(*parts, strict=True)])
        results[-1] += [states.delta[1, 2], states.conv[1, 2]]
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_states_are_copied_in_order_and_slots_that_are_not_there_are_refused(ops: Any) -> None:
    states = ops.new_states(1, (1, 2), (1, 1, 1), 3)
    states.conv[0, 0] = 7
    ops.copy_states(states, np.array([0, 1], np.int32), np.array([1, 2], np.int32))

    assert (states.conv[0, 2] == 7).all()
    with pytest.raises(ValueError, match="state slot 3 is outside 0 to 2"):
        ops.causal_conv(normal(1, 2), normal(2, 2), states, 0, sequences((3, 0, 1)), False)
    lacking = replace(sequences((0, 0, 1)), state_slots=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="without their state slots"):
        ops.causal_conv(normal(1, 2), normal(2, 2), states, 0, lacking, False)


# -- latent attention --------------------------------------------------------------------------------------------------
LATENTS = {"wide": LatentAttentionSpec(16, 64, 32, 0.1), "odd": LatentAttentionSpec(3, 40, 7, 0.2)}


def latent_steps(
    ops: Any, tensor: Tensor, spec: LatentAttentionSpec, cuts: Sequence[int], block_size: int
) -> list[Any]:
    """What attention gives for the tokens between every two cuts."""
    length, dim = cuts[-1], spec.rank + spec.rope_dim
    blocks = np.random.default_rng(block_size).permutation(-(-length // block_size)).tolist()
    cache = ops.new_latent_cache(2, dim, len(blocks), block_size)
    if hasattr(cache, "memory"):
        cache.memory()[:] = 0xFF
    latent, key = normal(length, spec.rank), normal(length, spec.rope_dim, seed=1)
    q_latent = normal(length, spec.num_heads * spec.rank, seed=2)
    q_rope = normal(length, spec.num_heads * spec.rope_dim, seed=3)
    parts = []
    for first, last in pairwise(cuts):
        batch = one_sequence(last, first, blocks, block_size)
        ops.store_latent(cache, 1, batch, tensor(latent[first:last]), tensor(key[first:last]))
        q = tensor(q_latent[first:last]), tensor(q_rope[first:last])
        parts.append(np.asarray(ops.latent_attention(*q, cache, 1, batch, spec)))
    return parts


@pytest.mark.parametrize("spec", LATENTS.values(), ids=LATENTS)
@pytest.mark.parametrize("block_size", [16, 32, 5])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
def test_latent_attention_agrees(
    isa: str, reference: ReferenceOps, spec: LatentAttentionSpec, block_size: int, kv_dtype: str
) -> None:
    ops = cpu_ops(2, kv_dtype=kv_dtype, isa=isa)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 3e-2}[kv_dtype]
    for got, expected in zip(
        latent_steps(ops, plain, spec, (0, 70, 71, 200), block_size),
        latent_steps(reference, torch.from_numpy, spec, (0, 70, 71, 200), block_size),
        strict=True,
    ):
        assert close(got, expected, tolerance)


@pytest.mark.parametrize("spec", LATENTS.values(), ids=LATENTS)
def test_latent_attention_has_the_same_bits_in_any_chunks_with_any_threads(isa: str, spec: LatentAttentionSpec) -> None:
    whole = np.concatenate(latent_steps(cpu_ops(1, isa=isa), plain, spec, (0, 300), 16))
    for threads, cuts, block_size in ((2, (0, 1, 140, 141, 300), 16), (3, (0, 299, 300), 7)):
        other = latent_steps(cpu_ops(threads, isa=isa), plain, spec, cuts, block_size)

        assert np.array_equal(np.concatenate(other), whole)


@pytest.mark.parametrize("tokens", [1, 30])
def test_heads_are_projected_each_by_its_own_matrix(ops: Any, reference: ReferenceOps, tokens: int) -> None:
    x, matrices = normal(tokens, 3 * 20), normal(3, 17, 20, seed=1)
    expected = reference.project_heads(torch.from_numpy(x), load_experts(reference, matrices))

    assert close(ops.project_heads(x, load_experts(ops, matrices)), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("activation_dtype", QUANTIZED)
def test_a_row_of_projected_heads_is_near_and_has_the_same_bits_beside_any_neighbors(
    isa: str, reference: ReferenceOps, activation_dtype: str, threads: int
) -> None:
    ops, x = cpu_ops(threads, activation_dtype=activation_dtype, isa=isa), normal(40, 3 * 64)
    weight, other = (load_q8_experts(some, normal(3, 17, 64, seed=1)) for some in (ops, reference))
    whole, expected = ops.project_heads(x, weight), reference.project_heads(torch.from_numpy(x), other)

    assert np.abs(whole - expected.numpy()).max() <= QUANTIZED[activation_dtype] * float(expected.abs().max())
    assert np.array_equal(np.concatenate([ops.project_heads(x[:9], weight), ops.project_heads(x[9:], weight)]), whole)


# -- residual streams, and rows ----------------------------------------------------------------------------------------
def connection_of(ops: Any, tensor: Tensor, hidden: int, num_streams: int) -> HyperConnection:
    rows = 2 * num_streams + num_streams**2
    matrix = normal(rows, num_streams * hidden, seed=1) / hidden
    weight = Projection(ops.load_matrix(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape))
    scale, base = tensor(np.array([0.5, 2.0, 3.0], np.float32)), tensor(normal(rows, seed=2))
    return HyperConnection(weight, scale, base, num_streams, iterations=4, eps=1e-3, norm_eps=1e-5, clamp=4.0)


@pytest.mark.parametrize(("hidden", "num_streams"), [(33, 4), (64, 2), (16, 1)])
def test_residual_streams_agree(ops: Any, reference: ReferenceOps, hidden: int, num_streams: int) -> None:
    x, y = normal(11, hidden), normal(11, hidden, seed=3)

    def work(ops: Any, tensor: Tensor) -> list[Any]:
        connection = connection_of(ops, tensor, hidden, num_streams)
        streams = ops.open_streams(tensor(x), num_streams)
        read, shares = ops.read_streams(streams, connection)
        written = ops.write_streams(streams, shares, tensor(y))
        again, more = ops.read_streams(written, connection)
        return [streams, read, shares, written, again, more, ops.mean_streams(written, num_streams)]

    for got, expected in zip(work(ops, plain), work(reference, torch.from_numpy), strict=True):
        assert close(got, expected)


@pytest.mark.parametrize("block", [1, 2, 16, 64])
@pytest.mark.parametrize("inverse", [True, False])
def test_rotated_rows_agree_and_turn_back(ops: Any, reference: ReferenceOps, block: int, inverse: bool) -> None:
    x, signs = normal(5, 128), np.sign(normal(128, seed=1))
    got = ops.hadamard(x, Hadamard(block, signs), inverse)

    assert close(got, reference.hadamard(torch.from_numpy(x), Hadamard(block, torch.from_numpy(signs)), inverse))
    assert close(ops.hadamard(got, Hadamard(block, signs), not inverse), x)


@pytest.mark.parametrize("width", [1, 50])
def test_gates_of_values_and_of_rows_agree(ops: Any, reference: ReferenceOps, width: int) -> None:
    gate, x = normal(6, width) * 20, normal(6, 50, seed=1)
    expected = reference.sigmoid_mul(torch.from_numpy(gate.copy()), torch.from_numpy(x))

    assert close(ops.sigmoid_mul(gate, x), expected)
    assert close(ops.mul(x, x[:, ::-1]), x * x[:, ::-1])


@pytest.mark.parametrize("width", [1, 50, 64])
def test_rows_scaled_and_normed_about_their_mean_agree(ops: Any, reference: ReferenceOps, width: int) -> None:
    x, weight, bias = normal(6, width) + 3, normal(width, seed=1), normal(width, seed=2)

    def work(ops: Any, tensor: Tensor) -> list[Any]:
        return [ops.layer_norm(tensor(x), Norm(tensor(weight), 1e-3), tensor(bias)), ops.scale(tensor(x), 0.3)]

    for got, expected in zip(work(ops, plain), work(reference, torch.from_numpy), strict=True):
        assert close(got, expected)


def test_some_columns_of_rows_are_taken(ops: Any) -> None:
    x = normal(7, 50)

    assert np.array_equal(ops.columns(x, 3, 50), x[:, 3:])
    assert np.array_equal(ops.columns(x, 0, 1), x[:, :1])
    with pytest.raises(ValueError, match="columns 40 to 51 of rows of 50"):
        ops.columns(x, 40, 51)


@pytest.mark.parametrize("sink", [-100.0, 0.5, 200.0])
def test_a_sink_takes_its_share_of_the_attention(isa: str, reference: ReferenceOps, sink: float) -> None:
    ops, sinks = cpu_ops(3, kv_dtype="float32", isa=isa), np.linspace(sink, sink + 1, 6).astype(np.float32)
    spec, batch = AttentionSpec(6, 2, 24, 0.3), one_sequence(300, 0, list(range(19)), 16)

    def work(ops: Any, tensor: Tensor) -> Any:
        cache = ops.new_kv_cache(1, 2, 24, 24, 19, 16)
        ops.store_kv(cache, 0, tensor(normal(300, 48)), tensor(normal(300, 48, seed=1)), batch)
        return ops.sink_attention(tensor(normal(300, 144, seed=2)), tensor(sinks), cache, 0, batch, spec)

    assert close(work(ops, plain), work(reference, torch.from_numpy))
