"""Latent attention, groups of experts and residual streams on the reference backend, each against its definition."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import ForwardBatch, LatentAttentionSpec
from pocketllm.engine.backends.api.mixture import Gating, Routing
from pocketllm.engine.backends.api.ops import Projection
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.reference.mixture import route
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.backends.reference.streams import doubly_stochastic

Float64Array = npt.NDArray[np.float64]
HEADS, NOPE, ROPE, RANK, VALUE = 5, 12, 8, 20, 7
SPEC = LatentAttentionSpec(HEADS, RANK, ROPE, scale=0.21)
HIDDEN, STREAMS = 6, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def step(first: int, length: int, blocks: list[int], block_size: int) -> ForwardBatch:
    """The step that computes tokens [first, length) of one sequence."""
    at = np.arange(first, length)
    return ForwardBatch(
        input_ids=np.zeros(len(at), np.int32),
        positions=at.astype(np.int32),
        query_start_loc=np.array([0, len(at)], np.int32),
        seq_lens=np.array([length], np.int32),
        block_table=np.array([blocks], np.int32),
        slot_mapping=np.array(blocks)[at // block_size] * block_size + at % block_size,
        logit_rows=np.zeros(0, np.int32),
    )


# -- latent attention --------------------------------------------------------------------------------------------------
def expanded(q_nope: Any, q_rope: Any, latent: Any, key: Any, k_b: Any, v_b: Any) -> Float64Array:
    """Multi-head attention on the keys and values that the latents stand for, in float64."""
    q_nope, q_rope, latent, key, k_b, v_b = (
        x.numpy().astype(np.float64) for x in (q_nope, q_rope, latent, key, k_b, v_b)
    )
    out = np.zeros((len(latent), HEADS, VALUE))
    for head in range(HEADS):
        keys = np.concatenate([latent @ k_b[head], key], axis=-1)
        queries = np.concatenate(
            [q_nope.reshape(-1, HEADS, NOPE)[:, head], q_rope.reshape(-1, HEADS, ROPE)[:, head]], -1
        )
        for token in range(len(latent)):
            scores = keys[: token + 1] @ queries[token] * SPEC.scale
            share = np.exp(scores - scores.max())
            out[token, head] = share / share.sum() @ (latent[: token + 1] @ v_b[head].T)
    return out.reshape(len(latent), -1)


@pytest.mark.parametrize(("length", "first"), [(1, 0), (30, 0), (30, 29), (261, 250)])
@pytest.mark.parametrize("block_size", [16, 3])
def test_latent_attention_is_attention_on_the_keys_and_values_that_latents_stand_for(
    length: int, first: int, block_size: int
) -> None:
    ops, num_blocks = ReferenceOps(), -(-length // block_size)
    blocks = np.random.default_rng(2).permutation(num_blocks + 2)[:num_blocks].tolist()
    cache = ops.new_latent_cache(2, RANK + ROPE, num_blocks + 2, block_size)
    latent, key = normal(length, RANK, seed=1), normal(length, ROPE, seed=2)
    q_nope, q_rope = normal(length, HEADS * NOPE, seed=3), normal(length, HEADS * ROPE, seed=4)
    k_b, v_b = normal(HEADS, RANK, NOPE, seed=5), normal(HEADS, VALUE, RANK, seed=6)
    if first:
        ops.store_latent(cache, 1, step(0, first, blocks, block_size), latent[:first], key[:first])
    batch = step(first, length, blocks, block_size)
    ops.store_latent(cache, 1, batch, latent[first:], key[first:])
    found = ops.latent_attention(ops.project_heads(q_nope[first:], k_b), q_rope[first:], cache, 1, batch, SPEC)
    got = ops.project_heads(found, v_b)

    assert np.allclose(got.numpy(), expanded(q_nope, q_rope, latent, key, k_b, v_b)[first:], rtol=2e-5, atol=2e-5)
    assert not cache.rows[0].any()


def test_an_infinity_that_another_request_left_in_a_block_is_not_seen() -> None:
    ops = ReferenceOps()
    cache = ops.new_latent_cache(1, RANK + ROPE, 1, 16)
    cache.rows[0].fill_(torch.inf)
    batch = step(0, 3, [0], 16)
    ops.store_latent(cache, 0, batch, normal(3, RANK), normal(3, ROPE))
    got = ops.latent_attention(normal(3, HEADS * RANK), normal(3, HEADS * ROPE), cache, 0, batch, SPEC)

    assert got.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 90), count=st.integers(1, 10), heads=st.sampled_from([1, HEADS]))
def test_a_row_of_a_latent_step_has_the_bits_it_has_in_one_batch(first: int, count: int, heads: int) -> None:
    ops, spec = ReferenceOps(), replace(SPEC, num_heads=heads)
    blocks = list(range(7))
    cache = ops.new_latent_cache(1, RANK + ROPE, 7, 16)
    q_latent, q_rope = normal(100, heads * RANK, seed=3), normal(100, heads * ROPE, seed=4)
    batch = step(0, 100, blocks, 16)
    ops.store_latent(cache, 0, batch, normal(100, RANK, seed=1), normal(100, ROPE, seed=2))
    whole = ops.latent_attention(q_latent, q_rope, cache, 0, batch, spec)
    some = slice(first, first + count)
    part = ops.latent_attention(q_latent[some], q_rope[some], cache, 0, step(first, first + count, blocks, 16), spec)

    assert torch.equal(part, whole[some])


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 90), count=st.integers(1, 10))
def test_a_row_through_matrices_of_heads_has_the_same_bits_beside_any_neighbors(first: int, count: int) -> None:
    x, weight = normal(100, HEADS * NOPE), normal(HEADS, RANK, NOPE, seed=1)
    whole = ReferenceOps().project_heads(x, weight)

    assert torch.equal(ReferenceOps().project_heads(x[first : first + count], weight), whole[first : first + count])


# -- groups of experts -------------------------------------------------------------------------------------------------
GROUPED = Routing(2, Gating.SIGMOID, normalized=False, num_groups=3, num_groups_used=1)
LOGITS = torch.tensor([[5.0, -9.0, -9.0, 3.0, 3.5, -9.0, 4.0, 0.0, 0.0]])
"""Three groups of three: the best expert is in the first, the best two together in the second."""


@pytest.mark.parametrize(("best_of_group", "expected"), [(1, [0, 1]), (2, [4, 3])])
def test_a_group_is_as_good_as_its_best_experts_together(best_of_group: int, expected: list[int]) -> None:
    chosen, _ = route(LOGITS, replace(GROUPED, best_of_group=best_of_group))

    assert chosen.tolist() == [expected]


def test_a_bias_chooses_the_group_and_does_not_weigh() -> None:
    bias = torch.tensor([0.0] * 6 + [0.9, 0.9, 0.0])
    chosen, weights = route(LOGITS, replace(GROUPED, best_of_group=2, bias=bias))

    assert chosen.tolist() == [[6, 7]]
    assert torch.allclose(weights, LOGITS[:, [6, 7]].sigmoid())


def test_of_equal_groups_the_first_is_used() -> None:
    chosen, _ = route(torch.zeros(2, 9), replace(GROUPED, num_groups_used=2, num_used=5))

    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 2


# -- residual streams --------------------------------------------------------------------------------------------------
def connection(seed: int = 0, streams: int = STREAMS, loudness: float = 1.0, **changes: Any) -> HyperConnection:
    shares = streams * (2 + streams)
    plain = HyperConnection(
        weight=Projection(normal(shares, streams * HIDDEN, seed=seed) * loudness),
        scale=1 + 0.2 * normal(3, seed=seed + 1),
        base=0.5 * normal(shares, seed=seed + 2),
        num_streams=streams,
        iterations=20,
        eps=1e-6,
        norm_eps=1e-6,
        clamp=30.0,
    )
    return replace(plain, **changes)


def textbook(row: Float64Array, y: Float64Array, own: HyperConnection) -> tuple[Float64Array, Float64Array]:
    """What is read of one row's streams, and the streams after y is written, in float64."""
    n = own.num_streams
    weight, scale, base = (x.numpy().astype(np.float64) for x in (own.weight.weight, own.scale, own.base))
    w = weight @ (row / math.sqrt(np.mean(row * row) + own.norm_eps))
    streams = row.reshape(n, -1)
    reading = 1 / (1 + np.exp(-(w[:n] * scale[0] + base[:n])))
    writing = 2 / (1 + np.exp(-(w[n : 2 * n] * scale[1] + base[n : 2 * n])))
    mixing = np.clip(w[2 * n :] * scale[2] + base[2 * n :], -own.clamp, own.clamp).reshape(n, n)
    mixing = np.exp(mixing - mixing.max(axis=1, keepdims=True))
    for _ in range(own.iterations):
        mixing = mixing / (mixing.sum(axis=1, keepdims=True) + own.eps)
        mixing = mixing / (mixing.sum(axis=0, keepdims=True) + own.eps)
    after = [writing[to] * y + sum(mixing[to, s] * streams[s] for s in range(n)) for to in range(n)]
    return reading @ streams, np.concatenate(after)


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("loudness", [0.3, 40.0], ids=["mild logits", "logits beyond the clamp"])
def test_streams_are_read_and_written_by_the_definition(streams: int, loudness: float) -> None:
    ops, own = ReferenceOps(), connection(streams=streams, loudness=loudness)
    x, y = normal(9, streams * HIDDEN, seed=7), normal(9, HIDDEN, seed=8)
    read, shares = ops.read_streams(x, own)
    after = ops.write_streams(x, shares, y)

    for row in range(9):
        expected = textbook(x[row].numpy().astype(np.float64), y[row].numpy().astype(np.float64), own)
        assert np.allclose(read[row].numpy(), expected[0], rtol=1e-4, atol=1e-4)
        assert np.allclose(after[row].numpy(), expected[1], rtol=1e-4, atol=1e-4)


