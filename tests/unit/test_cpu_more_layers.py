"""Layers of single families on the CPU backend against the reference: streams, experts, deltas and n-grams."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.engine.backends.api.compressed import LimitedExperts, SoftConnection
from pocketllm.engine.backends.api.indexed import NGrams
from pocketllm.engine.backends.api.mixture import Gating, Routing, ScaledExperts
from pocketllm.engine.backends.api.ops import Projection
from pocketllm.engine.backends.api.recurrent import KimiDelta
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.native import cpu_ops, poison_results, usable_isas
from tests.unit.test_cpu_layers import (
    BIAS,
    EXPERTS,
    STEPS,
    WIDTH,
    Tensor,
    close,
    mixture_of,
    plain,
    sequences,
    states_of,
)
from tests.unit.test_ops import normal


@pytest.fixture(params=usable_isas())
def ops(request: pytest.FixtureRequest) -> Any:
    return cpu_ops(2, activation_dtype="float32", isa=str(request.param))


@pytest.fixture
def reference() -> ReferenceOps:
    torch.set_num_threads(1)
    return ReferenceOps()


@pytest.fixture(autouse=True)
def outputs_begin_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_results(monkeypatch)


def sides(ops: Any, reference: ReferenceOps) -> list[tuple[Any, Tensor]]:
    """Both backends, each with how it takes an array."""
    return [(ops, plain), (reference, torch.from_numpy)]


def both(ops: Any, reference: ReferenceOps, name: str, *arrays: Any, **more: Any) -> bool:
    """Whether an operation gives what the reference's does."""
    got, expected = (
        getattr(some, name)(*(tensor(x.copy()) if isinstance(x, np.ndarray) else x for x in arrays), **more)
        for some, tensor in sides(ops, reference)
    )
    return close(got, expected)


# -- rows --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(10, 3), (8, 4), (33, 5)])
def test_the_last_values_of_heads_turn_and_turn_back(
    ops: Any, reference: ReferenceOps, head_dim: int, pairs: int, inverse: bool
) -> None:
    x, positions = normal(6, 3 * head_dim), np.arange(6, dtype=np.int32) * 1000
    freq = (100.0 ** -np.linspace(0, 1, pairs)).astype(np.float32)
    got, expected = (
        some.rope_last(tensor(x), some.rope_angles(tensor(freq), positions, 1.0), head_dim, inverse)
        for some, tensor in sides(ops, reference)
    )

    assert close(got, expected)
    assert close(ops.rope_last(got, ops.rope_angles(freq, positions, 1.0), head_dim, not inverse), x)


@pytest.mark.parametrize("width", [1, 50, 64])
def test_rows_are_multiplied_by_one_row_and_gates_are_limited(ops: Any, reference: ReferenceOps, width: int) -> None:
    x, y = normal(6, width) * 4, normal(6, width, seed=1) * 4

    assert both(ops, reference, "mul", x, y[0])
    assert both(ops, reference, "limited_silu_mul", x, y, limit=2.5)


@pytest.mark.parametrize(("num_streams", "hidden"), [(4, 33), (1, 16), (3, 64)])
def test_streams_are_gated_as_by_the_reference(
    ops: Any, reference: ReferenceOps, num_streams: int, hidden: int
) -> None:
    streams, other, y = normal(11, num_streams * hidden), normal(11, num_streams * hidden, seed=1), normal(11, hidden)
    streams[3] = 0

    assert both(ops, reference, "add_gated", streams, normal(11, num_streams, seed=2) * 5, y)
    assert both(ops, reference, "gate_streams", streams, other, y)


@pytest.mark.parametrize(("num_streams", "iterations"), [(4, 3), (2, 1), (3, 0), (1, 2)])
def test_soft_streams_agree(ops: Any, reference: ReferenceOps, num_streams: int, iterations: int) -> None:
    rows = num_streams * (2 + num_streams) if iterations else num_streams
    matrix = normal(rows, num_streams * 20, seed=1) / 20
    found = []
    for some, tensor in sides(ops, reference):
        weight = Projection(some.load_matrix(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape))
        scale, base = tensor(np.array([0.5, 2.0, 3.0], np.float32)[: 3 if iterations else 1]), tensor(normal(rows))
        connection = SoftConnection(weight, scale, base, num_streams, iterations, eps=1e-3, norm_eps=1e-5)
        streams = tensor(normal(9, num_streams * 20, seed=2))
        read, shares = some.read_soft_streams(streams, connection)
        written = some.write_streams(streams, shares, tensor(normal(9, 20, seed=3))) if iterations else read
        found.append((read, shares, written))

    assert all(close(got, expected) for got, expected in zip(*found, strict=True))


# -- mixtures ----------------------------------------------------------------------------------------------------------
LIMITED = {
    "a bias that chooses": Routing(2, Gating.SQRT_SOFTPLUS, True, 1.5, bias=BIAS),
    "as they are": Routing(3, Gating.SQRT_SOFTPLUS, False),
    "sigmoids": Routing(2, Gating.SIGMOID, True),
}


