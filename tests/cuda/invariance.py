"""`--batch-invariant` on the CUDA backend, in Triton's interpreter or on a GPU: rows of a kind beside others, and whole
engines over tiny checkpoints.

usage: python -m tests.cuda.invariance [products] [attention] [mixtures] [NAME …]
           (TRITON_INTERPRET=1 without a GPU; NAME: of tests/oracles)
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends import select
from pocketllm.engine.backends.api.attention import AttentionSpec
from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendBid, BackendOptions
from pocketllm.engine.backends.api.device import read_facts
from pocketllm.engine.backends.api.ops import Norm, Ops, Projection
from pocketllm.engine.backends.cuda import attention as cuda_attention
from pocketllm.engine.backends.cuda.device import declare
from pocketllm.engine.backends.cuda.matrices import PLAIN
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.interpreted import batch_of, blocks, rows
from tests.cuda.mixtures import DEVICE, SOFTMAX, Case
from tests.cuda.words import asked

ORACLES = Path(__file__).parents[1] / "oracles"
RANDOM = np.random.default_rng(0)
LENGTH, TOKENS, BLOCK = 5, 2, 4
"""Of the prompt that is looked at, and of its answer: with blocks of 4 its last token is a piece by itself."""
Answer = tuple[Any, ...]
Computed = Callable[[CudaOps, torch.Tensor], torch.Tensor]


# -- rows of one kind
def products() -> None:
    """Packed and plain matrices, normed rows, of answers and of prompts."""
    for kind, out, width in (("Q4_K", 40, 512), ("F16", 5, 72), ("BF16", 5, 72), ("F32", 5, 72)):
        data = blocks(kind, out, width) if kind == "Q4_K" else floats(kind, out, width)
        weight = RANDOM.standard_normal(width).astype(np.float32)

        def projected(
            ops: CudaOps, x: torch.Tensor, kind: str = kind, out: int = out, data: Any = data, weight: Any = weight
        ) -> Any:
            matrix, norm = ops.load_matrix(data, kind, (out, len(weight))), Norm(ops.load_vector(weight), 1e-5)
            return ops.project(x, Projection(matrix), norm=norm)[0]

        compare(kind, projected, width, is_seen=kind == "Q4_K")


def mixtures() -> None:
    """Experts of packed and of plain matrices, whose items hold more or fewer rows beside more or fewer others."""
    for kind, hidden, inner in (("Q4_0", 64, 32), ("F16", 64, 24)):
        case = Case((kind,) * 3, 3, hidden, inner, dict(SOFTMAX))

        def mixed(ops: CudaOps, x: torch.Tensor, case: Case = case) -> Any:
            return ops.add(x, ops.mixture(x, case.on(ops)))

        compare(f"experts of {kind}", mixed, hidden, is_seen=kind == "Q4_0")


def attention() -> None:
    """A token over more keys than a split has, alone and beside another."""
    cuda_attention.SPLIT, cuda_attention.SPLIT_TILE, length, dim = 16, 16, 24, 16
    spec, table = AttentionSpec(2, 1, dim, dim**-0.5), np.arange(4, dtype=np.int32).reshape(2, 2)
    k, v, q = (RANDOM.standard_normal((2 * length, 2 * dim)).astype(np.float32) for _ in range(3))
    ones, lengths = np.ones(2, np.int32), np.full(2, length, np.int32)
    for is_invariant in (True, False):
        ops = CudaOps("float32", DEVICE, is_invariant=is_invariant)
        cache = ops.new_kv_cache(1, 1, dim, dim, 4, 16)
        ops.store_kv(cache, 0, rows(ops, k[:, :dim]), rows(ops, v[:, :dim]), batch_of(table, lengths, 0 * lengths))
        steps = [batch_of(table[:count], ones[:count], lengths[:count] - 1) for count in (1, 2)]
        alone, beside = (
            ops.to_numpy(ops.attention(rows(ops, q[: step.num_seqs]), cache, 0, step, spec)) for step in steps
        )
        assert np.array_equal(alone[0], beside[0]) is is_invariant, is_invariant
    print("attention is invariant", flush=True)


def floats(kind: str, rows: int, width: int) -> Any:
    return torch.from_numpy(RANDOM.standard_normal((rows, width))).to(PLAIN[kind]).view(torch.uint8).numpy().reshape(-1)


def compare(name: str, compute: Computed, width: int, is_seen: bool) -> None:
    """Rows of each kind have the same bits however many there are; is_seen: without the option a single one has not."""
    x = torch.from_numpy(RANDOM.standard_normal((40, width)).astype(np.float32)).to(DEVICE)
    for is_prompt in (False, True):
        ops = CudaOps("float32", DEVICE, is_invariant=True)
        whole = of_kind(ops, compute, x if is_prompt else x[:32], is_prompt)
        for first, last in ((3, 4), (2, 19)):
            some = of_kind(ops, compute, x[first:last], is_prompt)
            assert torch.equal(some, whole[first:last]), (name, is_prompt, first, last)
    usual = CudaOps("float32", DEVICE)
    alone, beside = (of_kind(usual, compute, x[3:last], False)[:1] for last in (4, 5))
    assert not is_seen or not torch.equal(alone, beside), f"{name}: there was nothing to see"
    print(name, "is invariant", flush=True)


def of_kind(ops: CudaOps, compute: Computed, x: torch.Tensor, is_prompt: bool) -> torch.Tensor:
    """Rows in a step of that kind."""
    ops._products.is_prompt, ops._products.is_decode = is_prompt, not is_prompt
    result = torch.from_numpy(ops.to_numpy(compute(ops, x)))
    ops._products.is_prompt = ops._products.is_decode = False
    return result


# -- engines
def interpret() -> None:
    """Have the engine find this backend on a machine without a GPU, and sums of the interpreter's products not depend
    on how many rows they have: BLAS takes others for them on some processors."""
    multiplied = np.matmul

    def summed_in_double(a: Any, b: Any, dtype: Any = None) -> Any:
        return multiplied(a.astype(np.float64), b.astype(np.float64)).astype(dtype or np.result_type(a, b))

    patch.object(np, "matmul", summed_in_double).start()  # until the process ends
    facts = replace(read_facts(), gpus=("Triton's interpreter",))

    def opened(name: str, wishes: BackendOptions) -> Backend:
        capability = declare(facts, wishes)
        return Backend(capability, cast(Ops, CudaOps(capability.kv_dtype, "cpu", wishes.batch_invariant)))

    def offered(name: str, wishes: BackendOptions) -> list[BackendBid]:
        return [BackendBid(name, declare(facts, wishes), "interpreted")]

    patch.multiple(select, offers=offered, open_backend=opened).start()


def engine(name: str, batch_invariant: bool) -> LLM:
    options: dict[str, Any] = {"kv_dtype": "float32", "block_size": BLOCK, "prefix_cache": False, "max_num_seqs": 8}
    options |= {"backend": "cuda", "max_model_len": 64, "batch_invariant": batch_invariant}
    return LLM(model=str(ORACLES / f"{name}.gguf"), **options)


def answers(llm: LLM, prompts: Sequence[Sequence[int]], **switched: Any) -> list[Answer]:
    """Ids and log-probabilities of prompts that are asked for together; switched: options of the scheduler."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=2)
    one = LLM.from_engine(llm.engine.sibling(**switched)) if switched else llm
    return [(result.token_ids, result.logprobs) for result in one.generate([list(some) for some in prompts], params)]


