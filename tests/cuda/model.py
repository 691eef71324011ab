"""A whole model on the GPU: parity with the reference backend, and rates of the 8B shape.

usage: python -m tests.cuda.model [check] [rates] [prefill] [profile] [types=Q4_K,Q6_K,Q6_K] [cases=1@0,8@325]
    [shape=…] [experts=128,8] [kv=float16,int8]   (the 30B mixture: shape=48,2048,768,32,4,128,151936)
"""

import sys
import time
from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.cuda.ops import KV_DTYPES, CudaOps
from pocketllm.engine.backends.cuda.packing import Packed
from pocketllm.engine.backends.cuda.steps.batch import fill, named, sizes_of, upload, views_of
from pocketllm.engine.backends.cuda.steps.graphs import captured_sizes
from pocketllm.engine.models.registry import find_family
from tests.cuda.rounding import Rounding
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import asked

BLOCK = 16
MIXES = (("Q4_K", "Q6_K", "Q6_K"), ("Q8_0", "Q8_0", "Q8_0"), ("IQ4_NL", "Q5_K", "Q4_1"), ("IQ2_XXS", "Q2_K", "Q5_K"))


class Copying(CudaOps):
    """Experts of one type and shape are loaded once and copied, in another order: every layer has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, list[Any]] = {}

    def load_experts(self, data: Any, quant_type: str, shape: Any) -> Any:
        made = self.made.setdefault((quant_type, shape), [])
        made.append(made[0] if made else super().load_experts(data, quant_type, shape))
        packed, turn = made[0].held, len(made) - 1

        def turned(part: torch.Tensor) -> torch.Tensor:
            return part if part.ndim == 1 else part.view(shape[0], -1).roll(turn, 0).view(part.shape)

        parts = (turned(part) for part in (packed.words, packed.high, packed.scales, packed.shared))
        return made[0].with_held(Packed(packed.layout, packed.rows, packed.cols, *parts))


class Session:
    """A loaded model with its cache; sequence s owns blocks of its own, and the state of that number."""

    def __init__(self, checkpoint: Any, ops: Any, sequences: int, length: int) -> None:
        self.ops, self.blocks = ops, -(-length // BLOCK)
        self.model: Any = find_family(checkpoint.metadata["general.architecture"]).load(checkpoint, ops, length)
        self.sequences, self.has_states = sequences, self.model.kv_spec.bytes_per_sequence() > 0
        self.renew()

    def renew(self) -> None:
        """An empty cache."""
        self.cache: Any = None
        self.captured: Any = None  # it has the last one
        self.cache = cache = self.model.kv_spec.allocate(self.ops, self.sequences * self.blocks, BLOCK, self.sequences)
        self.captured = self.ops.capture(lambda batch: self.model.forward(batch, cache), 4096)

    def batch(self, ids: list[list[int]], starts: list[int], sequences: list[int] | None = None) -> ForwardBatch:
        sequences = sequences or list(range(len(ids)))
        counts = np.array([len(some) for some in ids], np.int32)
        ends = np.cumsum(counts)
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        table = np.array([np.arange(s * self.blocks, (s + 1) * self.blocks) for s in sequences], np.int32)
        rows = np.repeat(np.arange(len(ids)), counts)
        return ForwardBatch(
            input_ids=np.concatenate(ids).astype(np.int32),
            positions=positions.astype(np.int32),
            query_start_loc=np.concatenate([[0], ends]).astype(np.int32),
            seq_lens=(np.array(starts) + counts).astype(np.int32),
            block_table=table,
            slot_mapping=table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
            logit_rows=(ends - 1).astype(np.int32),
            state_slots=np.array(sequences if self.has_states else [], np.int32),
        )

    def logits(self, batch: ForwardBatch, captured: bool = True) -> Any:
        return np.array(self.model.logits((self.captured if captured else self.captured.eager)(batch)))

    def padded(self, batch: ForwardBatch) -> Any:
        """Logits of a step with the spare places that a graph of its size has."""
        return np.array(self.model.logits(in_spare_places(self.captured, batch)))

    def greedy(self, batch: ForwardBatch) -> list[int]:
        """The likeliest tokens, found on the device."""
        [logits] = self.ops.project(self.captured(batch), self.model.head)
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens


def in_spare_places(captured: Any, batch: ForwardBatch) -> Any:
    """Hidden states of a step with the spare places that a graph of its size has."""
    sizes = captured_sizes(sizes_of(batch))
    assert sizes is not None
    whole = np.empty(sum(sizes.of_arrays), np.int32)
    fill(whole, views_of(whole, sizes), batch, sizes)
    own = named(upload(whole, captured._device), sizes, takes_all=sizes.rows == 0)
    return captured._forward(own)[: len(batch.logit_rows)]


def check() -> None:
    asked = option("types", "")
    mixes: Any = [tuple(asked.split(","))] if asked else MIXES
    for types, kv_dtype in product(mixes, option("kv", "float16").split(",")):
        shape = (2, 512, 768, 8, 2, 64, 1000)
        sessions = [
            Session(Synthetic(*shape, types=types, scale=0.001 if types[0] == "Q8_0" else 0.01), ops, 9, 512)
            for ops in (CudaOps(kv_dtype), Rounding(kv_dtype))
        ]
        random = np.random.default_rng(1)
        prompts = [random.integers(0, 1000, 5 + 37 * n).tolist() for n in range(8)]
        line = [types[0], kv_dtype]
        cuda, reference = sessions
        whole = [s.logits(s.batch(prompts, [0] * 8)) for s in sessions]
        line.append(f"prefill {error(*whole):.1e}")
        lengths, steps, same, alone_same, spare_same = [len(p) for p in prompts], [], True, True, True
        for _ in range(3):
            token = [[int(random.integers(0, 1000))] for _ in range(8)]
            batch = cuda.batch(token, lengths)
            got, want = cuda.logits(batch), reference.logits(batch)
            same &= np.array_equal(got, cuda.logits(batch, captured=False))
            few = cuda.logits(cuda.batch(token[:3], lengths[:3]))  # one of the widths of the ladder is larger
            spare_same &= np.array_equal(few, got[:3])
            for n in (0, 7):
                alone = cuda.logits(cuda.batch([token[n]], [lengths[n]], [n]))
                alone_same &= np.array_equal(alone[0], got[n])
            steps.append(error(got, want))
            lengths = [length + 1 for length in lengths]
        repeats = all(np.array_equal(got, cuda.logits(batch)) for _ in range(20))
        line += [f"20 repeats identical {repeats}"]
        line += [
            f"decode {max(steps):.1e}",
            f"captured=eager {same}",
            f"alone=batched {alone_same}",
            f"three=eight {spare_same}",
        ]
        print(*line, flush=True)


def error(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def option(name: str, otherwise: str) -> str:
    """What the command line says after `name=`."""
    return next((word.partition("=")[2] for word in sys.argv if word.startswith(f"{name}=")), otherwise)


def rates() -> None:
    start = time.perf_counter()
    most, more, head = option("types", "Q4_K,Q6_K,Q6_K").split(",")
    shape: Any = [int(size) for size in option("shape", "32,4096,14336,32,8,128,128256").split(",")]
    asked = option("experts", "")
    experts: Any = tuple(int(number) for number in asked.split(",")) if asked else None
    cases = [
        (int(streams), int(depth))
        for streams, depth in (case.split("@") for case in option("cases", "1@0,1@4096,8@325,32@325").split(","))
    ]
    sequences, longest = (max(sizes) for sizes in zip(*cases, strict=True))
    ops = Copying()
    session = Session(
        Synthetic(*shape, types=(most, more, head), experts=experts), ops, sequences, max(longest, 4096) + 512
    )
    torch.cuda.synchronize()
    print(f"loaded in {time.perf_counter() - start:.1f} s, {torch.cuda.memory_allocated() / 2**30:.2f} GiB", flush=True)
    ids = np.random.default_rng(0).integers(0, shape[-1], 8192).tolist()
    for kv_dtype in option("kv", "float16").split(","):
        ops._kv_dtype = KV_DTYPES[kv_dtype]
        session.renew()
        print(f"cache in {kv_dtype}:", flush=True)
        if "prefill" in sys.argv:
            prefill(session, ids)
        for streams, depth in cases:
            decode(session, streams, depth)
            if "profile" in sys.argv:
                profile(session, streams, depth)


def prefill(session: Session, ids: list[int]) -> None:
    """Prompts in steps of 2048 tokens."""
    for count in (512, 4096):
        chunk = min(count, 2048)
        batches = [session.batch([ids[at : at + chunk]], [at]) for at in range(0, count, chunk)]
        took = []
        for _ in range(4):
            start = time.perf_counter()
            for batch in batches:
                session.greedy(batch)
            took.append(time.perf_counter() - start)
        print(
            f"prefill {count}: {count / sorted(took)[1]:.0f} tok/s ({[f'{t * 1e3:.1f}' for t in took]} ms)", flush=True
        )


def decode(session: Session, streams: int, depth: int, steps: int = 48) -> None:
    """Greedy steps; tokens go to the host and back, as in the loop."""
    tokens = [[7 + stream] for stream in range(streams)]
    whole, graph = [], []
    for step in range(steps):
        batch = session.batch(tokens, [depth + step] * streams)
        start = time.perf_counter()
        tokens = [[token] for token in session.greedy(batch)]
        whole.append(time.perf_counter() - start)
    for _ in range(8):
        session.ops.synchronize()
        start = time.perf_counter()
        session.captured(batch)
        session.ops.synchronize()
        graph.append(time.perf_counter() - start)
    middle, replay = sorted(whole)[steps // 2], sorted(graph)[4]
    print(
        f"decode {streams} streams at {depth}: {streams / middle:.0f} tok/s "
        f"(step {middle * 1e3:.2f} ms, of it graph {replay * 1e3:.2f} ms)", flush=True,
    )  # fmt: skip


def profile(session: Session, streams: int, depth: int) -> None:
    """Time of each kernel in a replayed step, and how often it is launched."""
    from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]  # not in its list of names
    from torch.profiler import ProfilerActivity

    batch = session.batch([[7]] * streams, [depth + 48] * streams)
    session.greedy(batch)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            session.greedy(batch)
    kernels = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
    print(f"kernels of a step with {streams} streams at {depth}:")
    for name, took in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:12]:
        by_time = np.array(took)
        spread = " ".join(f"{value:.1f}" for value in np.quantile(by_time, (0, 0.25, 0.5, 0.75, 1)))
        print(f"  {by_time.sum() / 3:8.0f} us {len(took) // 3:5d} calls ({spread}) {name[:60]}", flush=True)


if __name__ == "__main__":
    asked(__doc__, ["check", "rates", "prefill", "profile", "types", "cases", "shape", "experts", "kv"])
    if "check" in sys.argv:
        check()
    if "rates" in sys.argv:
        rates()
