"""The CUDA backend's part of sampling: what the host says goes up in few copies, and ids alone come back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.drawing import Draw, Drawn
from pocketllm.engine.backends.cuda.steps.batch import upload
from pocketllm.engine.backends.cuda.steps.drawing import sampling
from pocketllm.engine.backends.cuda.steps.drawing.editing import Editor, Room
from pocketllm.engine.backends.cuda.steps.drawing.kernels.draw import resolve_kernel
from pocketllm.engine.backends.cuda.steps.drawing.replayed import Replayed
from pocketllm.engine.backends.cuda.steps.graphs import Mark, capture

MOST_ROWS = 128
"""Rows of logits that a step has at most where tokens are drawn from them."""
RESOLVED_AT_ONCE = 256


@dataclass(frozen=True)
class Pending:
    """Tokens on their way to the host; see `api.drawing.PendingDraws`."""

    draws: Sequence[Draw]
    token_ids: Tensor
    """[MOST_ROWS] in the host's memory, as is the rest; filled once `arrived` has happened."""
    reports: tuple[Tensor, Tensor] | None
    """Log-probabilities and likeliest ids of those draws that want them, in order."""
    arrived: Mark | None
    """None where there is nothing to wait for."""

    def wait(self) -> Sequence[Drawn]:
        """One for each draw. Other threads run while this one waits."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ids = self.token_ids.tolist()
        if self.reports is None:
            return [Drawn(ids[draw.row]) for draw in self.draws]
        values, top_ids = (part.tolist() for part in self.reports)
        reports = iter(zip(values, top_ids, strict=True))
        return [reported(ids[draw.row], draw.num_logprobs, reports) for draw in self.draws]


def reported(token_id: int, count: int | None, reports: Any) -> Drawn:
    """A token with its log-probabilities, which are the next ones, where it wants some."""
    if count is None:
        return Drawn(token_id)
    (own, *values), ids = next(reports)
    return Drawn(token_id, own, tuple(ids[:count]), tuple(values[:count]))


class Box:
    """What goes up and comes back through the host's memory; two are enough, for one step at most is in flight beside
    another."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.token_ids = torch.empty(MOST_ROWS, dtype=torch.int32, pin_memory=is_cuda)
        self.params = torch.zeros(MOST_ROWS, len(sampling.PARAMS), dtype=torch.float64, pin_memory=is_cuda)
        self.table: npt.NDArray[np.float64] = self.params.numpy()
        """The same memory as params."""
        self.edits = Room(torch.device("cpu"), is_pinned=is_cuda)
        self.arrived = Mark() if is_cuda else None

    def reuse(self) -> None:
        """Return when the last draw that had it has read what went up; it has, when its tokens were waited for."""
        if self.arrived is not None:
            self.arrived.synchronize()


class CudaDrawer:
    """Obeys `api.drawing.Drawer`; on the CPU too, where Triton's interpreter runs the kernels."""

    def __init__(self, device: torch.device, on_capture: Callable[[], None]) -> None:
        """on_capture: called when the kernels of a draw have been captured."""
        self._device = device
        self.drawn = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        """The last token of each row, where captured steps find it."""
        self._largest = torch.zeros(MOST_ROWS, dtype=torch.float32, device=device)
        self._params = torch.zeros(MOST_ROWS, len(sampling.PARAMS), dtype=torch.float64, device=device)
        self._editor = Editor(device)
        self._boxes = [Box(device) for _ in range(2)]
        is_cuda = device.type == "cuda"
        # one pool: draws follow one another on one stream, and nothing in it is read once a draw is over
        by_graph = partial(capture, pool=torch.cuda.graph_pool_handle()) if is_cuda else None
        self.replayed = Replayed(by_graph, on_capture)

    def resolve(self, input_ids: Tensor) -> None:
        """Put drawn tokens in the places of what stands for them, in a step's own copy of its input: int32 [tokens]."""
        grid = (triton.cdiv(len(input_ids), RESOLVED_AT_ONCE),)
        resolve_kernel[grid](input_ids, self.drawn, len(input_ids), BLOCK=RESOLVED_AT_ONCE, num_warps=1)

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """cap · tanh(logits / cap)."""
        return torch.tanh(logits / cap) * cap

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Pending:
        """Nothing here waits for the device, but for what was drawn before the last draw."""
        assert len(logits) <= MOST_ROWS, len(logits)
        box = self._boxes[0]
        box.reuse()
        edited = self._editor.edited(logits, draws, box.edits)
        hot = [draw for draw in draws if draw.temperature > 0]
        has_hot, has_sorts = bool(hot), sampling.sorts(hot)
        if has_hot:
            self._tell(box, hot)

        def run() -> None:
            sampling.likeliest(edited, logits, self.drawn, self._largest)
            if has_hot:
                sampling.sampled(edited, self.drawn, self._largest, self._params, has_sorts)

        self.replayed.run((place_of(logits), place_of(edited), has_hot, has_sorts), run)
        return self._send(logits, draws)

    def _tell(self, box: Box, hot: Sequence[Draw]) -> None:
        """Put what is asked of rows with a temperature where graphs read it; of other rows zeros."""
        box.table.fill(0)
        box.table[[draw.row for draw in hot]] = [
            (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.share) for draw in hot
        ]
        self._params.copy_(box.params, non_blocking=True)

    # -- what comes back ---------------------------------------------------------------------------------------------
    def _send(self, logits: Tensor, draws: Sequence[Draw]) -> Pending:
        box, other = self._boxes
        self._boxes = [other, box]
        box.token_ids.copy_(self.drawn, non_blocking=True)
        wanting = [draw for draw in draws if draw.num_logprobs is not None]
        reports = None
        if wanting:
            rows = upload(np.array([draw.row for draw in wanting], np.int64), self._device)
            most = max(draw.num_logprobs or 0 for draw in wanting)
            values, top = sampling.log_probabilities(logits[rows], self.drawn[rows], most)
            reports = self._received(values), self._received(top)
        if box.arrived is not None:
            box.arrived.record()
        return Pending(draws, box.token_ids, reports, box.arrived)

    def _received(self, x: Tensor) -> Tensor:
        """A copy in the host's memory, there once everything until now has finished."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self._device.type == "cuda")
        return host.copy_(x, non_blocking=True)


def place_of(logits: Tensor) -> tuple[int, int, int, int]:
    """Where logits lie: address, rows, tokens, and from one row to the next."""
    return logits.data_ptr(), *logits.shape, logits.stride(0)
