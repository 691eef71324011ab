"""What a draw costs: the host's time until it goes on, until the token is there, and the device's by graphs alone."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from pocketllm.engine.backends.api.drawing import Draw, Edit
from pocketllm.engine.backends.cuda.steps.drawing.drawer import CudaDrawer

REPEATS, GRAPHS, ASLEEP = 200, 50, 20_000_000
"""ASLEEP: clock cycles of the device in which the host launches GRAPHS of them."""


def show() -> None:
    """A line for each vocabulary, number of rows and kind of draw; medians of 200."""
    print("vocabulary  rows  draw                          host us   whole us   device us")
    for vocab in (49152, 128256):
        for rows in (1, 8, 32):
            drawer = CudaDrawer(torch.device("cuda"), lambda: None)
            logits = torch.randn(rows, vocab, device="cuda") * 3
            for name, draws in kinds(rows, vocab):
                host, whole = took(drawer, logits, draws)
                print(
                    f"{vocab:10}  {rows:4}  {name:26}  {host:9.1f}  {whole:9.1f}  {on_device(drawer):10.1f}", flush=True
                )


def kinds(rows: int, vocab: int) -> Iterator[tuple[str, list[Draw]]]:
    random = np.random.default_rng(0)
    penalty = Edit(random.permutation(vocab)[:300], np.full(300, 1.2, np.float32), divides=True)
    presence = Edit(random.permutation(vocab)[:300], np.full(300, -0.5, np.float32))
    for name, draw in (
        ("greedy", Draw(0)),
        ("temperature", Draw(0, temperature=0.8)),
        ("temperature min-p", Draw(0, temperature=0.8, min_p=0.05)),
        ("top-k 50 top-p 0.95", Draw(0, temperature=0.8, top_k=50, top_p=0.95)),
        ("top-p 0.95, penalties", Draw(0, temperature=0.8, top_p=0.95, edits=(penalty, presence))),
        ("temperature, mask", Draw(0, temperature=0.8, allowed=random.random(vocab) < 0.5)),
    ):
        yield name, [replace(draw, row=row, share=float(random.random())) for row in range(rows)]


def took(drawer: CudaDrawer, logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[float, float]:
    """Microseconds of `draw`, and of it with `wait`."""
    host, whole = [], []
    for turn in range(REPEATS + 10):
        start = time.perf_counter()
        pending = drawer.draw(logits, draws)
        launched = time.perf_counter()
        pending.wait()
        if turn >= 10:
            host.append((launched - start) * 1e6)
            whole.append((time.perf_counter() - start) * 1e6)
    return statistics.median(host), statistics.median(whole)


def on_device(drawer: CudaDrawer) -> float:
    """Microseconds of the graph that was captured last, one behind another."""
    graph = list(drawer.replayed._graphs.values())[-1].graph
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ASLEEP)
    first.record()
    for _ in range(GRAPHS):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3 / GRAPHS