@pytest.mark.parametrize("routing", LIMITED.values(), ids=LIMITED)
@pytest.mark.parametrize("is_routed_by_id", [False, True])
def test_a_mixture_of_limited_experts_agrees(
    ops: Any, reference: ReferenceOps, routing: Routing, is_routed_by_id: bool
) -> None:
    random = np.random.default_rng(1)
    table = np.stack([random.permutation(EXPERTS)[: routing.num_used] for _ in range(30)]).astype(np.int32)
    x, ids = normal(40, WIDTH, seed=9), random.integers(0, 30, 40).astype(np.int32)

    def work(ops: Any, tensor: Tensor) -> Any:
        limited = LimitedExperts(mixture_of(ops, tensor, routing), 1.5, table if is_routed_by_id else None)
        return ops.limited_mixture(tensor(x), limited, ids)

    assert close(work(ops, plain), work(reference, torch.from_numpy), 2e-4)


def test_a_token_id_that_names_no_experts_is_refused(ops: Any) -> None:
    experts = mixture_of(ops, plain, LIMITED["as they are"])
    limited = LimitedExperts(experts, 1.5, np.zeros((30, 3), np.int32))
    with pytest.raises(ValueError, match="token id 30 is outside 0 to 29"):
        ops.limited_mixture(normal(1, WIDTH), limited, np.array([30], np.int32))


def test_a_mixture_of_scaled_experts_agrees(ops: Any, reference: ReferenceOps) -> None:
    x, routed_by, routing = normal(40, WIDTH, seed=9), normal(40, WIDTH, seed=10), Routing(2, Gating.SOFTMAX, True)

    def work(ops: Any, tensor: Tensor) -> Any:
        scaled = ScaledExperts(mixture_of(ops, tensor, routing), tensor(normal(EXPERTS, seed=3)))
        return ops.scaled_mixture(tensor(x), tensor(routed_by), scaled)

    assert close(work(ops, plain), work(reference, torch.from_numpy), 2e-4)


# -- states ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("channels", "taps", "dilation"), [(77, 4, 3), (16, 2, 5), (5, 1, 9)])
def test_a_dilated_convolution_agrees(
    ops: Any, reference: ReferenceOps, channels: int, taps: int, dilation: int
) -> None:
    kernel, shapes = normal(channels, taps, seed=1), (((taps - 1) * dilation, channels), (1, 1, 1))
    own, theirs = states_of(ops, *shapes), states_of(reference, *shapes)
    for number, batch in enumerate(STEPS):
        x = normal(batch.num_tokens, channels, seed=10 + number)
        got = ops.causal_conv(x, kernel, own, 1, batch, True, dilation)
        expected = reference.causal_conv(
            torch.from_numpy(x), torch.from_numpy(kernel), theirs, 1, batch, True, dilation
        )

        assert close(got, expected)
    assert np.allclose(own.conv[1], theirs.conv[1].numpy(), equal_nan=True)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize(("heads", "dim"), [(3, 20), (1, 128), (2, 33)])
def test_kimi_s_delta_rule_agrees(
    ops: Any, reference: ReferenceOps, heads: int, dim: int, lower_bound: float | None
) -> None:
    own, theirs = (states_of(some, (1, 1), (heads, dim, dim)) for some, _ in sides(ops, reference))
    rate, bias = -np.exp(normal(heads, seed=11)), normal(heads * dim, seed=12)
    for number, batch in enumerate(STEPS):
        widths = [heads * dim] * 4 + [heads]
        inputs = [normal(batch.num_tokens, width, seed=20 * number + at) for at, width in enumerate(widths)]
        inputs[3] *= 10
        got = ops.kimi_delta(*inputs, KimiDelta(heads, dim, rate, bias, lower_bound), own, 1, batch)
        net = KimiDelta(heads, dim, torch.from_numpy(rate), torch.from_numpy(bias), lower_bound)
        expected = reference.kimi_delta(*[torch.from_numpy(x) for x in inputs], net, theirs, 1, batch)

        assert close(got, expected)
    assert np.allclose(own.delta[1], theirs.delta[1].numpy(), rtol=1e-5, atol=1e-5, equal_nan=True)


END = 9
NGRAMS = NGrams([3, 2**61 + 5, 7], 2, [11, 13, 17, 19], [0, 11, 24, 41], END)


def test_rows_of_hashed_ngrams_agree(ops: Any, reference: ReferenceOps) -> None:
    table, random = normal(61, 5), np.random.default_rng(2)
    own, theirs = (states_of(some, (2, 1), (1, 1, 1)) for some, _ in sides(ops, reference))
    for batch in STEPS:
        batch = replace(batch, input_ids=random.integers(0, 12, batch.num_tokens).astype(np.int32))
        got = ops.ngram_embed(
            ops.load_matrix(table.view(np.uint8).reshape(-1), "F32", table.shape), NGRAMS, own, 1, batch
        )

        assert np.array_equal(got, reference.ngram_embed(torch.from_numpy(table), NGRAMS, theirs, 1, batch))
    assert np.array_equal(own.conv[1], theirs.conv[1].numpy(), equal_nan=True)


def test_ngrams_outside_their_table_are_refused(ops: Any) -> None:
    table, states = normal(59, 5), states_of(ops, (2, 1), (1, 1, 1))
    weight = ops.load_matrix(table.view(np.uint8).reshape(-1), "F32", table.shape)
    with pytest.raises(ValueError, match="n-grams of head 3 are outside a table of 59 rows"):
        ops.ngram_embed(weight, NGRAMS, states, 1, sequences((1, 0, 3)))
