"""A mixture of experts on the reference backend: routes, weights and sums against numpy, token by token."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.backends.api.mixture import Experts, Gating, Routing
from pocketllm.engine.backends.api.ops import Projection
from pocketllm.engine.backends.reference.mixture import route
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.native import cpu_ops

NUM_EXPERTS, WIDTH, INNER = 6, 20, 12
ROUTINGS = {
    "softmax, normalized": Routing(2, Gating.SOFTMAX, normalized=True),
    "softmax as it is": Routing(3, Gating.SOFTMAX, normalized=False),
    "sigmoid, scaled": Routing(2, Gating.SIGMOID, normalized=True, scale=2.5),
    "one expert": Routing(1, Gating.SOFTMAX, normalized=False),
    "all experts": Routing(NUM_EXPERTS, Gating.SIGMOID, normalized=True),
    "a bias that chooses": Routing(2, Gating.SIGMOID, normalized=True, bias=torch.tensor([0, 0, 9.0, 0, 0, 0.5])),
}


def normal(*shape: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(ops: ReferenceOps, routing: Routing) -> tuple[Experts, tuple[npt.NDArray[np.float32], ...]]:
    """A layer's experts, and the same matrices in numpy: router, gate, up, down."""
    router = normal(NUM_EXPERTS, WIDTH, seed=1)
    matrices = [
        normal(NUM_EXPERTS, *shape, seed=2 + i) for i, shape in enumerate([(INNER, WIDTH)] * 2 + [(WIDTH, INNER)])
    ]
    gate, up, down = (ops.load_experts(m.view(np.uint8).reshape(-1), "F32", m.shape) for m in matrices)
    return Experts(Projection(torch.from_numpy(router)), gate, up, down, routing), (router, *matrices)


def one_token(x: Any, routing: Routing, router: Any, gate: Any, up: Any, down: Any) -> Any:
    logits = router @ x
    if routing.gating is Gating.SOFTMAX:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    bias = np.zeros(NUM_EXPERTS) if routing.bias is None else routing.bias.numpy()
    used = sorted(range(NUM_EXPERTS), key=lambda expert: -(scores[expert] + bias[expert]))[: routing.num_used]
    total = sum(scores[expert] for expert in used) if routing.normalized else 1.0
    out = np.zeros(WIDTH)
    for expert in used:
        opened = gate[expert] @ x
        made = down[expert] @ (opened / (1 + np.exp(-opened)) * (up[expert] @ x))
        out += scores[expert] / total * routing.scale * made
    return out


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_a_mixture_is_the_weighted_sum_of_its_experts(routing: Routing, tokens: int) -> None:
    ops = ReferenceOps()
    layer, matrices = experts(ops, routing)
    x = normal(tokens, WIDTH, seed=9)
    got = ops.mixture(torch.from_numpy(x), layer)

    expected = [one_token(row, routing, *matrices) for row in x.astype(np.float64)]
    assert np.allclose(got.numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_a_row_has_the_same_bits_whatever_experts_its_neighbors_use(routing: Routing) -> None:
    ops = ReferenceOps()
    layer, _ = experts(ops, routing)
    x = torch.from_numpy(normal(100, WIDTH, seed=10))
    whole = ops.mixture(x, layer)
    random = np.random.default_rng(3)
    for _ in range(20):
        some = torch.from_numpy(random.permutation(100)[: random.integers(1, 60)])

        assert torch.equal(ops.mixture(x[some], layer), whole[some])


def test_of_equal_scores_the_expert_with_the_lower_index_is_used() -> None:
    chosen, weights = route(torch.zeros(3, NUM_EXPERTS), Routing(3, Gating.SOFTMAX, normalized=True))

    assert chosen.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(weights, torch.full((3, 3), 1 / 3))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0]])
    routing = Routing(2, Gating.SIGMOID, normalized=False, bias=torch.tensor([-9.0, 0.0, 0.0, 9.0]))
    chosen, weights = route(logits, routing)

    assert chosen.tolist() == [[3, 1]]
    assert torch.allclose(weights, torch.sigmoid(logits[:, [3, 1]]))


def test_no_rows_give_none() -> None:
    ops = ReferenceOps()
    layer, _ = experts(ops, ROUTINGS["softmax, normalized"])

    assert ops.mixture(torch.empty(0, WIDTH), layer).shape == (0, WIDTH)


# -- other backends ----------------------------------------------------------------------------------------------------
GROUPED = {
    "best of a group": Routing(2, Gating.SOFTMAX, normalized=False, num_groups=3, num_groups_used=1),
    "best two of a group, biased": Routing(
        3, Gating.SIGMOID, normalized=True, scale=2.5, num_groups=3, num_groups_used=2, best_of_group=2,
        bias=torch.tensor([0.0, 0.4, -0.3, 0.2, 0.5, 0.0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("routing", GROUPED.values(), ids=GROUPED.keys())
def test_a_native_mixture_keeps_to_groups(routing: Routing) -> None:
    native = cpu_ops(activation_dtype="float32", kv_dtype="float32")
    x, reference = normal(40, WIDTH, seed=9), ReferenceOps()
    layer, matrices = experts(reference, routing)
    gate, up, down = (native.load_experts(m.view(np.uint8).reshape(-1), "F32", m.shape) for m in matrices[1:])
    router = Projection(native.load_matrix(matrices[0].view(np.uint8).reshape(-1), "F32", matrices[0].shape))
    bias = None if routing.bias is None else native.load_vector(routing.bias.numpy())
    got = np.asarray(native.mixture(x, Experts(router, gate, up, down, replace(routing, bias=bias))))

    ungrouped = replace(layer, routing=replace(routing, num_groups=1, num_groups_used=1))
    expected = reference.mixture(torch.from_numpy(x), layer).numpy()
    assert not np.allclose(reference.mixture(torch.from_numpy(x), ungrouped).numpy(), expected, atol=1e-2)
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-4)
