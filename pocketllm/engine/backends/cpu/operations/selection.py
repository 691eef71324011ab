"""What picks the keys that a token attends, and rows of hashed n-grams, on the native library.

A selection is an array like any other here, but of 32-bit integers in the place of floats: of each token how many keys
it attends, then those, ascending.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch, IndexerSpec
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.cpu.caches import CompressedCache, LatentCache, PagedCache
from pocketllm.engine.backends.cpu.library import IndexPlan, NGramPlan, Program
from pocketllm.engine.backends.cpu.matrices import Matrix
from pocketllm.engine.backends.cpu.operations.recorder import Recorder, width_of
from pocketllm.engine.backends.cpu.operations.recurrent import States, state_plan
from pocketllm.engine.backends.cpu.program import pointer


def selection_arguments(selection: Any, addresses: Sequence[int]) -> tuple[int | None, int]:
    """Where a selection is, and how wide its rows are; addresses: its own, or none."""
    return (None, 0) if selection is None else (addresses[0], width_of(selection))


class SelectionOps(Recorder):
    """Operations that look for rows."""

    def select_keys(
        self, q: Any, weights: Any, cache: LatentCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Any:
        return self._select((q, weights), cache, layer, batch, IndexPlan(spec.num_heads, spec.dim, spec.top_k, 1, 1))

    def select_entries(
        self, q: Any, weights: Any, cache: CompressedCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Any:
        plan = IndexPlan(spec.num_heads, spec.dim, spec.top_k, cache.ratio, 1)
        return self._select((q, weights), cache, layer, batch, plan)

    def select_pools(
        self, q: Any, weights: Any, cache: CompressedCache, layer: int, batch: ForwardBatch, spec: IndexerSpec
    ) -> Any:
        plan = IndexPlan(spec.num_heads, spec.dim, spec.top_k, cache.ratio, cache.ratio)
        return self._select((q, weights), cache, layer, batch, plan)

    def select_groups(self, q: Any, cache: LatentCache, layer: int, batch: ForwardBatch, index: GroupIndex) -> Any:
        sizes = index.num_heads, index.dim, index.num_best, index.ratio, index.ratio
        weights = pointer(index.norm.weight), pointer(index.inv_freq)
        plan = IndexPlan(*sizes, *weights, len(index.inv_freq), index.norm.eps)
        plan.index_kept = index  # whoever borrows its addresses holds the plan
        return self._select((q,), cache, layer, batch, plan)

    def _select(
        self, inputs: tuple[Any, ...], cache: PagedCache, layer: int, batch: ForwardBatch, plan: IndexPlan
    ) -> Any:
        assert width_of(inputs[0]) == plan.num_heads * plan.dim, (width_of(inputs[0]), plan.num_heads, plan.dim)

        def append(program: Program, addresses: Sequence[int], outputs: Sequence[int]) -> None:
            q, weights = (*addresses, None)[:2]
            program.append("select", cache.address, layer, plan, q, weights, outputs[0])

        return self.compute(append, inputs, ((plan.num_best + 1) * plan.expand,), batch)[0]

    def ngram_embed(self, table: Matrix, ngrams: NGrams, states: States, layer: int, batch: ForwardBatch) -> Any:
        numbers = [np.array(part, np.int64) for part in (ngrams.multipliers, ngrams.sizes, ngrams.offsets)]
        plan = NGramPlan(len(numbers[0]), ngrams.heads_per_length, ngrams.end_token, *map(pointer, numbers))
        plan.numbers_kept = numbers
        kept = state_plan(states.conv, layer)

        def append(program: Program, _: Sequence[int], outputs: Sequence[int]) -> None:
            program.append("ngram_embed", table.address, plan, kept, outputs[0])

        return self.compute(append, (), (len(ngrams.sizes) * table.cols,), batch)[0]
