"""`--batch-invariant` on a GPU with models of real shapes, driven without the engine: the same bits alone, in company,
in pieces and behind cached tokens; and the rates.

usage: python -m tests.cuda.invariant_model [8b] [mixture] [types=Q4_K,Q4_K,Q6_K]   (exit 1 when a bit differs)
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.model import Session, decode, option
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import asked

SHAPES: dict[str, tuple[int, ...]] = {
    "8b": (32, 4096, 14336, 32, 8, 128, 128256), "mixture": (4, 2048, 768, 32, 4, 128, 32000),
}  # fmt: skip
EXPERTS = {"mixture": (128, 8)}
PROMPT, KEPT, STEPS, SEQUENCES = 700, 688, 3, 44
"""Tokens of the prompt, and how many of them a prefix cache would have; tokens of its answer; sequences with blocks."""


class Told(Session):
    """Steps that tell which tokens are of answers: single ones, unless it is said."""

    def batch(
        self, ids: list[list[int]], starts: list[int], sequences: list[int] | None = None, told: Any = None
    ) -> ForwardBatch:
        answers = [len(some) == 1 for some in ids] if told is None else told
        return replace(super().batch(ids, starts, sequences), answers=np.array(answers, np.bool_))


class Subject:
    """The request that is looked at, and those beside it: sequence s > 0 of the others has 11 · s tokens."""

    def __init__(self, session: Told, vocab: int) -> None:
        self.session, random = session, np.random.default_rng(3)
        self.ids = random.integers(0, vocab, PROMPT + STEPS).tolist()
        self.others = [random.integers(0, vocab, 11 * number).tolist() for number in range(SEQUENCES)]

    def run(self, cuts: Sequence[int], sequence: int, beside: Sequence[int] = (), first: int = 0) -> list[Any]:
        """Logits behind its prompt and behind each token of its answer. cuts: where steps end before the prompt does;
        beside: sequences that answer in the meantime; first: its tokens before this one are cached."""
        found = []
        ends = [*cuts, PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)]
        for turn, (start, end) in enumerate(zip([first, *ends], ends, strict=False)):
            ids, starts = [self.ids[start:end]], [start]
            for other in beside:
                ids.append([self.others[other][turn]])
                starts.append(len(self.others[other]) + turn)
            told = [start >= PROMPT, *(True for _ in beside)]
            batch = self.session.batch(ids, starts, [sequence, *beside], told)
            found.append(self.session.logits(batch)[0])
        return found[len(cuts) :]

    def fill(self, beside: Sequence[int]) -> None:
        """Have the others' prompts computed."""
        for at in range(0, len(beside), 8):
            some = list(beside[at : at + 8])
            self.session.logits(
                self.session.batch([self.others[s] for s in some], [0] * len(some), some, [False] * len(some))
            )


def check(name: str, session: Told, vocab: int) -> list[str]:
    """Names of what gave other bits."""
    subject, wide = Subject(session, vocab), list(range(5, 5 + 36))
    alone, third = subject.run((), 0), PROMPT // 3
    subject.fill(wide)
    runs = {
        "again": lambda: subject.run((), 0),
        "in pieces of a third, one token and the rest": lambda: subject.run((third, third + 1), 1),
        "its last token a piece by itself": lambda: subject.run((PROMPT - 1,), 2),
        "behind cached tokens": lambda: subject.run((), 0, first=KEPT),
        "beside one answer": lambda: subject.run((third,), 3, wide[:1]),
        "beside 7 answers": lambda: subject.run((third, third + 1), 4, wide[:7]),
        "beside 20 answers": lambda: subject.run((2 * third,), 1, wide[:20]),
        "beside 36 answers": lambda: subject.run((), 2, wide),
    }
    wrong = []
    for what, run in runs.items():
        same = [np.array_equal(got, want) for got, want in zip(run(), alone, strict=True)]
        print(f"{name} {what}: {sum(same)} of {len(same)} rows of logits have the same bits", flush=True)
        wrong += [] if all(same) else [f"{name} {what}"]
    return wrong


def prefill(session: Told, tokens: int) -> None:
    batch, took = session.batch([[7] * tokens], [0]), []
    for _ in range(4):
        start = time.perf_counter()
        session.greedy(batch)
        took.append(time.perf_counter() - start)
    print(f"prefill {tokens}: {tokens / sorted(took)[1]:.0f} tok/s", flush=True)


def main() -> int:
    wrong: list[str] = []
    types: Any = tuple(option("types", "Q4_K,Q4_K,Q6_K").split(","))
    for name in [word for word in asked(__doc__, [*SHAPES, "types"]) if word in SHAPES]:
        start, shape = time.perf_counter(), SHAPES[name]
        checkpoint = Synthetic(*shape, types=types, experts=EXPERTS.get(name))
        session = Told(checkpoint, CudaOps(is_invariant=True), SEQUENCES, 1024)
        session.ops.synchronize()
        print(f"{name} loaded in {time.perf_counter() - start:.1f} s", flush=True)
        wrong += check(name, session, shape[-1])
        for tokens in (512, 1024):
            prefill(session, tokens)
        for streams in (1, 8, 32):
            decode(session, streams, 325)
        print(f"{name} took {time.perf_counter() - start:.1f} s", flush=True)
    print("FAIL: " + "; ".join(wrong) if wrong else "every bit is the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
