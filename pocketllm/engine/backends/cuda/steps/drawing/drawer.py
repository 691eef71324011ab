"""The CUDA backend's part of sampling: what the host says goes up in few copies, and ids alone come back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.drawing import Draw, Drawn
from pocketllm.engine.backends.cuda.kernels.draw import resolve_kernel
from pocketllm.engine.backends.cuda.steps.batch import upload
from pocketllm.engine.backends.cuda.steps.drawing import sampling
from pocketllm.engine.backends.cuda.steps.graphs import Graph, Mark, capture

MOST_ROWS = 128
"""Rows of logits that a step has at most where tokens are drawn from them."""
MOST_GRAPHS = 64
RESOLVED_AT_ONCE = 256
Place = tuple[int, int, int]
"""Of logits in memory: address, rows and length of a row."""


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
    """Where token ids arrive in the host's memory; two are enough, for one step at most is in flight beside another."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.token_ids = torch.empty(MOST_ROWS, dtype=torch.int32, pin_memory=is_cuda)
        self.arrived = Mark() if is_cuda else None


class CudaDrawer:
    """Obeys `api.drawing.Drawer`; on the CPU too, where Triton's interpreter runs the kernels."""

    def __init__(self, device: torch.device, on_capture: Callable[[], None]) -> None:
        """on_capture: called when the kernels of a draw have been captured."""
        self._device = device
        self._on_capture = on_capture
        self.drawn = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        """The last token of each row, where captured steps find it."""
        self._largest = torch.zeros(MOST_ROWS, dtype=torch.float32, device=device)
        self._seen: dict[Place, Graph | None] = {}
        self._boxes = [Box(device) for _ in range(2)]

    def resolve(self, input_ids: Tensor) -> None:
        """Put drawn tokens in the places of what stands for them, in a step's own copy of its input: int32 [tokens]."""
        grid = (triton.cdiv(len(input_ids), RESOLVED_AT_ONCE),)
        resolve_kernel[grid](input_ids, self.drawn, len(input_ids), BLOCK=RESOLVED_AT_ONCE, num_warps=1)

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """cap · tanh(logits / cap)."""
        return torch.tanh(logits / cap) * cap

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Pending:
        """Nothing here waits for the device."""
        assert len(logits) <= MOST_ROWS, len(logits)
        edited = self._edited(logits, draws)
        if edited is logits:
            self._likeliest(logits)
        else:
            sampling.likeliest(edited, logits, self.drawn, self._largest)
        hot = [draw for draw in draws if draw.temperature > 0]
        for first in range(0, len(hot), sampling.ROWS_AT_ONCE):
            self._draw_filtered(edited, hot[first : first + sampling.ROWS_AT_ONCE])
        return self._send(logits, draws)

    def _likeliest(self, logits: Tensor) -> None:
        """Captured once logits come from a place for the second time, as those of captured steps do."""
        place = logits.data_ptr(), len(logits), logits.stride(0)
        graph = self._seen.get(place)
        if graph is not None:
            graph.graph.replay()
            return

        def run() -> None:
            sampling.likeliest(logits, logits, self.drawn, self._largest)

        if self._device.type == "cuda" and place in self._seen:
            self._seen[place] = capture(run, None)
            self._on_capture()
        elif len(self._seen) < MOST_GRAPHS:
            self._seen[place] = None
        run()

    def _draw_filtered(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        table = [[getattr(draw, name) for name in sampling.PARAMS] for draw in draws]
        params = self._sent(np.array(table, np.float64))
        rows = self._sent(np.array([draw.row for draw in draws], np.int64))
        sorts = any(draw.top_k > 0 or draw.top_p < 1 for draw in draws)
        drawn = sampling.filtered(logits[rows], self._largest[rows], params, sorts).int()
        likeliest = self.drawn[rows]
        self.drawn[rows] = torch.where(likeliest < 0, likeliest, drawn)

    # -- what the host changes ---------------------------------------------------------------------------------------
    def _edited(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """The logits themselves where nothing is changed, otherwise a copy with the changes."""
        masked = [draw for draw in draws if draw.allowed is not None]
        if not masked and not any(draw.edits for draw in draws):
            return logits
        edited, vocab = logits.contiguous().clone(), logits.shape[1]
        if masked:
            rows = self._sent(np.array([draw.row for draw in masked], np.int64))
            allowed = self._sent(np.stack([as_long_as(vocab, draw.allowed) for draw in masked]))
            edited[rows] = torch.where(allowed, edited[rows], -torch.inf)
        flat = edited.view(-1)
        for number in range(max(len(draw.edits) for draw in draws)):
            now = [(draw.row, draw.edits[number]) for draw in draws if len(draw.edits) > number]
            places = self._sent(np.concatenate([row * vocab + edit.ids for row, edit in now]))
            values = self._sent(np.concatenate([edit.values for _, edit in now]))
            divides = self._sent(np.repeat([edit.divides for _, edit in now], [len(edit.ids) for _, edit in now]))
            some = flat[places]
            divided = torch.where(some > 0, some / values, some * values)
            flat[places] = torch.where(divides, divided, some + values)
        return edited

    def _sent(self, array: npt.NDArray[Any]) -> Tensor:
        return upload(array, self._device)

    # -- what comes back ---------------------------------------------------------------------------------------------
    def _send(self, logits: Tensor, draws: Sequence[Draw]) -> Pending:
        box, other = self._boxes
        self._boxes = [other, box]
        box.token_ids.copy_(self.drawn, non_blocking=True)
        wanting = [draw for draw in draws if draw.num_logprobs is not None]
        reports = None
        if wanting:
            rows = self._sent(np.array([draw.row for draw in wanting], np.int64))
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


def as_long_as(vocab: int, allowed: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
    """A mask of the vocabulary's length; what it does not name is forbidden."""
    assert allowed is not None
    return np.pad(allowed[:vocab], (0, max(vocab - len(allowed), 0)))