def whole(name: str) -> None:
    """A request's answer is that of the request alone, in every company and by every way to its first token."""
    prompt = [7 * n % 90 + 3 for n in range(LENGTH)]
    llm = engine(name, batch_invariant=True)
    [alone] = answers(llm, [prompt])
    assert answers(llm, [[5, 6], prompt, [8]])[1] == alone, "in company"
    assert answers(llm, [[8], [5, 6], prompt], prefill_chunk=2)[2] == alone, "in pieces beside answers"
    cached = LLM.from_engine(llm.engine.sibling(prefix_cache=True))
    assert answers(cached, [prompt]) == [alone] == answers(cached, [prompt]), "from the cache"
    longer = [*prompt, *alone[0]]
    assert answers(cached, [longer]) == answers(llm, [longer]), "behind its own answer"

    usual = engine(name, batch_invariant=False)
    pieces = answers(usual, [prompt], prefill_chunk=BLOCK)
    assert pieces != answers(usual, [prompt]), f"{name}: there was nothing to see"
    print(name, "is invariant", flush=True)


PARTS: dict[str, Callable[[], None]] = {"products": products, "mixtures": mixtures, "attention": attention}

if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret()
    for word in asked(__doc__, [*PARTS, *sorted(path.stem for path in ORACLES.glob("*.gguf"))]):
        start = time.perf_counter()
        PARTS.get(word, partial(whole, word))()
        print(f"{word}: {time.perf_counter() - start:.1f} s", flush=True)
