"""Checks of mixtures of experts against the reference backend: in Triton's interpreter, or on a GPU.

usage: python -m tests.cuda.mixtures [types] [routes] [names] [unsure] [kinds] [limited] [handed_on] [steps]
           (TRITON_INTERPRET=1 without a GPU)
       python -m tests.cuda.mixtures [large] [times]   (on a GPU)
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pocketllm.engine.backends.api.compressed import LimitedExperts
from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating, Routing, ScaledExperts
from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cuda.layouts import LAYOUTS
from pocketllm.engine.backends.cuda.matrices import ExpertMatrices
from pocketllm.engine.backends.cuda.mixtures import layer
from pocketllm.engine.backends.cuda.mixtures.groups import Ends, Groups, Source, grouped
from pocketllm.engine.backends.cuda.mixtures.layer import close_one
from pocketllm.engine.backends.cuda.ops import CudaOps
from pocketllm.engine.backends.cuda.packing import unpack
from pocketllm.engine.backends.cuda.products import Rows
from pocketllm.engine.backends.reference.mixture import route
from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.weights.quant_types import BY_NAME
from tests.cuda.interpreted import blocks, rows
from tests.cuda.kernels import clone, timed
from tests.cuda.model import Session, error
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import asked

RANDOM = np.random.default_rng(0)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CUDA, REFERENCE = CudaOps(kv_dtype="float32", device=DEVICE), ReferenceOps()
POISON = 0x7E007E00
"""Two float16 that are no numbers; as a place, far outside of everything."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated holds what must not be read."""
    empty = torch.empty

    def filled(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        if made.dtype == torch.uint8:  # pieces of a file, on their way
            return made.fill_(POISON >> 24)
        return made.fill_(torch.nan if made.is_floating_point() else POISON)

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = empty


class Case:
    """Experts of random blocks, the same on every backend."""

    def __init__(
        self, types: tuple[str, str, str], experts: int, hidden: int, inner: int, routing: dict[str, Any]
    ) -> None:
        self.types, self.routing = types, routing
        self.shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        self.data = [matrices(kind, *shape) for kind, shape in zip(types, self.shapes, strict=True)]
        self.router = RANDOM.standard_normal((experts, hidden)).astype(np.float32) / 16
        self.bias = RANDOM.standard_normal(experts).astype(np.float32) if routing.pop("has_bias", False) else None

    def on(self, ops: Any) -> Experts:
        gate, up, down = (
            ops.load_experts(data, kind, shape)
            for data, kind, shape in zip(self.data, self.types, self.shapes, strict=True)
        )
        router = Projection(ops.load_matrix(self.router.view(np.uint8).reshape(-1), "F32", self.router.shape))
        bias = None if self.bias is None else ops.load_vector(self.bias)
        return Experts(router, gate, up, down, Routing(**self.routing, bias=bias))


def matrices(kind: str, experts: int, out: int, width: int) -> Any:
    """Blocks of matrices whose products are neither tiny nor huge."""
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(RANDOM.standard_normal((experts * out, width)).astype(np.float32) / 8)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8).numpy().reshape(-1)
    return blocks(kind, experts * out, width).reshape(-1)


SOFTMAX: dict[str, Any] = {"num_used": 2, "gating": Gating.SOFTMAX, "normalized": True}


def compared(make: Callable[[Any], Any], twice: bool = False) -> float:
    """Relative error, with what is allocated poisoned; twice: to the same bits."""
    with poisoned():
        got = CUDA.to_numpy(make(CUDA))
        assert not twice or np.array_equal(got, CUDA.to_numpy(make(CUDA)))
    return error(got, REFERENCE.to_numpy(make(REFERENCE)))


def mixed(case: Case, x: Any) -> Callable[[Any], Any]:
    held = {ops: case.on(ops) for ops in (CUDA, REFERENCE)}
    return lambda ops: ops.mixture(rows(ops, x), held[ops])


