"""Operations of indexed attention and of hashed n-grams, against a plain statement of each."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.unit.test_recurrent_ops import normal, steps_of

END = 9
NGRAMS = NGrams([3, 5, 7], 2, [11, 13, 17, 19], [0, 11, 24, 41], END)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def plain_rows(ids: list[int], at: int) -> list[int]:
    """Rows of one token, by the definition."""
    back = [ids[at]]
    for earlier in (at - 1, at - 2):
        closed = earlier < 0 or END in ids[earlier:at]
        back.append(END if closed else ids[earlier])
    two = back[0] * 3 ^ back[1] * 5
    three = two ^ back[2] * 7
    return [two % 11, two % 13 + 11, three % 17 + 24, three % 19 + 41]


@pytest.mark.parametrize("size", [12, 5, 1])
def test_ngrams_look_back_to_the_end_of_the_text_before(size: int) -> None:
    ops = ReferenceOps()
    table = torch.arange(60, dtype=torch.float32)[:, None]
    states = ops.new_states(1, (2, 1), (0, 0, 0), 3)
    states.conv[0].fill_(torch.nan)
    ids = [4, 2, END, 5, 6, 7, END, END, 1, 0, 3, 8]
    rows = []
    for first in range(0, 12, size):
        batch = steps_of([(1, first, min(size, 12 - first))])
        batch = replace(batch, input_ids=np.array(ids[first : first + size], np.int32))
        rows += ops.ngram_embed(table, NGRAMS, states, 0, batch).int().tolist()

    assert rows == [plain_rows(ids, at) for at in range(12)]


def test_a_query_attends_its_best_groups_and_what_follows_the_last_whole_one() -> None:
    ops = ReferenceOps()
    index = GroupIndex(2, 4, 3, 2, Norm(torch.ones(4), 1e-6), torch.zeros(0))
    keys, q = normal(14, 4), torch.from_numpy(normal(14, 8, seed=1))
    batch = steps_of([(0, 0, 14)])
    batch.slot_mapping[:] = np.arange(14)
    cache = ops.new_latent_cache(1, 4, 1, 16)
    ops.store_latent(cache, 0, batch, torch.from_numpy(keys))
    [hidden] = ops.select_groups(q, cache, 0, batch, index)

    for token in range(14):
        whole = (token + 1) // 3
        means = keys[: whole * 3].reshape(whole, 3, 4).mean(1, dtype=np.float64)
        means /= np.sqrt((means**2).mean(-1, keepdims=True) + 1e-6)
        worth = np.maximum(means @ q[token].view(2, 4).numpy().T, 0).sum(-1)
        best = np.argsort(-worth, kind="stable")[:2]
        expected = {3 * group + part for group in best for part in range(3)} | set(range(3 * whole, token + 1))
        assert set(np.flatnonzero(~hidden[token, 0, :14].numpy())) == expected


def test_of_equal_groups_the_earlier_is_attended() -> None:
    ops = ReferenceOps()
    index = GroupIndex(1, 2, 2, 1, Norm(torch.ones(2), 1e-6), torch.zeros(0))
    batch = steps_of([(0, 0, 6)])
    batch.slot_mapping[:] = np.arange(6)
    cache = ops.new_latent_cache(1, 2, 1, 16)
    ops.store_latent(cache, 0, batch, torch.ones(6, 2))
    [hidden] = ops.select_groups(torch.ones(6, 2), cache, 0, batch, index)

    assert np.flatnonzero(~hidden[5, 0, :6].numpy()).tolist() == [0, 1]


def test_streams_are_gated_by_the_signed_root_of_a_match() -> None:
    keys, queries, value = normal(5, 12), normal(5, 12, seed=1), normal(5, 4, seed=2)
    got = ReferenceOps().gate_streams(*map(torch.from_numpy, (keys, queries, value))).numpy()
    match = (keys.astype(np.float64) * queries).reshape(5, 3, 4).sum(-1) / 2
    gate = 1 / (1 + np.exp(-np.sign(match) * np.sqrt(np.maximum(abs(match), 1e-6))))

    assert np.allclose(got, (gate[:, :, None] * value[:, None]).reshape(5, 12), atol=1e-6)


def test_a_stream_takes_twice_its_gate_of_what_is_given() -> None:
    streams, gates, y = normal(5, 12), normal(5, 3, seed=1), normal(5, 4, seed=2)
    got = ReferenceOps().add_gated(*map(torch.from_numpy, (streams, gates, y))).numpy()
    shares = 2 / (1 + np.exp(-gates.astype(np.float64)))

    assert np.allclose(got, streams + (shares[:, :, None] * y[:, None]).reshape(5, 12), atol=1e-6)


@pytest.mark.parametrize("size", [20, 3])
def test_taps_of_a_dilated_convolution_are_apart(size: int) -> None:
    ops, x, kernel = ReferenceOps(), normal(20, 6), normal(6, 3, seed=1)
    states = ops.new_states(1, (2 * 4, 6), (0, 0, 0), 2)
    states.conv[0].fill_(torch.nan)
    got = []
    for first in range(0, 20, size):
        batch = steps_of([(1, first, min(size, 20 - first))])
        part = torch.from_numpy(x[first : first + size])
        got.append(ops.causal_conv(part, torch.from_numpy(kernel), states, 0, batch, silu=False, dilation=4))

    padded = np.concatenate([np.zeros((8, 6)), x])
    expected = sum(padded[4 * tap : 4 * tap + 20] * kernel[:, tap] for tap in range(3))
    assert np.allclose(torch.cat(got), expected, atol=1e-6)