def test_a_logit_beyond_the_clamp_is_clamped() -> None:
    ops, x = ReferenceOps(), normal(5, STREAMS * HIDDEN, seed=7)
    loud = connection(loudness=40.0)
    _, clamped = ops.read_streams(x, loud)
    _, free = ops.read_streams(x, replace(loud, clamp=math.inf))

    assert not torch.allclose(clamped, free, atol=1e-3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), size=st.integers(1, 5), spread=st.floats(0.0, 4.0))
def test_mixing_gives_and_takes_of_every_stream_as_much(seed: int, size: int, spread: float) -> None:
    mixing = doubly_stochastic(normal(3, size, size, seed=seed) * spread, connection())

    assert torch.allclose(mixing.sum(1), torch.ones(3, size), atol=1e-4)
    assert torch.allclose(mixing.sum(2), torch.ones(3, size), atol=2e-2)
    assert (mixing >= 0).all()


def test_equal_streams_that_keep_to_themselves_are_a_plain_residual() -> None:
    base = torch.cat([torch.full((4,), -math.log(3.0)), torch.zeros(4), 60 * torch.eye(4).flatten() - 30])
    own = connection(weight=Projection(torch.zeros(24, STREAMS * HIDDEN)), base=base)
    ops, x, y = ReferenceOps(), normal(5, HIDDEN), normal(5, HIDDEN, seed=1)
    streams = ops.open_streams(x, STREAMS)
    read, shares = ops.read_streams(streams, own)
    after = ops.write_streams(streams, shares, y)

    assert torch.allclose(read, x, atol=1e-5)
    assert torch.allclose(after, ops.open_streams(x + y, STREAMS), atol=1e-4)
    assert torch.allclose(ops.mean_streams(after, STREAMS), x + y, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 90), count=st.integers(1, 10))
def test_a_row_of_streams_has_the_same_bits_beside_any_neighbors(first: int, count: int) -> None:
    ops, own, x, y = ReferenceOps(), connection(), normal(100, STREAMS * HIDDEN), normal(100, HIDDEN, seed=1)
    some = slice(first, first + count)
    read, shares = ops.read_streams(x, own)
    some_read, some_shares = ops.read_streams(x[some], own)

    assert torch.equal(some_read, read[some])
    assert torch.equal(ops.write_streams(x[some], some_shares, y[some]), ops.write_streams(x, shares, y)[some])
    assert torch.equal(ops.mean_streams(x[some], STREAMS), ops.mean_streams(x, STREAMS)[some])
