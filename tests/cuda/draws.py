"""Draws of the device's sampler against the host's own functions; on a GPU and in Triton's interpreter.

usage: python -m tests.cuda.draws [host] [replays] [times]   (on a GPU)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.engine.backends.api.drawing import FORBIDDEN, NOT_FINITE, Draw, Drawn, Edit
from pocketllm.engine.backends.cuda.steps.drawing.drawer import CudaDrawer
from tests.cuda.words import asked
from tests.fake_device import drawn

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 100.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 0.7, "top_k": 10**6},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 3.0, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
)
"""What rows ask for, over and over."""


def check(drawer: Any, random: Any, on_device: Any, vocab: int, num_rows: int = 24, repeats: int = 1) -> None:
    """A step's rows in one call, of which some are left out; on_device: from numpy to the device's tensor."""
    check_resolved(drawer, on_device)
    logits = (random.standard_normal((num_rows, vocab)) * 3).astype(np.float32)
    logits[1::2] = np.round(logits[1::2])  # ties everywhere
    rows = random.permutation(num_rows)[: num_rows - 3].tolist()
    draws = [a_draw(random, vocab, int(row), number) for number, row in enumerate(rows)]
    logits[rows[0], vocab // 2], logits[rows[1]], logits[rows[2], 0] = np.nan, -np.inf, np.inf
    draws[3] = replace(draws[3], allowed=np.zeros(vocab, np.bool_))
    want = [drawn(logits[draw.row], draw) for draw in draws]
    assert [one.token_id for one in want[:4]] == [NOT_FINITE] * 3 + [FORBIDDEN]
    for _ in range(repeats):  # logits at the same place again are where work is captured
        compare(drawer.draw(on_device(logits), draws).wait(), want, draws)


def check_resolved(drawer: Any, on_device: Any) -> None:
    """What a step takes in the place of drawn tokens; of a row that got none, a token that is there."""
    drawer.drawn[:3] = on_device(np.array([4, NOT_FINITE, 9], np.int32))
    ids = on_device(np.array([7, -1, -3, 5, -2], np.int32))
    drawer.resolve(ids)
    assert ids.tolist() == [7, 4, 9, 5, 0]


def a_draw(random: Any, vocab: int, row: int, number: int) -> Draw:
    """One of KINDS, with more than that for some."""
    draw = Draw(row, **KINDS[number % len(KINDS)], share=float(random.random()))
    if number % 3 == 0:
        draw = replace(draw, num_logprobs=number % 7)
    if number % 4 == 1:
        length = vocab + 32 if number % 8 == 1 else vocab - 3
        draw = replace(draw, allowed=random.random(length) < 0.7)
    if number % 5 == 2:
        draw = replace(draw, edits=tuple(an_edit(random, vocab, kind) for kind in range(4)))
    return draw


def an_edit(random: Any, vocab: int, kind: int) -> Edit:
    """A ban, a bias, a factor or a penalty on a few tokens."""
    ids = random.permutation(vocab)[:9].astype(np.int64)
    values = [np.full(9, -np.inf), random.standard_normal(9), 0.5 + random.random(9), -random.random(9)][kind]
    return Edit(ids, values.astype(np.float32), divides=kind == 2)


def compare(got: Sequence[Drawn], want: Sequence[Drawn], draws: Sequence[Draw]) -> None:
    """The same tokens and the same likeliest ones; log-probabilities to the rounding of a sum in float64."""
    for one, other, draw in zip(got, want, draws, strict=True):
        assert one.token_id == other.token_id, (draw, one, other)
        if other.token_id < 0:
            continue
        assert one.top_ids == other.top_ids, draw
        np.testing.assert_allclose(
            [one.logprob, *one.top_logprobs], [other.logprob, *other.top_logprobs], rtol=1e-12, atol=1e-12
        )


def check_on_gpu() -> None:
    """Logits come from the same places again and again, so that what draws from them is captured."""
    places: dict[Any, torch.Tensor] = {}

    def on_device(array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return places.setdefault((host.shape, host.dtype), torch.empty_like(host, device="cuda")).copy_(host)

    drawer = CudaDrawer(torch.device("cuda"), lambda: None)
    for seed, vocab in enumerate((50, 5000, 49152, 128256)):
        check(drawer, np.random.default_rng(seed), on_device, vocab, repeats=3)
    print("draws are the host's")


def check_replays_on_gpu() -> None:
    """More rows than are sorted at once, and vocabularies of models."""
    from tests.cuda import draw_replays

    for seed, (vocab, num_rows) in enumerate(((50, 40), (5000, 128), (49152, 8), (49152, 33), (128256, 40))):
        draw_replays.check(torch.device("cuda"), np.random.default_rng(seed), vocab, num_rows, turns=6)
    print("captured draws are those of single operations, of torch and of the host")


def show_times() -> None:
    """Of draws of every kind."""
    from tests.cuda import draw_times

    draw_times.show()


if __name__ == "__main__":
    PARTS = {"host": check_on_gpu, "replays": check_replays_on_gpu, "times": show_times}
    for name in asked(__doc__, PARTS):
        PARTS[name]()
