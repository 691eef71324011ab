"""Checks of groups that an index picks, n-grams and gates of streams against the reference backend.

usage: python -m tests.cuda.indexed [groups] [ngrams] [gates]   (TRITON_INTERPRET=1 without a GPU)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.api.ops import Norm
from tests.cuda.interpreted import batch_of as paged
from tests.cuda.interpreted import rows
from tests.cuda.recurrent import NUM_SLOTS, RANDOM, STEPS, batch_of, compared
from tests.cuda.words import asked


def groups() -> None:
    """A ragged step over scattered blocks: sequences with fewer groups than are picked, with more, and equal ones."""
    lengths, counts, dim = np.array([70, 9, 3, 41], np.int32), np.array([1, 9, 3, 30], np.int32), 16
    table = np.full((4, 5), -1, np.int32)
    places = iter(RANDOM.permutation(32).tolist())
    for row, number in enumerate(-(-lengths // 16)):
        table[row, :number] = [next(places) for _ in range(number)]
    step, history = paged(table, counts, lengths - counts), paged(table, lengths, 0 * lengths)
    k, v = (RANDOM.standard_normal((lengths.sum(), 2 * dim)).astype(np.float32) for _ in range(2))
    index_k = RANDOM.standard_normal((lengths.sum(), 12)).astype(np.float32)
    index_k[10:40] = index_k[10:11]  # groups of equal worth but for their place
    q, index_q = (RANDOM.standard_normal((counts.sum(), width)).astype(np.float32) for width in (6 * dim, 3 * 12))
    weight = RANDOM.standard_normal(12).astype(np.float32)
    for ratio, best in ((4, 2), (3, 5), (4, 100)):

        def attended(ops: Any, ratio: int = ratio, best: int = best) -> list[Any]:
            cache, keys = ops.new_kv_cache(1, 2, dim, dim, 32, 16), ops.new_latent_cache(1, 12, 32, 16)
            ops.store_kv(cache, 0, rows(ops, k), rows(ops, v), history)
            ops.store_latent(keys, 0, history, rows(ops, index_k))
            inv_freq = ops.load_vector(np.array([1.0, 0.1, 0.01], np.float32))
            index = GroupIndex(3, 12, ratio, best, Norm(ops.load_vector(weight), 1e-6), inv_freq)
            selection = ops.select_groups(rows(ops, index_q), keys, 0, step, index)
            spec = AttentionSpec(6, 2, dim, dim**-0.5)
            return [ops.selected_attention(rows(ops, q), cache, 0, step, spec, selection)]

        compared(attended, 1e-5)


def ngrams() -> None:
    """Texts that end within the ids, and ids that a state has kept; multipliers whose products wrap."""
    own = NGrams((2**62 + 11, -(2**61) - 5, 987654321987), 2, (7, 11, 5, 13), (0, 7, 18, 23), end_token=2)
    table = RANDOM.standard_normal((36, 8)).astype(np.float32)
    steps = [
        replace(batch_of(step), input_ids=RANDOM.integers(0, 5, sum(count for *_, count in step)).astype(np.int32))
        for step in STEPS
    ]

    def run(ops: Any) -> list[Any]:
        states = ops.new_states(1, (2, 1), (0, 0, 0), NUM_SLOTS)
        states.conv[0].fill_(torch.nan)
        held = ops.load_matrix(table.view(np.uint8).reshape(-1), "F32", table.shape)
        return [ops.ngram_embed(held, own, states, 0, step) for step in steps]

    compared(run, 1e-9)


def gates() -> None:
    """Gates of streams, among them one of nothing."""
    keys, queries, streams = (RANDOM.standard_normal((3, 4 * 24)).astype(np.float32) for _ in range(3))
    value, own = RANDOM.standard_normal((3, 24)).astype(np.float32), RANDOM.standard_normal((3, 4)).astype(np.float32)
    keys[1, 24:48] = 0
    compared(lambda ops: [ops.gate_streams(rows(ops, keys), rows(ops, queries), rows(ops, value))], 1e-6)
    compared(lambda ops: [ops.add_gated(rows(ops, streams), rows(ops, own), rows(ops, value))], 1e-6)


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (groups, ngrams, gates)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
