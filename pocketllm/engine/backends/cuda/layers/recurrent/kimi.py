"""What launches the kernels of Kimi Delta Attention."""

from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.recurrent import UNIT_EPS, KimiDelta
from pocketllm.engine.backends.cuda.layers.recurrent.kernels import kimi as kernels
from pocketllm.engine.backends.cuda.layers.recurrent.layers import PRECISION
from pocketllm.engine.backends.cuda.steps.batch import TILE_QUERIES, DeviceBatch

SIDE = 16
"""Tokens of a chunk: rows of an instruction of the tensor cores."""
SINGLE_VALUES, CHUNK_VALUES = 64, 32
"""Columns of a head's state in one program, of a token and of a sequence's chunks; with the warps of such a program
part of the numerics version."""
SINGLE_WARPS, CHUNK_WARPS, SUM_WARPS = 4, 4, 8
CHUNK_STAGES = 3
"""Chunks of a sequence that are in shared memory or on their way there."""


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, share: Tensor, net: KimiDelta, kept: Tensor, batch: DeviceBatch
) -> Tensor:
    """See `Ops.kimi_delta`. q, k, v: contiguous; kept: [slots, heads, dim, dim], left with the last states."""
    assert kept.shape[1:] == (net.num_heads, net.dim, net.dim), (kept.shape, net)
    out = torch.empty(len(v), net.num_heads * net.dim, dtype=torch.float32, device=v.device)
    shape = {"DIM": net.dim, "BLOCK": max(16, triton.next_power_of_2(net.dim))}
    rule = net.num_heads, net.lower_bound or 0.0, UNIT_EPS
    if singles := len(batch.single_seqs):
        kernels.single_kernel[(singles, net.num_heads, triton.cdiv(net.dim, SINGLE_VALUES))](
            q, k, v, step, share, net.rate, net.time_bias, kept, batch.state_slots, batch.seq_lens, batch.single_seqs,
            batch.single_tokens, out, step.stride(0), share.stride(0), *rule,
            **shape, V_BLOCK=SINGLE_VALUES, HAS_BOUND=net.lower_bound is not None, num_warps=SINGLE_WARPS,
        )  # fmt: skip
    if len(batch.tile_seqs):
        chunked_rule(q, k, v, step, share, net, kept, batch, shape, out)
    return out


def chunked_rule(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, share: Tensor, net: KimiDelta, kept: Tensor, batch: DeviceBatch,
    shape: dict[str, Any], out: Tensor,
) -> None:  # fmt: skip
    """The same of sequences of several tokens, in chunks that begin with a sequence's first token of the step."""
    heads, tiles = net.num_heads, len(batch.tile_seqs)
    chunks = tiles * (TILE_QUERIES // SIDE)

    def room(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=v.device)

    solved, scores = (room(chunks, heads, SIDE, SIDE) for _ in range(2))
    left = room(chunks, heads, net.dim)
    q_decayed, k_decayed, k_rest = (room(*out.shape) for _ in range(3))
    places = batch.query_start_loc, batch.tile_seqs, batch.tile_firsts
    sizes = {**shape, "TILE": TILE_QUERIES, "SIDE": SIDE}
    kernels.chunks_kernel[(chunks, heads)](
        q, k, step, share, net.rate, net.time_bias, *places, solved, scores, q_decayed, k_decayed, k_rest, left,
        step.stride(0), share.stride(0), heads, net.lower_bound or 0.0, UNIT_EPS,
        **sizes, HAS_BOUND=net.lower_bound is not None, num_warps=SUM_WARPS,
    )  # fmt: skip
    kernels.states_kernel[(tiles, heads, triton.cdiv(net.dim, CHUNK_VALUES))](
        q_decayed, k_decayed, k_rest, v, left, solved, scores, kept, batch.state_slots, batch.seq_lens, *places, out,
        heads, **sizes, V_BLOCK=CHUNK_VALUES, PRECISION=PRECISION, num_warps=CHUNK_WARPS,
        num_stages=CHUNK_STAGES,
    )  # fmt: skip
