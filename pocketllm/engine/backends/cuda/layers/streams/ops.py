"""Operations on parallel residual streams: a row is so many of them side by side."""

from functools import reduce
from typing import Any

import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.compressed import SoftConnection
from pocketllm.engine.backends.api.streams import HyperConnection
from pocketllm.engine.backends.cuda.layers.operands import written
from pocketllm.engine.backends.cuda.layers.operations import Operations
from pocketllm.engine.backends.cuda.layers.streams.kernels import connections as kernels
from pocketllm.engine.backends.cuda.matrices import Plain

CHUNK, LINE = 512, 1024
"""Values that one program writes, or takes at once of a sum over all streams."""


class StreamOps(Operations):
    """Hyper-connections."""

    def open_streams(self, x: Any, num_streams: int) -> Tensor:
        return written(x).repeat(1, num_streams)

    def read_streams(self, streams: Any, connection: HyperConnection) -> tuple[Tensor, Tensor]:
        return self._read(written(streams), connection, connection.clamp)

    def read_soft_streams(self, streams: Any, connection: SoftConnection) -> tuple[Tensor, Tensor]:
        return self._read(written(streams), connection, None)

    def _read(
        self, streams: Tensor, connection: HyperConnection | SoftConnection, clamp: float | None
    ) -> tuple[Tensor, Tensor]:
        """clamp: of the logits that mix; None: of a connection that begins with a softmax."""
        tokens, n = len(streams), connection.num_streams
        hidden = streams.shape[1] // n
        logits = self._logits(streams, connection)
        writes = logits.shape[1] > n
        x = torch.empty(tokens, hidden, dtype=torch.float32, device=streams.device)
        shares = torch.empty(tokens, n + n * n if writes else 0, dtype=torch.float32, device=streams.device)
        kernels.read_kernel[(tokens, -(-hidden // CHUNK))](
            streams, logits, connection.scale, connection.base, x, shares if writes else x, hidden, clamp or 0.0,
            connection.eps,
            STREAMS=n, N=triton.next_power_of_2(n), CHUNK=CHUNK, ITERATIONS=connection.iterations,
            IS_SOFT=clamp is None, WRITES=writes, num_warps=4,
        )  # fmt: skip
        return x, shares

    def _logits(self, streams: Tensor, connection: HyperConnection | SoftConnection) -> Tensor:
        """The connection's matrix times rows over their root mean square: [tokens, shares]."""
        held, (tokens, width) = connection.weight.weight.held, streams.shape
        if self._are_few(tokens) and isinstance(held, Plain) and connection.weight.bias is None:
            logits = torch.empty(tokens, held.rows, dtype=torch.float32, device=streams.device)
            kernels.logits_kernel[(held.rows, tokens)](
                streams, held.values, logits, width, held.rows, connection.norm_eps, LINE=LINE, num_warps=8
            )
            return logits
        normed = torch.nn.functional.rms_norm(streams, (width,), eps=connection.norm_eps)
        [projected] = self._products.project(normed, (connection.weight,), None, None)
        return written(projected).contiguous()

    def write_streams(self, streams: Any, shares: Tensor, y: Any) -> Tensor:
        rows, new = written(streams), written(y)
        hidden, out = new.shape[1], torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        kernels.write_kernel[(len(rows), -(-hidden // CHUNK))](
            rows, shares, new, out, new.stride(0), hidden, STREAMS=rows.shape[1] // hidden, CHUNK=CHUNK, num_warps=4
        )
        return out

    def mean_streams(self, streams: Any, num_streams: int) -> Tensor:
        return reduce(torch.add, written(streams).chunk(num_streams, -1)) / num_streams
