"""Draws from the same logits' place again and again: captured, one operation after another, by torch, by the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.drawing import Draw
from pocketllm.engine.backends.cuda.steps.drawing import sampling
from pocketllm.engine.backends.cuda.steps.drawing.drawer import CudaDrawer
from pocketllm.engine.backends.cuda.steps.drawing.replayed import Replayed
from pocketllm.engine.backends.cuda.steps.graphs import Graph
from tests.cuda import draws
from tests.cuda.drawn_by_torch import filtered
from tests.fake_device import drawn

MORE: tuple[dict[str, Any], ...] = (
    {"temperature": 100.0, "top_k": 7, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999, "min_p": 1.0},
    {"temperature": 3.0, "top_p": 0.7, "min_p": 0.9},
)
CLOSER: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.3, "share": float(np.nextafter(1, 0))},
)
"""What CLOSE is asked, in turn."""
FLAT, CLOSE = 2, 3
"""A row whose logits are all equal, and one whose logits are further apart than their weights are."""
WAYS = 4
"""Greedy, without and with what sorts, and edited."""


def check(device: torch.device, random: Any, vocab: int, num_rows: int, turns: int) -> None:
    """Parameters and logits change every time, and every fourth time draws are of the same way."""
    counted: list[int] = []
    replaying, eager = a_drawer(device, True, counted), a_drawer(device, False, counted)
    place, others = torch.empty(num_rows, vocab, device=device), list[tuple[int, Draw]]()
    for turn in range(turns * WAYS):
        logits = some_logits(random, num_rows, vocab)
        place.copy_(torch.from_numpy(logits))
        wanted = some_draws(random, vocab, num_rows, turn)
        got = ids(replaying, place, wanted)
        assert got == ids(eager, place.clone(), wanted), f"what was captured draws otherwise, turn {turn}"
        check_by_torch(eager, place, wanted, got)
        others += [
            (turn, draw)
            for draw, token_id in zip(wanted, got, strict=True)
            if draw.row != CLOSE and drawn(logits[draw.row], draw).token_id != token_id
        ]
        one = wanted[0]
        alone = ids(eager, place[one.row : one.row + 1], [replace(one, row=0)])
        assert alone == got[:1], "a row's draw depends on its company"
    assert len(counted) == WAYS, counted
    # the host sums float32, which may put one token more or less of a large vocabulary beyond top-p's edge
    assert len(others) * 200 <= turns * WAYS * num_rows, others


def a_drawer(device: torch.device, captures: bool, counted: list[int]) -> CudaDrawer:
    """One that captures as it does on a GPU; on the CPU one that keeps what it was given to run, for later runs."""
    drawer = CudaDrawer(device, lambda: counted.append(1))
    if not captures or device.type == "cpu":
        drawer.replayed = Replayed(kept if captures else None, lambda: counted.append(1))
    return drawer


def kept(run: Callable[[], None]) -> Graph:
    """A graph as far as one is asked for anything."""
    graph: Any = SimpleNamespace(replay=run)
    return Graph(graph, None)


def some_logits(random: Any, num_rows: int, vocab: int) -> Any:
    logits = (random.standard_normal((num_rows, vocab)) * 3).astype(np.float32)
    logits[1::2] = np.round(logits[1::2])
    logits[FLAT], logits[CLOSE] = 0.5, random.standard_normal(vocab) * 3e-8
    return logits


def some_draws(random: Any, vocab: int, num_rows: int, turn: int) -> list[Draw]:
    """Of most rows, in any order; some greedy, some with a temperature where the way has one."""
    found = []
    for number, row in enumerate(random.permutation(num_rows)[: num_rows - 1].tolist()):
        kinds = CLOSER if row == CLOSE else (*draws.KINDS, *MORE)
        draw = Draw(row, **{"share": float(random.random()), **kinds[(number + turn) % len(kinds)]})
        if turn % WAYS == 0:
            draw = replace(draw, temperature=0.0)
        elif turn % WAYS == 1:
            draw = replace(draw, top_k=0, top_p=1.0)
        elif turn % WAYS == 3 and number % 2:
            draw = replace(draw, edits=tuple(draws.an_edit(random, vocab, kind) for kind in range(number % 4)))
            draw = replace(draw, allowed=random.random(vocab) < 0.3 if number % 5 else None)
        found.append(draw)
    return found


def ids(drawer: CudaDrawer, logits: torch.Tensor, wanted: Sequence[Draw]) -> list[int]:
    return [one.token_id for one in drawer.draw(logits, wanted).wait()]


def check_by_torch(drawer: CudaDrawer, logits: torch.Tensor, wanted: Sequence[Draw], got: Sequence[int]) -> None:
    """The tokens of rows with a temperature, where nothing was edited, by operations on whole rows."""
    hot = [
        (draw, token_id)
        for draw, token_id in zip(wanted, got, strict=True)
        if draw.temperature > 0 and draw.allowed is None and not draw.edits
    ]
    for first in range(0, len(hot), sampling.ROWS_AT_ONCE):
        some = hot[first : first + sampling.ROWS_AT_ONCE]
        table = [[float(getattr(draw, name)) for name in sampling.PARAMS] for draw, _ in some]
        rows = logits[[draw.row for draw, _ in some]]
        params = torch.tensor(table, dtype=torch.float64, device=logits.device)
        assert filtered(rows, rows.amax(1), params).tolist() == [token_id for _, token_id in some]
