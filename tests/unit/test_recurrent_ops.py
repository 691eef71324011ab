"""Recurrent operations of the reference backend: against float64, another form, and to the bit against chunks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import AttentionSpec, ForwardBatch
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Projection
from pocketllm.engine.backends.api.recurrent import DeltaNet
from pocketllm.engine.backends.api.rotation import Hadamard
from pocketllm.engine.backends.reference.ops import ReferenceOps

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 7
WIDTH = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
NUM_SLOTS = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def steps_of(segments: Sequence[tuple[int, int, int]]) -> ForwardBatch:
    """A step of (slot, tokens that are done, tokens of this step) for each sequence."""
    counts = [count for _, _, count in segments]
    return ForwardBatch(
        input_ids=np.zeros(sum(counts), np.int32),
        positions=np.concatenate([np.arange(done, done + count) for _, done, count in segments]).astype(np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([done + count for _, done, count in segments], np.int32),
        block_table=np.zeros((len(segments), 1), np.int32),
        slot_mapping=np.zeros(sum(counts), np.int64),
        logit_rows=np.zeros(0, np.int32),
        state_slots=np.array([slot for slot, _, _ in segments], np.int32),
    )


def net(is_tiled: bool) -> DeltaNet:
    rate = torch.from_numpy(-np.exp(normal(VALUE_HEADS, seed=11)))
    bias = torch.from_numpy(normal(VALUE_HEADS, seed=12))
    return DeltaNet(KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, is_tiled, rate, bias)


def dirty_states(ops: ReferenceOps, taps: int = 4):
    """Slots that hold what an earlier request has left: nothing of it may be read."""
    states = ops.new_states(2, (taps - 1, WIDTH), (VALUE_HEADS, KEY_DIM, VALUE_DIM), NUM_SLOTS)
    for kept in (*states.conv, *states.delta):
        kept.fill_(torch.nan)
    return states


# -- the convolution
def test_a_convolution_is_the_sum_of_its_taps_over_a_sequences_own_past() -> None:
    ops, x, kernel = ReferenceOps(), normal(9, WIDTH), normal(WIDTH, 4, seed=1)
    got = ops.causal_conv(
        torch.from_numpy(x), torch.from_numpy(kernel), dirty_states(ops), 1, steps_of([(2, 0, 6), (0, 0, 3)]), False
    )

    for first, last in ((0, 6), (6, 9)):
        for channel in range(0, WIDTH, 13):
            own = np.convolve(x[first:last, channel].astype(np.float64), kernel[channel, ::-1].astype(np.float64))
            assert np.allclose(got[first:last, channel], own[: last - first], atol=1e-5)


def test_silu_of_a_convolution_is_silu_of_its_sum() -> None:
    ops, x, kernel = ReferenceOps(), torch.from_numpy(normal(5, WIDTH)), torch.from_numpy(normal(WIDTH, 4, seed=1))
    plain, bent = (
        ops.causal_conv(x, kernel, dirty_states(ops), 0, steps_of([(0, 0, 5)]), silu) for silu in (False, True)
    )

    assert torch.allclose(bent, torch.nn.functional.silu(plain), atol=1e-6)


# -- the gated delta rule
def textbook(mixed: Array, step: Array, share: Array, of: DeltaNet) -> Wide:
    """One head and one token at a time, in float64."""
    x = mixed.astype(np.float64)
    keys = KEY_HEADS * KEY_DIM
    out = np.zeros((len(x), VALUE_HEADS, VALUE_DIM))
    for head in range(VALUE_HEADS):
        own = head % KEY_HEADS if of.is_tiled else head // (VALUE_HEADS // KEY_HEADS)
        state = np.zeros((KEY_DIM, VALUE_DIM))
        for token in range(len(x)):
            q, k = x[token, own * KEY_DIM :][:KEY_DIM], x[token, keys + own * KEY_DIM :][:KEY_DIM]
            q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(KEY_DIM), k / np.sqrt(k @ k + 1e-6)
            v = x[token, 2 * keys + head * VALUE_DIM :][:VALUE_DIM]
            time = np.log1p(np.exp(float(step[token, head]) + float(of.time_bias[head])))
            state *= np.exp(float(of.rate[head]) * time)
            state += np.outer(k, (v - state.T @ k) / (1 + np.exp(-float(share[token, head]))))
            out[token, head] = state.T @ q
    return out.reshape(len(x), -1)


def chunked(mixed: Array, step: Array, share: Array, of: DeltaNet, size: int) -> Wide:
    """The same in its form for whole chunks: what a token adds solves a triangular system (Yang et al. 2024)."""
    x, keys = mixed.astype(np.float64), KEY_HEADS * KEY_DIM
    out = np.zeros((len(x), VALUE_HEADS, VALUE_DIM))
    for head in range(VALUE_HEADS):
        own = head % KEY_HEADS if of.is_tiled else head // (VALUE_HEADS // KEY_HEADS)
        q, k = (x[:, at + own * KEY_DIM : at + (own + 1) * KEY_DIM] for at in (0, keys))
        q, k = (row / np.sqrt((row * row).sum(-1, keepdims=True) + 1e-6) for row in (q, k))
        v = x[:, 2 * keys + head * VALUE_DIM : 2 * keys + (head + 1) * VALUE_DIM]
        decay = float(of.rate[head]) * np.log1p(np.exp(step[:, head].astype(np.float64) + float(of.time_bias[head])))
        weight = 1 / (1 + np.exp(-share[:, head].astype(np.float64)))
        state = np.zeros((KEY_DIM, VALUE_DIM))
        for at in range(0, len(x), size):
            part = slice(at, at + size)
            total = np.cumsum(decay[part])
            later = np.tril(np.exp(np.minimum(total[:, None] - total, 0)))
            system = np.eye(len(total)) + np.tril(weight[part, None] * (k[part] @ k[part].T) * later, -1)
            known = v[part] - np.exp(total)[:, None] * (k[part] @ state)
            added = np.linalg.solve(system, weight[part, None] * known)
            seen = np.exp(total)[:, None] * (q[part] @ state) + ((q[part] @ k[part].T) * later) @ added
            out[part, head] = seen / np.sqrt(KEY_DIM)
            state = np.exp(total[-1]) * state + k[part].T @ (np.exp(total[-1] - total)[:, None] * added)
    return out.reshape(len(x), -1)


@pytest.mark.parametrize("is_tiled", [True, False], ids=["tiled", "grouped"])
def test_the_delta_rule_is_the_textbooks_and_that_of_whole_chunks(is_tiled: bool) -> None:
    ops, of = ReferenceOps(), net(is_tiled)
    mixed, step, share = normal(150, WIDTH), 3 * normal(150, VALUE_HEADS, seed=1), normal(150, VALUE_HEADS, seed=2)
    tensors = map(torch.from_numpy, (mixed, step, share))
    got = ops.gated_delta(*tensors, of, dirty_states(ops), 1, steps_of([(3, 0, 150)])).numpy()

    assert np.allclose(got, textbook(mixed, step, share, of), atol=2e-5)
    for size in (64, 7):
        assert np.allclose(textbook(mixed, step, share, of), chunked(mixed, step, share, of, size), atol=1e-12)


def test_a_time_step_too_large_for_an_exponential_stays_finite() -> None:
    ops, of = ReferenceOps(), net(True)
    mixed, share = torch.from_numpy(normal(3, WIDTH)), torch.zeros(3, VALUE_HEADS)
    got = ops.gated_delta(
        mixed, torch.full((3, VALUE_HEADS), 200.0), share, of, dirty_states(ops), 0, steps_of([(0, 0, 3)])
    )

    assert torch.isfinite(got).all()


# -- the same bits in any company and however it is cut
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=NUM_SLOTS),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_sequences_cut_anyhow_and_beside_others_keep_their_bits(lengths: list[int], cuts: list[int]) -> None:
    ops, of, kernel = ReferenceOps(), net(True), torch.from_numpy(normal(WIDTH, 4, seed=5))
    rows = [torch.from_numpy(normal(length, WIDTH, seed=20 + at)) for at, length in enumerate(lengths)]
    logits = [torch.from_numpy(normal(length, 2 * VALUE_HEADS, seed=40 + at)) for at, length in enumerate(lengths)]

    def run(x: torch.Tensor, steps: torch.Tensor, states: object, batch: ForwardBatch) -> torch.Tensor:
        mixed = ops.causal_conv(x, kernel, states, 1, batch, True)
        return ops.gated_delta(mixed, steps[:, :VALUE_HEADS], steps[:, VALUE_HEADS:], of, states, 1, batch)

    alone = [
        run(rows[at], logits[at], dirty_states(ops), steps_of([(1, 0, length)])) for at, length in enumerate(lengths)
    ]
    states, done = dirty_states(ops), [0] * len(lengths)
    parts: list[list[torch.Tensor]] = [[] for _ in lengths]
    turn = 0
    while any(have < length for have, length in zip(done, lengths, strict=True)):
        count = cuts[turn % len(cuts)]
        turn += 1
        segments = [(at, done[at], min(count, lengths[at] - done[at])) for at in range(len(lengths))]
        segments = [segment for segment in segments if segment[2]]
        x = torch.cat([rows[at][have : have + some] for at, have, some in segments])
        steps = torch.cat([logits[at][have : have + some] for at, have, some in segments])
        out, first = run(x, steps, states, steps_of(segments)), 0
        for at, _, some in segments:
            parts[at].append(out[first : first + some])
            done[at] += some
            first += some

    for part, expected in zip(parts, alone, strict=True):
        assert torch.equal(torch.cat(part), expected)


def test_copies_are_made_one_after_another() -> None:
    ops = ReferenceOps()
    states = ops.new_states(1, (1, 1), (1, 1, 1), 3)
    states.conv[0][:, 0, 0] = torch.tensor([1.0, 2.0, 3.0])
    ops.copy_states(states, np.array([0, 1], np.int32), np.array([1, 2], np.int32))

    assert states.conv[0][:, 0, 0].tolist() == [1.0, 1.0, 1.0]


# -- rotations
@pytest.mark.parametrize("block", [1, 2, 64])
def test_a_rotation_is_sylvesters_matrix_and_undoes_itself(block: int) -> None:
    ops, x = ReferenceOps(), normal(5, 192)
    signs = np.random.default_rng(1).choice([-1.0, 1.0], 192).astype(np.float32)
    rotation = Hadamard(block, torch.from_numpy(signs))
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    runs = (x * signs).astype(np.float64).reshape(5, -1, block)
    got = ops.hadamard(torch.from_numpy(x), rotation)

    assert np.allclose(got, (runs @ matrix / np.sqrt(block)).reshape(5, 192), atol=1e-5)
    assert np.allclose(ops.hadamard(got, rotation, inverse=True), x, atol=1e-5)


# -- sinks and bounded experts
def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    ops, spec = ReferenceOps(), AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, scale=0.4, window=5)
    q, k, v, sinks = normal(11, 24), normal(11, 12, seed=1), normal(11, 12, seed=2), 2 * normal(4, seed=3)
    batch = steps_of([(0, 0, 11)])
    batch.slot_mapping[:] = np.arange(11)
    cache = ops.new_kv_cache(1, 2, 6, 6, 1, 16)
    ops.store_kv(cache, 0, torch.from_numpy(k), torch.from_numpy(v), batch)
    got = ops.sink_attention(torch.from_numpy(q), torch.from_numpy(sinks), cache, 0, batch, spec).numpy()

    for token in range(11):
        seen = slice(max(0, token - 4), token + 1)
        for head in range(4):
            own = slice(head // 2 * 6, head // 2 * 6 + 6)
            scores = np.exp(k[seen, own].astype(np.float64) @ q[token, 6 * head : 6 * head + 6] * 0.4)
            expected = scores @ v[seen, own] / (scores.sum() + np.exp(float(sinks[head])))
            assert np.allclose(got[token, 6 * head : 6 * head + 6], expected, atol=1e-5)


def test_a_bounded_expert_is_bounded_where_it_should_be() -> None:
    ops, x = ReferenceOps(), 4 * normal(6, 8)
    gate, up, down = normal(3, 5, 8, seed=1), normal(3, 5, 8, seed=2), normal(3, 8, 5, seed=3)
    biases = [normal(3, width, seed=4 + at) for at, width in enumerate((5, 5, 8))]
    router = normal(3, 8, seed=9)
    tensors = [torch.from_numpy(values) for values in (gate, up, down, *biases)]
    experts = Experts(Projection(torch.from_numpy(router)), *tensors[:3], Routing(2, Gating.SOFTMAX, normalized=True))
    got = ops.bounded_mixture(torch.from_numpy(x), BoundedExperts(experts, *tensors[3:], slope=1.702, limit=7.0))

    for weights in (gate, up):
        assert (np.einsum("eoi,ti->teo", weights, x) > 7).any(), "no bound is reached"
    for token in range(6):
        scores = router @ x[token]
        used = np.argsort(-scores)[:2]
        shares = np.exp(scores[used] - scores[used].max())
        total = np.zeros(8)
        for share, expert in zip(shares / shares.sum(), used, strict=True):
            g = np.minimum(gate[expert] @ x[token] + biases[0][expert], 7.0)
            u = np.clip(up[expert] @ x[token] + biases[1][expert], -7.0, 7.0)
            inner = g / (1 + np.exp(-1.702 * g)) * (u + 1)
            total += share * (down[expert] @ inner + biases[2][expert])
        assert np.allclose(got[token], total, rtol=1e-4, atol=1e-3)
