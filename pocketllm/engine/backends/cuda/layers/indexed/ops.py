"""Operations over groups that an index picks, hashed n-grams and gates of streams."""

from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.indexed import GroupIndex, NGrams
from pocketllm.engine.backends.cuda.kernels.unpack import unpack_indexed
from pocketllm.engine.backends.cuda.layers.indexed.groups import Groups, group_angles, select_groups
from pocketllm.engine.backends.cuda.layers.indexed.kernels import ngrams as kernels
from pocketllm.engine.backends.cuda.layers.latent.attention import LatentCache
from pocketllm.engine.backends.cuda.layers.latent.selection import num_entries
from pocketllm.engine.backends.cuda.layers.operands import written
from pocketllm.engine.backends.cuda.layers.operations import Operations
from pocketllm.engine.backends.cuda.layers.recurrent.layers import States, convolve
from pocketllm.engine.backends.cuda.matrices import Matrix, Plain
from pocketllm.engine.backends.cuda.steps.batch import DeviceBatch


class IndexedOps(Operations):
    """What qwen4exp asks for beside a hybrid's operations; see `api.ops.Ops`."""

    def select_groups(self, q: Any, cache: LatentCache, layer: int, batch: ForwardBatch, index: GroupIndex) -> Groups:
        rows, own = written(q), self._of(batch)
        count = triton.next_power_of_2(num_entries(own, cache.block_size, index.ratio))
        key = id(index.inv_freq), count, index.ratio
        if key not in self._constants:
            self._constants[key] = index.inv_freq, group_angles(index.inv_freq, count, index.ratio)
        return select_groups(rows, cache.rows[layer], own, index, self._constants[key][1])

    def ngram_embed(self, table: Matrix, ngrams: NGrams, states: States, layer: int, batch: ForwardBatch) -> Tensor:
        own, kept = self._of(batch), states.conv[layer]
        rows = self._ngram_rows(ngrams, kept, own).view(-1)
        # ids move on in a state as what a convolution looks back on: zeros before a sequence are ends of text
        ids = (own.input_ids - ngrams.end_token).float()[:, None]
        convolve(ids, torch.ones(1, len(ngrams.multipliers), device=ids.device), kept, own, silu=False, dilation=1)
        if isinstance(table.held, Plain):
            return table.held.values[rows].float().view(len(ids), -1)
        out = torch.empty(len(rows), table.cols, dtype=torch.float32, device=ids.device)
        unpack_indexed(table.held, rows, out, 1.0)
        return out.view(len(ids), -1)

    def _ngram_rows(self, ngrams: NGrams, kept: Tensor, batch: DeviceBatch) -> Tensor:
        """int32 [tokens, heads]."""
        if (id(ngrams),) not in self._constants:
            numbers = ngrams.multipliers, ngrams.sizes, ngrams.offsets
            made = [torch.tensor(some, dtype=torch.int64, device=self._device) for some in numbers]
            self._constants[id(ngrams),] = ngrams, made
        multipliers, sizes, offsets = self._constants[id(ngrams),][1]
        tokens, heads, seqs = len(batch.input_ids), len(sizes), len(batch.seq_lens)
        rows = torch.empty(tokens, heads, dtype=torch.int32, device=self._device)
        kernels.ngram_kernel[(tokens,)](
            batch.input_ids, kept, batch.state_slots, batch.query_start_loc, batch.seq_lens, multipliers, sizes,
            offsets, rows, seqs, ngrams.end_token, heads,
            SIZE=len(multipliers), PER_LENGTH=ngrams.heads_per_length,
            P_BLOCK=triton.next_power_of_2(ngrams.heads_per_length), SEQS=triton.next_power_of_2(seqs), num_warps=1,
        )  # fmt: skip
        return rows

    def gate_streams(self, keys: Any, queries: Any, value: Any) -> Tensor:
        own, others, values = written(keys).contiguous(), written(queries).contiguous(), written(value)
        hidden, out = values.shape[1], torch.empty(own.shape, dtype=torch.float32, device=own.device)
        streams = own.shape[1] // hidden
        kernels.gate_kernel[(len(own), streams)](
            own, others, values, out, values.stride(0), hidden, STREAMS=streams, BLOCK=triton.next_power_of_2(hidden),
            num_warps=4,
        )  # fmt: skip
        return out

    def add_gated(self, streams: Any, gates: Any, y: Any) -> Tensor:
        rows, shares, new = written(streams), 2 * torch.sigmoid(written(gates)), written(y)
        each = rows.view(len(rows), shares.shape[1], -1)
        return torch.addcmul(each, shares[:, :, None], new[:, None]).view(rows.shape)
