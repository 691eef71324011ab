"""Kimi Delta Attention and picked pools on the reference backend: against another form and simpler operations."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.api.compressed import Compressor
from pocketllm.engine.backends.api.recurrent import DeltaNet, KimiDelta
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.unit.test_recurrent_ops import normal, steps_of

HEADS, DIM = 3, 6
WIDTH = HEADS * DIM
Wide = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def inputs(length: int, seed: int = 0) -> list[npt.NDArray[np.float32]]:
    """Queries, keys, values, steps and shares."""
    widths = (WIDTH, WIDTH, WIDTH, WIDTH, HEADS)
    return [normal(length, width, seed=seed + at) for at, width in enumerate(widths)]


def net(lower_bound: float | None) -> KimiDelta:
    rate, bias = torch.from_numpy(-np.exp(normal(HEADS, seed=11))), torch.from_numpy(normal(WIDTH, seed=12))
    return KimiDelta(HEADS, DIM, rate, bias, lower_bound)


def run(ops: ReferenceOps, of: KimiDelta, given: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """All tokens of one sequence, over a slot that held something else."""
    states = ops.new_states(2, (1, 1), (HEADS, DIM, DIM), 4)
    states.delta[1].fill_(torch.nan)
    tensors = map(torch.from_numpy, given)
    return ops.kimi_delta(*tensors, of, states, 1, steps_of([(3, 0, len(given[0]))])).numpy()


def in_chunks(given: list[npt.NDArray[np.float32]], of: KimiDelta, size: int) -> Wide:
    """In the form for whole chunks, in float64: what a token adds solves a triangular system, whose products of keys
    weigh each value of a key by how much it decays between both tokens."""
    q, k, v, step, share = (values.astype(np.float64).reshape(len(values), HEADS, -1) for values in given)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    logits = step + of.time_bias.numpy().reshape(HEADS, DIM)
    rate = of.rate.numpy()[:, None].astype(np.float64)
    decay = rate * np.log1p(np.exp(logits)) if of.lower_bound is None else of.lower_bound / (1 + np.exp(rate * logits))
    weight, out = 1 / (1 + np.exp(-share)), np.zeros_like(v)
    for head in range(HEADS):
        state = np.zeros((DIM, DIM))
        for at in range(0, len(v), size):
            part = slice(at, at + size), head
            total = np.cumsum(decay[part], axis=0)
            later = np.exp(np.minimum(total[:, None] - total, 0))
            among_keys = np.einsum("id,jd,ijd->ij", k[part], k[part], later)
            system = np.eye(len(total)) + np.tril(weight[part] * among_keys, -1)
            added = np.linalg.solve(system, weight[part] * (v[part] - (np.exp(total) * k[part]) @ state))
            seen = np.tril(np.einsum("id,jd,ijd->ij", q[part], k[part], later)) @ added
            out[part] = ((np.exp(total) * q[part]) @ state + seen) / np.sqrt(DIM)
            state = np.exp(total[-1])[:, None] * state + (np.exp(total[-1] - total) * k[part]).T @ added
    return out.reshape(len(v), -1)


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "without a bound"])
def test_the_rule_token_by_token_is_that_of_whole_chunks(lower_bound: float | None) -> None:
    of, values = net(lower_bound), inputs(100)
    got, expected = run(ReferenceOps(), of, values), in_chunks(values, of, 64)

    assert ((got - expected) ** 2).sum() <= 1e-9 * (expected**2).sum()
    for size in (1, 7):
        assert np.allclose(in_chunks(values, of, size), expected, atol=1e-12)


def test_decays_that_are_equal_within_a_head_make_it_the_gated_delta_rule() -> None:
    ops, values = ReferenceOps(), inputs(40)
    by_head = normal(40, HEADS, seed=30)
    values[3] = np.repeat(by_head, DIM, axis=1)
    rate, bias = net(None).rate, torch.from_numpy(normal(HEADS, seed=31))
    kimi = KimiDelta(HEADS, DIM, rate, bias.repeat_interleave(DIM), None)
    gated = DeltaNet(HEADS, HEADS, DIM, DIM, False, rate, bias)
    states = ops.new_states(1, (1, 1), (HEADS, DIM, DIM), 1)
    mixed = torch.from_numpy(np.concatenate(values[:3], axis=1))
    steps, shares = torch.from_numpy(by_head), torch.from_numpy(values[4])
    expected = ops.gated_delta(mixed, steps, shares, gated, states, 0, steps_of([(0, 0, 40)])).numpy()

    assert np.array_equal(run(ops, kimi, values), expected)


def test_a_decay_never_reaches_its_bound_and_stays_finite() -> None:
    values = inputs(4)
    values[3][:] = 1e4
    bounded = run(ReferenceOps(), net(-5.0), values)
    values[3][:] = -1e4
    kept = run(ReferenceOps(), net(-5.0), values)

    assert np.isfinite(bounded).all()
    assert np.isfinite(kept).all()
    assert not np.allclose(bounded, kept)


# -- pools
POOL, INDEX_HEADS, INDEX_DIM = 4, 5, 3


def picked(num_best: int, length: int, cut: int) -> list[torch.Tensor]:
    """What each token does not attend, of a sequence whose tokens come in two steps."""
    ops, position = ReferenceOps(), torch.from_numpy(normal(POOL, INDEX_DIM, seed=9))
    keys, gates, q, weights = (
        torch.from_numpy(normal(length, width, seed=at))
        for at, width in enumerate((INDEX_DIM, INDEX_DIM, INDEX_HEADS * INDEX_DIM, INDEX_HEADS))
    )
    cache = ops.new_compressed_cache(1, INDEX_DIM, POOL, 1, 64)
    states = ops.new_states(1, (POOL - 1, 2 * INDEX_DIM), (0, 0, 0), 1)
    pools = Compressor(POOL, INDEX_DIM, overlaps=False, position=position)
    hidden: list[torch.Tensor] = []
    for first, last in ((0, cut), (cut, length)):
        if first < last:
            rows, batch = slice(first, last), steps_of([(0, first, last - first)])
            ops.compress(keys[rows], gates[rows], states, 0, cache, 0, batch, pools)
            spec = IndexerSpec(INDEX_HEADS, INDEX_DIM, num_best)
            hidden.extend(ops.select_pools(q[rows], weights[rows], cache, 0, batch, spec)[0][:, 0, :length])
    return hidden


@settings(max_examples=25, deadline=None)
@given(num_best=st.integers(1, 4), length=st.integers(1, 30), cut=st.integers(0, 30))
def test_a_token_attends_its_best_whole_pools_and_the_rest_however_it_is_cut(
    num_best: int, length: int, cut: int
) -> None:
    hidden = picked(num_best, length, min(cut, length))

    for position, own in enumerate(hidden):
        whole = (position + 1) // POOL * POOL
        pools = own[:whole].view(-1, POOL)
        assert (pools.all(1) | ~pools.any(1)).all()
        assert int((~pools.any(1)).sum()) == min(num_best, whole // POOL)
        assert not own[whole : position + 1].any()
        assert own[position + 1 :].all()
    assert all(torch.equal(own, other) for own, other in zip(hidden, picked(num_best, length, length), strict=True))


def test_attention_over_all_pools_is_attention_over_all_tokens() -> None:
    ops, length = ReferenceOps(), 21
    batch = steps_of([(0, 0, length)])
    batch.slot_mapping[:] = np.arange(length)
    cache = ops.new_latent_cache(1, 8, 1, 64)
    ops.store_latent(cache, 0, batch, torch.from_numpy(normal(length, 8)))
    q, none = torch.from_numpy(normal(length, 16, seed=1)), torch.zeros(length, 0)
    spec = LatentAttentionSpec(num_heads=2, rank=8, rope_dim=0, scale=0.3)
    hidden = torch.ones(length, 1, 256, dtype=torch.bool)
    hidden[:, 0, :length] = torch.stack(picked(100, length, 10))

    all_tokens = ops.latent_attention(q, none, cache, 0, batch, spec)
    assert torch.equal(ops.latent_attention(q, none, cache, 0, batch, spec, [hidden]), all_tokens)