def types() -> None:
    """Every type in the second product of a row by itself; some in all products, with several rows too."""
    for kind in LAYOUTS:
        inner = max(32, BY_NAME[kind].block_elements)
        case = Case(("Q8_0", "Q8_0", kind), 2, 32, inner, SOFTMAX | {"num_used": 1})
        check_closing(case)
    for kind, counts in (("Q4_0", (3,)), ("IQ4_NL", (2,)), ("F16", (2,))):
        case = Case((kind,) * 3, 3, 64, 24 if kind == "F16" else 32, dict(SOFTMAX))
        for count in counts:
            x = RANDOM.standard_normal((count, 64)).astype(np.float32)
            assert (wrong := compared(mixed(case, x), twice=kind == "Q4_0")) < 1e-3, (kind, count, wrong)
    chosen_by_bias = {"num_used": 2, "gating": Gating.SIGMOID, "normalized": True, "has_bias": True, "scale": 1.5}
    case = Case(("Q4_0",) * 3, 3, 64, 32, chosen_by_bias)
    assert (wrong := compared(mixed(case, RANDOM.standard_normal((1, 64)).astype(np.float32)))) < 1e-4, wrong


def many() -> None:
    """Rows of prompts, with items that are full, and that are not: all ways to hold codes and scales."""
    for kinds in (
        ("Q4_0", "Q8_0", "Q5_1"),
        ("Q5_0", "MXFP4", "Q4_1"),
        ("Q4_K", "Q2_K", "Q6_K"),
        ("F16", "Q8_0", "F16"),
    ):
        inner = 256 if "Q6_K" in kinds else 32
        case = Case(kinds, 3, max(64, inner), inner, dict(SOFTMAX))
        x = RANDOM.standard_normal((40, case.shapes[0][2])).astype(np.float32)
        assert (wrong := compared(mixed(case, x))) < 2e-3, (kinds, wrong)


def check_closing(case: Case) -> None:
    """One expert's down times a row that gates have let through."""
    experts, inner = case.on(CUDA), case.shapes[2][2]
    x = torch.randn(1, inner).to(DEVICE)
    chosen, weights = torch.tensor([1], dtype=torch.int32).to(DEVICE), torch.tensor([0.7]).to(DEVICE)
    with poisoned():
        y = close_one(Rows(x).halves(), chosen, weights, experts, Ends(), None, None)
    want = x.double() @ unpack(experts.down.held).double()[32:].T * 0.7
    assert (wrong := error(y.cpu().numpy(), want.cpu().numpy())) < 1e-4, (case.types, wrong)


def routes() -> None:
    """Every way to choose and to weigh, from logits with ties; several rows at once and each by itself."""
    rows_of = np.round(RANDOM.standard_normal((5, 24)) * 4).astype(np.float32) / 4
    bias, scale = (RANDOM.standard_normal(24).astype(np.float32) for _ in range(2))
    for number, options in enumerate(ROUTINGS):
        has_bias = options.get("has_bias", False)
        routing = {key: value for key, value in options.items() if key != "has_bias"}
        own = Routing(**routing, bias=torch.from_numpy(bias) if has_bias else None)
        chosen, weights = route(torch.from_numpy(rows_of), own)
        logits, ends = torch.from_numpy(rows_of).to(DEVICE), Ends(scale=torch.from_numpy(scale).to(DEVICE))
        own = Routing(**routing, bias=torch.from_numpy(bias).to(DEVICE) if has_bias else None)
        with poisoned():
            groups = grouped(logits, own, ends, are_many=number % 2 == 0)
        assert torch.equal(groups.chosen.cpu(), chosen.int()), number
        assert torch.allclose(groups.weights.cpu(), weights * torch.from_numpy(scale)[chosen], rtol=1e-5), number
        check_groups(groups, chosen.flatten())


