"""Cases of `op_latency` on the CUDA backend, at the sizes of a checkpoint without a file: each timed once.

usage: python -m tests.cuda.operations SHAPE TYPES TYPE … | rest   (`file.SHAPES`, `file.TYPES`; TYPE: products of these
quant types alone, rest: everything else; so that several processes compile kernels for a benchmark that follows)
       TRITON_INTERPRET=1 python -m tests.cuda.operations interpreted   (small ones, each called once)
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from pocketllm.bench.probes.cases import LARGE, Case, Extent, Setting, Shape
from pocketllm.bench.probes.operations import make_cases, projections
from pocketllm.bench.probes.timing import Launch
from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.api.device import DeviceFacts
from pocketllm.engine.backends.api.ops import Ops
from pocketllm.engine.backends.cuda.device import declare
from pocketllm.engine.backends.cuda.layers.operands import written
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.backends.cuda.steps.probe import CudaProbe
from pocketllm.engine.models.contract import KVSpec
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import refuse

TINY = Extent(
    rows=(1, 2, 33),
    matrices=((32, 256),),
    steps=((1, 20), (2, 20)),
    mixture=Shape(256, 256, 4, 2, 16, experts=(4, 2), expert_inner=256, mark="tiny"),
)
TINY_MODEL = (1, 64, 64, 2, 1, 32, 64)


def engine_of(sizes: tuple[int, ...], types: tuple[str, str, str], device: str, quant_types: frozenset[str]) -> Any:
    """As much of an engine as cases are made of."""
    layers, _, _, _, kv_heads, head_dim, _ = sizes
    checkpoint: Any = Synthetic(*sizes, types=types)
    checkpoint.architecture = "llama"
    capability = declare(DeviceFacts("", "", 1, 0, 0, frozenset(), ("a GPU",)), BackendOptions())
    capability = replace(capability, quant_types=quant_types or capability.quant_types)
    where = torch.device(device)
    backend = Backend(capability, cast(Ops, CudaOps(device=device)), CudaProbe(where, written))
    model = SimpleNamespace(kv_spec=KVSpec(layers, kv_heads, head_dim, head_dim))
    return SimpleNamespace(backend=backend, checkpoint=checkpoint, model=model)


def interpreted() -> None:
    """Every kind of case can be called, and what torch has beside it gives as many rows."""
    engine = engine_of(TINY_MODEL, ("Q8_0", "Q8_0", "Q8_0"), "cpu", frozenset({"Q4_K", "F32"}))
    cases = make_cases(engine, TINY)
    for case in cases:
        engine.backend.probe.finish(None if case.reads_back else case.call())
        for call in case.peer:
            assert call().shape[-1] > 0, case.name
    told = {case.op for case in cases}
    assert told == {
        *("project", "attention", "store_kv", "rms_norm", "rope", "rope_angles", "silu_mul", "add", "take", "to_numpy"),
        *("embed", "mixture", "draw"),
    }, told
    [product] = [case for case in cases if case.name == "project Q4_K 256→32 ×2"]
    assert product.peer[0]().shape == product.call()[0].shape
    same = [case.peer for case in cases if case.shape == product.shape and case.rows == product.rows]
    assert len({id(peer) for peer in same}) == 1
    [drawn] = [case for case in cases if case.name == "draw greedy 64 ×8"]
    assert len(drawn.call()) == 8
    launch = Launch(engine.backend, product.calls)
    assert launch.how == "call by call: a CPU has no graphs"
    weight = product.call.args[1].weight
    copy = engine.backend.probe.copy(weight)
    assert torch.equal(copy.held.words, weight.held.words)
    assert copy.held.words.data_ptr() != weight.held.words.data_ptr()


def timed(cases: Sequence[Case], engine: Any) -> None:
    """One line a case."""
    for case in cases:
        own = Launch(engine.backend, case.calls, case.reads_back)
        beside = f" · torch {1e6 * Launch(engine.backend, case.peer).call_s():.1f} µs" if case.peer else ""
        print(f"{case.name}: {1e6 * own.call_s():.1f} µs{beside} ({own.how})", flush=True)


def main() -> None:
    if sys.argv[1:] == ["interpreted"]:
        interpreted()
        return
    from tests.cuda.file import SHAPES, TYPES

    match sys.argv[1:]:
        case [shape, types, *names] if shape in SHAPES and types in TYPES and names:
            pass
        case _:
            known = f"SHAPE is one of {', '.join(SHAPES)}; TYPES one of {', '.join(TYPES)}"
            refuse(__doc__, f"SHAPE, TYPES and a TYPE or rest are needed, or interpreted: {known}")
    is_rest = names == ["rest"]
    engine = engine_of(SHAPES[shape], TYPES[types], "cuda", frozenset() if is_rest else frozenset(names))
    if is_rest:
        timed(make_cases(engine, replace(LARGE, matrices=())), engine)
    else:
        timed(list(projections(Setting(engine, LARGE))), engine)


if __name__ == "__main__":
    main()
