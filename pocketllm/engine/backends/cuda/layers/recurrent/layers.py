"""States in slots, and the layers over them: what launches their kernels."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.recurrent import UNIT_EPS, DeltaNet
from pocketllm.engine.backends.cuda.layers.recurrent.kernels import conv, delta
from pocketllm.engine.backends.cuda.steps.batch import TILE_QUERIES, DeviceBatch

CHANNELS, TILE_CHANNELS = 256, 32
"""Channels that a program convolves: of one token, and of a tile of them."""
SINGLE_VALUES, CHUNK_VALUES = 64, 32
"""Columns of a head's state in one program, of a token and of a sequence's chunks; with the warps of such a program
part of the numerics version."""
SINGLE_WARPS, CHUNK_WARPS, SOLVE_WARPS = 4, 4, 4
PRECISION = "tf32x3"
"""Of products of chunks: three of the tensor cores for one, which leaves an error as of float32."""


@dataclass
class States:
    """conv: [layers, slots, rows, channels]; delta: [layers, slots, heads, key_dim, value_dim]; float32."""

    conv: Tensor
    delta: Tensor

    def copy(self, source: int, target: int) -> None:
        """One slot's to another, of all layers."""
        for kept in (self.conv, self.delta):
            kept[:, target] = kept[:, source]


def new_states(
    num_layers: int, rows: tuple[int, int], matrices: tuple[int, int, int], num_slots: int, device: torch.device
) -> States:
    """With anything in them: a sequence that begins reads nothing."""
    shapes = (num_layers, num_slots, *rows), (num_layers, num_slots, *matrices)
    return States(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def convolve(x: Tensor, kernel: Tensor, kept: Tensor, batch: DeviceBatch, silu: bool, dilation: int) -> Tensor:
    """See `Ops.causal_conv`. x: each row contiguous; kept: [slots, rows, channels], left with the last inputs."""
    channels, taps = kernel.shape
    assert kept.shape[1:] == ((taps - 1) * dilation, x.shape[1]), (kept.shape, kernel.shape, x.shape)
    out = torch.empty(len(x), channels, dtype=torch.float32, device=x.device)
    how = {"ROWS": kept.shape[1], "TAPS": taps, "DILATION": dilation, "IS_SILU": silu}
    state = kept, batch.state_slots, batch.seq_lens
    if singles := len(batch.single_seqs):
        conv.single_kernel[(singles, triton.cdiv(channels, CHANNELS))](
            x, kernel, *state, batch.single_seqs, batch.single_tokens, out, x.stride(0), channels,
            BLOCK=CHANNELS, **how, num_warps=4,
        )  # fmt: skip
    if tiles := len(batch.tile_seqs):
        places = batch.query_start_loc, batch.tile_seqs, batch.tile_firsts
        conv.tile_kernel[(tiles, triton.cdiv(channels, TILE_CHANNELS))](
            x, kernel, *state, *places, out, x.stride(0), channels,
            TILE=TILE_QUERIES, BLOCK=TILE_CHANNELS, **how, num_warps=4,
        )  # fmt: skip
        conv.keep_kernel[(tiles, triton.cdiv(channels, CHANNELS))](
            x, *state, *places, x.stride(0), channels, BLOCK=CHANNELS, ROWS=kept.shape[1], num_warps=4
        )
    return out


def delta_rule(mixed: Tensor, step: Tensor, share: Tensor, net: DeltaNet, kept: Tensor, batch: DeviceBatch) -> Tensor:
    """See `Ops.gated_delta`. mixed: contiguous; kept: [slots, heads, key_dim, value_dim], left with the last states."""
    heads = net.num_value_heads
    assert kept.shape[1:] == (heads, net.key_dim, net.value_dim), (kept.shape, net)
    out = torch.empty(len(mixed), heads * net.value_dim, dtype=torch.float32, device=mixed.device)
    shape = {
        "KEY": net.key_dim, "K_BLOCK": max(16, triton.next_power_of_2(net.key_dim)), "VALUE": net.value_dim,
        "IS_TILED": net.is_tiled,
    }  # fmt: skip
    counts = net.num_key_heads, heads, UNIT_EPS
    if singles := len(batch.single_seqs):
        delta.single_kernel[(singles, heads, triton.cdiv(net.value_dim, SINGLE_VALUES))](
            mixed, step, share, net.rate, net.time_bias, kept, batch.state_slots, batch.seq_lens, batch.single_seqs,
            batch.single_tokens, out, step.stride(0), share.stride(0), *counts,
            **shape, V_BLOCK=SINGLE_VALUES, num_warps=SINGLE_WARPS,
        )  # fmt: skip
    if len(batch.tile_seqs):
        chunked_rule(mixed, step, share, net, kept, batch, shape, out)
    return out


def chunked_rule(
    mixed: Tensor, step: Tensor, share: Tensor, net: DeltaNet, kept: Tensor, batch: DeviceBatch,
    shape: dict[str, int | bool], out: Tensor,
) -> None:  # fmt: skip
    """The same of sequences of several tokens, in chunks that begin with a sequence's first token of the step."""
    tiles, heads, counts = len(batch.tile_seqs), net.num_value_heads, (net.num_key_heads, net.num_value_heads, UNIT_EPS)
    solved, scores = (
        torch.empty(tiles, heads, TILE_QUERIES, TILE_QUERIES, dtype=torch.float32, device=mixed.device)
        for _ in range(2)
    )
    places = batch.query_start_loc, batch.tile_seqs, batch.tile_firsts
    delta.chunks_kernel[(tiles, heads)](
        mixed, step, share, net.rate, net.time_bias, *places, solved, scores, step.stride(0), share.stride(0), *counts,
        **shape, TILE=TILE_QUERIES, PRECISION=PRECISION, num_warps=SOLVE_WARPS, num_stages=1,
    )  # fmt: skip
    delta.states_kernel[(tiles, heads, triton.cdiv(net.value_dim, CHUNK_VALUES))](
        mixed, step, net.rate, net.time_bias, kept, batch.state_slots, batch.seq_lens, *places, solved, scores, out,
        step.stride(0), *counts, **shape, V_BLOCK=CHUNK_VALUES, TILE=TILE_QUERIES, PRECISION=PRECISION,
        num_warps=CHUNK_WARPS, num_stages=1,
    )  # fmt: skip