def names() -> None:
    """Experts that are named, one of them twice, weighed by scores as small as can be and as large."""
    logits = torch.from_numpy(RANDOM.standard_normal((4, 24)).astype(np.float32)) * 3
    logits[2], logits[3] = -40.0, 30.0
    named = torch.from_numpy(RANDOM.integers(0, 24, (4, 3)).astype(np.int32))
    named[0, 1] = named[0, 0]
    for gating, is_normalized in ((Gating.SIGMOID, False), (Gating.SQRT_SOFTPLUS, True), (Gating.SQRT_SOFTPLUS, False)):
        own = Routing(3, gating, is_normalized, 2.5)
        _, weights = route(logits, own, named.long())
        with poisoned():
            groups = grouped(logits.to(DEVICE), own, Ends(), False, named.to(DEVICE))
        assert torch.equal(groups.chosen.cpu(), named)
        assert torch.allclose(groups.weights.cpu(), weights, rtol=1e-5, atol=0.0), gating
        check_groups(groups, named.flatten())


def check_groups(groups: Groups, experts: torch.Tensor) -> None:
    """Each pair has a slot of its own among those of its expert, in order, and no slot is counted twice."""
    each, count = groups.each, int(groups.num_items)
    slots, counts = groups.slots.cpu().long(), groups.item_counts.cpu()[:count]
    assert torch.equal(groups.pairs.cpu()[slots], torch.arange(len(experts), dtype=torch.int32))
    assert torch.equal(groups.item_experts.cpu()[slots // each], experts.int())
    assert int(counts.sum()) == len(experts)
    assert (slots % each < counts[slots // each]).all()
    for expert in experts.unique():
        assert slots[experts == expert].diff().gt(0).all()


def unsure() -> None:
    """Logits that are no numbers send a row somewhere, and change no other row."""
    logits = torch.from_numpy(RANDOM.standard_normal((3, 24)).astype(np.float32))
    logits[1] = torch.nan
    own = Routing(3, Gating.SOFTMAX, True)
    with poisoned():
        groups = grouped(logits.to(DEVICE), own, Ends(), False)
    chosen, _ = route(logits, own)
    assert torch.equal(groups.chosen.cpu()[[0, 2]], chosen[[0, 2]].int())
    assert 0 <= int(groups.chosen.min()) <= int(groups.chosen.max()) < 24


ROUTINGS: tuple[dict[str, Any], ...] = (
    {"num_used": 4, "gating": Gating.SOFTMAX, "normalized": True},
    {"num_used": 1, "gating": Gating.SOFTMAX, "normalized": False, "scale": 2.5},
    {"num_used": 3, "gating": Gating.SIGMOID, "normalized": True, "has_bias": True},
    {"num_used": 24, "gating": Gating.SIGMOID, "normalized": False},
    {"num_used": 4, "gating": Gating.SOFTMAX, "normalized": False, "num_groups": 6, "num_groups_used": 2},
    {"num_used": 5, "gating": Gating.SIGMOID, "normalized": True, "scale": 0.5, "has_bias": True, "num_groups": 4,
     "num_groups_used": 2, "best_of_group": 2},
    {"num_used": 3, "gating": Gating.SQRT_SOFTPLUS, "normalized": True, "scale": 1.5, "has_bias": True},
)  # fmt: skip


def kinds() -> None:
    """Experts with biases and a bounded gate, with scales and a gelu, behind a norm, and of types that do not match."""
    shape = (3, 64, 32)
    vectors = [RANDOM.standard_normal((3, width)).astype(np.float32) for width in (32, 32, 64, 1)]
    same, mixed_types = Case(("Q8_0",) * 3, *shape, dict(SOFTMAX)), Case(("Q4_0", "Q8_0", "F16"), *shape, dict(SOFTMAX))
    for case in (same, mixed_types):
        held = {ops: case.on(ops) for ops in (CUDA, REFERENCE)}
        for count in (1, 2) if case is same else (1,):
            x, y = (RANDOM.standard_normal((count, 64)).astype(np.float32) * 2 for _ in range(2))

            def bounded(ops: Any, held: Any = held, x: Any = x) -> Any:
                biases = [ops.load_vector(vector) for vector in vectors[:3]]
                return ops.bounded_mixture(rows(ops, x), BoundedExperts(held[ops], *biases, slope=1.702, limit=0.5))

            def scaled(ops: Any, held: Any = held, x: Any = x, y: Any = y) -> Any:
                experts = ScaledExperts(held[ops], ops.load_vector(vectors[3].reshape(-1)))
                return ops.scaled_mixture(rows(ops, x), rows(ops, y), experts)

            for check in (bounded, scaled) if count == 1 and case is same else (bounded,):
                largest = 1e-3 if count == 1 else 3e-3  # two rows have eleven bits
                assert (wrong := compared(check)) < largest, (check.__name__, case.types, count, wrong)


def limited() -> None:
    """Experts and a feed-forward whose halves are limited, or not; experts chosen by scores, or named by token ids."""
    routes, ids = RANDOM.integers(0, 5, (9, 2)).astype(np.int32), RANDOM.integers(0, 9, 40).astype(np.int32)
    soft = {"num_used": 2, "gating": Gating.SQRT_SOFTPLUS, "normalized": True, "scale": 1.5, "has_bias": True}
    for kinds, count, limit in ((("Q8_0",) * 3, 1, 0.3), (("Q4_0", "Q8_0", "F16"), 2, 0.3), (("F32",) * 3, 40, np.inf)):
        case = Case(kinds, 5, 64, 32, dict(soft))
        held = {ops: case.on(ops) for ops in (CUDA, REFERENCE)}
        x = RANDOM.standard_normal((count, 64)).astype(np.float32) * 2

        def through(ops: Any, named: Any, held: Any = held, x: Any = x, limit: float = limit) -> Any:
            return ops.limited_mixture(rows(ops, x), LimitedExperts(held[ops], limit, named), ids[: len(x)])

        largest = 1e-5 if "F32" in kinds else 1e-3 if count == 1 else 3e-3
        for named in (None, routes):
            wrong = compared(lambda ops, through=through, named=named: through(ops, named), twice=True)
            assert wrong < largest, (kinds, named, wrong)

        def opened(ops: Any, x: Any = x, case: Case = case, limit: float = limit) -> Any:
            sizes = ((32, 64), (32, 64), (64, 32))
            gate, up, down = (
                Projection(ops.load_matrix(data[: len(data) // 5], kind, size))
                for data, kind, size in zip(case.data, case.types, sizes, strict=True)
            )
            return ops.project(ops.limited_silu_mul(*ops.project(rows(ops, x), gate, up), limit), down)[0]

        with decode_step():  # of a single row the first product gates itself
            assert (wrong := compared(opened)) < largest, (kinds, wrong)
        gate = rows(CUDA, x)
        want = REFERENCE.limited_silu_mul(rows(REFERENCE, x), rows(REFERENCE, -x), limit)
        assert error(CUDA.to_numpy(CUDA.limited_silu_mul(gate, -gate, limit)), want.numpy()) < 1e-6


def steps() -> None:
    """A prompt and decode steps of a tiny qwen3moe, in which sums and norms are put off: as the reference has them."""
    shape = (1, 64, 32, 2, 1, 32, 8)
    types = ("Q8_0", "Q4_0", "Q5_0")
    sessions = [
        Session(Synthetic(*shape, types=types, scale=0.01, experts=(5, 2)), ops, 2, 16) for ops in (CUDA, REFERENCE)
    ]
    for ids, starts in (([[3, 1, 2]], [0]), ([[5]], [3]), ([[1], [2]], [4, 0])):
        batch = sessions[0].batch(ids, starts)
        with poisoned():
            got = sessions[0].logits(batch)
        assert (wrong := error(got, sessions[1].logits(batch))) < 1e-3, (starts, wrong)


def handed_on() -> None:
    """A row by itself whose experts' sum, with the residual, is what the next product reads behind a norm."""
    data, weight = blocks("Q8_0", 32, 96), RANDOM.standard_normal(96).astype(np.float32)
    for kinds in (("Q8_0",) * 3, ("Q4_0", "Q8_0", "Q8_0"), ("F16",) * 3):
        case = Case(kinds, 3, 96, 32, dict(SOFTMAX))
        held = {ops: case.on(ops) for ops in (CUDA, REFERENCE)}
        last = {ops: Projection(ops.load_matrix(data, "Q8_0", (32, 96))) for ops in held}
        x = RANDOM.standard_normal((1, 96)).astype(np.float32)

        def after(ops: Any, held: Any = held, last: Any = last, x: Any = x) -> Any:
            total = ops.add(rows(ops, x), ops.mixture(rows(ops, x), held[ops]))
            [y] = ops.project(ops.rms_norm(total, Norm(ops.load_vector(weight), 1e-5)), last[ops])
            return y

        with decode_step():
            assert (wrong := compared(after)) < 1e-3, (kinds, wrong)


@contextmanager
def decode_step() -> Iterator[None]:
    """What decode steps put off is put off."""
    CUDA._products.is_decode = True
    try:
        yield
    finally:
        CUDA._products.is_decode = False


def large() -> None:
    """Matrices of a real size, a few rows and many; rows give the same bits beside others. On a GPU."""
    for down in ("Q4_K", "Q6_K"):
        case = Case(("Q4_K", "Q4_K", down), 16, 2048, 768, SOFTMAX | {"num_used": 8})
        held = {ops: case.on(ops) for ops in (CUDA, REFERENCE)}
        x = RANDOM.standard_normal((200, 2048)).astype(np.float32)
        of = {count: CUDA.to_numpy(CUDA.mixture(rows(CUDA, x[:count]), held[CUDA])) for count in (1, 2, 8, 24, 32, 200)}
        want = REFERENCE.to_numpy(REFERENCE.mixture(rows(REFERENCE, x), held[REFERENCE]))
        wrong = {count: f"{error(got, want[:count]):.1e}" for count, got in of.items()}
        same = [np.array_equal(of[32][:count], of[count]) for count in (2, 8, 24)]
        repeats = [np.array_equal(got, CUDA.to_numpy(CUDA.mixture(rows(CUDA, x[:count]), held[CUDA])))
                   for count, got in of.items()]  # fmt: skip
        print(case.types, wrong, f"rows independent {same}, repeats identical {all(repeats)}", flush=True)


def times() -> None:
    """Microseconds of a layer's experts for rows at once, in 30B-A3B's shape; of one row with other warps too."""
    case = Case(("Q4_K", "Q4_K", "Q6_K"), 128, 2048, 768, SOFTMAX | {"num_used": 8})
    first = case.on(CUDA)
    pool = [replace(first, **{name: copied(getattr(first, name)) for name in ("gate", "up", "down")}) for _ in range(6)]
    norm = Norm(torch.ones(2048, device=DEVICE), 1e-6)
    for count in (1, 8, 32, 512):
        x = [torch.randn(count, 2048, device=DEVICE) for _ in pool]
        settings = ((4, 2, 8), (8, 2, 8), (2, 2, 8), (4, 2, 16), (8, 2, 16)) if count == 1 else ((8, 2, 16),)
        for shares, ahead, closing in settings:
            layer.opening_shares = lambda units, shares=shares: shares
            layer.AHEAD, layer.closing_shares = ahead, lambda blocks, closing=closing: closing
            line = [f"{name} {timed(run, len(pool)):.1f}" for name, run in parts_of(x, pool, norm).items()]
            print(f"{count} rows, warps {shares}, ahead {ahead}, {closing}: us {', '.join(line)}", flush=True)


def parts_of(x: list[torch.Tensor], pool: list[Experts], norm: Norm) -> dict[str, Callable[[int], Any]]:
    """What is timed, of each copy of the weights."""
    own = CUDA._mixtures
    return {
        "all": lambda i: own.mixture(x[i], pool[i], Ends()).written(),
        "but the last": lambda i: own.mixture(x[i], pool[i], Ends()),
        "router": lambda i: own._logits(Source(x[i], norm), pool[i]),
    }


def copied(matrices: ExpertMatrices) -> ExpertMatrices:
    return matrices.with_held(clone(matrices.held))


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (types, many, routes, names, unsure, kinds, limited, handed_on, steps, large, times)
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in asked(__doc__, PARTS):
        PARTS[name]()
        print(name, "agrees", flush=True)
